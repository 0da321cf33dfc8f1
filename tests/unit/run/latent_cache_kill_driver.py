"""Kills processes that write a latent cache and prints, as JSON, what each one left; started by test_latent_cache_kill.

A program of its own because it forks for every kill, which is only safe without the threads of a test runner. A child
dies at its n-th file-system call (audit event) below the folder of the cache.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.support.killed_child import in_child
from tests.support.latents import latent_recipe, write_encoder, write_latents
from tests.support.mixture import write_mixture
from ups.config.schema import Recipe
from ups.data import latent_cache
from ups.data.latent_cache import partial_path, read_document
from ups.errors import DataError
from ups.run.assemble import OpenData, open_data

WATCHED_EVENTS = ("open", "os.", "shutil.", "ctypes.", "fcntl.")


def arm(number: int) -> list[int]:
    """Die before the n-th watched call (0: only count them); returns the counter."""
    counter = [0]

    def hook(event: str, arguments: object) -> None:
        if event.startswith(WATCHED_EVENTS):
            counter[0] += 1
            if counter[0] == number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return counter


def look(root: Path) -> str:
    """What a reader finds: `none`, the hash of a cache whose every byte is right, or what is wrong with it."""
    if not root.exists():
        return "none"
    try:
        return read_document(root, deep=True)[1]
    except DataError as error:
        return f"BROKEN {error.message}"


def main(folder: Path, wanted: int) -> None:
    torch.set_num_threads(1)
    latent_cache.FILE_BYTES = 1500
    tasks = write_mixture(folder)
    recipe = Recipe.model_validate(latent_recipe(folder, tasks))
    with open_data(recipe) as opened:
        write_encoder(folder, recipe, opened)
        print(json.dumps(kills(folder, recipe, opened, wanted)))


def kills(folder: Path, recipe: Recipe, opened: OpenData, wanted: int) -> dict[str, Any]:
    def write(root: Path) -> str:
        return write_latents(recipe, opened, root, "float16", overwrite=True).cache.manifest

    old = write_latents(recipe, opened, folder / "old").cache.manifest
    new = write(folder / "new")
    cases = []
    total = 0
    for case in range(wanted + 1):  # the first one only counts
        root = folder / f"case_{case}" / "latents"
        replacing = case % 2 == 0
        if replacing:
            shutil.copytree(folder / "old", root)
        number = 0 if case == 0 else 1 + (case - 1) * (total - 1) // (wanted - 1)

        def work(root: Path = root, number: int = number) -> int:
            counter = arm(number)
            write(root)
            return counter[0]

        killed, reported = in_child(work)
        total = total or reported
        if case:
            rest = len(list(partial_path(root).rglob("*.bin")))
            content = look(root)
            again = write(root)
            left = sorted(path.name for path in root.parent.iterdir())
            cases.append(
                {"at": number, "killed": killed, "replacing": replacing, "found": content, "kept": rest, "again": again}
                | {"left": left}
            )
    return {"old": old, "new": new, "cases": cases}


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
