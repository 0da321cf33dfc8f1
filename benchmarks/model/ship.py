"""Puts a trained model with test states into the package: what `ups demo` and `ups.Simulator.load(NAME)` load.

    python benchmarks/model/ship.py RUN --data DIR [--name ups-joint] [--trajectories 4] [--out src/ups/shipped]

RUN: a run or a bundle, scored and calibrated. DIR/TASK.zarr: the data of each task, of which the first test
trajectories are kept, compressed. OUT/NAME is replaced: bundle/ and states/TASK.zarr. The recipe of the copy names
data/TASK.zarr and no directory, instead of paths of the machine that trained. The last line is JSON with the sizes.
Bar: the bundle takes at most 8 MB, is calibrated and scored on each task, and is better than each reference.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from store_copy import copy_store

MAX_BYTES = 8_000_000
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--name", default="ups-joint")
    parser.add_argument("--trajectories", type=int, default=4)
    parser.add_argument("--out", type=Path, default=ROOT / "src" / "ups" / "shipped")
    asked = parser.parse_args()
    target = asked.out / asked.name
    unfinished = target.with_name(f".{asked.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    problems = write(asked.run, asked.data, unfinished, asked.name, asked.trajectories)
    sizes = {part.name: sum(p.stat().st_size for p in part.rglob("*") if p.is_file()) for part in unfinished.iterdir()}
    if sizes["bundle"] > MAX_BYTES:
        problems.append(f"the bundle takes {sizes['bundle']} bytes, more than {MAX_BYTES}")
    shutil.rmtree(target, ignore_errors=True)
    unfinished.rename(target)
    for line in problems:
        print(line, file=sys.stderr)
    print(json.dumps({"written": str(target), "bytes": sizes, "problems": problems}))
    return 1 if problems else 0


def write(run: str, data: Path, target: Path, name: str, trajectories: int) -> list[str]:
    """Write bundle and states; returns what speaks against shipping them."""
    from ups.config.recipe import plain_data, resolve_data
    from ups.inference.bundle import load_bundle, write_bundle, write_card
    from ups.inference.stored_scores import bundle_warnings
    from ups.record.run_dir import find_bundle
    from ups.run.directory import read_run_recipe

    bundle = load_bundle(find_bundle(run))
    document: Any = plain_data(read_run_recipe(bundle.path).recipe)
    document["run"] = {key: value for key, value in document["run"].items() if key != "dir"} | {"name": name}
    for task in document["data"]["tasks"]:
        task["path"] = f"data/{task['name']}.zarr"
    resolved = resolve_data(document, [], name=f"the recipe of {run}")
    provenance = {**bundle.info.provenance, "recipe": resolved.hash, "run": name}
    info = replace(bundle.info, provenance=provenance)
    card = write_card(name, info, bundle.calibrations).replace('Simulator.load("PATH")', f'Simulator.load("{name}")')
    card = card.replace("license: other", "license: apache-2.0")  # as the package
    write_bundle(
        target / "bundle", bundle.stepper, info, config_text=resolved.text, card=card, stated=bundle.calibrations
    )
    problems = [f"not better than a reference: {line}" for line in bundle_warnings(info.scores, info.provenance)]
    for spec in info.tasks:
        source = data / f"{spec.name}.zarr"
        states = target / "states" / source.name
        copy_store(source, states, train=0, valid=0, test=trajectories, compression="zstd")
        problems += [f"{spec.name} is not calibrated"] if spec.name not in bundle.calibrations else []
        problems += [f"{spec.name} is not scored"] if spec.name not in info.scores else []
    return problems


if __name__ == "__main__":
    sys.exit(main())
