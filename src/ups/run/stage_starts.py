"""Which stages of a run start from other weights than those of the stage before, and where the run keeps them.

What comes from outside lies in the run (`start/<stage>`, a bundle), put there by `ups.run.warm_start` before any rank
starts. Its hash is part of the run's identity, and so is that of a cache of latents, which stays where it is. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ups.config.schema import Recipe
from ups.errors import DataChangedError
from ups.record.identity import file_sha256
from ups.record.manifest import MANIFEST_NAME
from ups.record.run_dir import RunDir


def earlier_stage(recipe: Recipe, index: int) -> int | None:
    """The stage whose weights stage `index` starts from by name: the last one of that type before it; None if none."""
    wanted = recipe.stages[index].start_from
    found = [number for number in range(index) if recipe.stages[number].type == wanted]
    return found[-1] if found else None


def stages_to_keep(recipe: Recipe) -> range:
    """Stages whose last checkpoint stays: a later one may start from it, in this run or when it is trained alone."""
    return range(len(recipe.stages) - 1)


def from_outside(recipe: Recipe) -> list[int]:
    """Stages that start from another run, bundle or checkpoint."""
    stages = range(len(recipe.stages))
    return [n for n in stages if recipe.stages[n].start_from and earlier_stage(recipe, n) is None]


def start_path(run_dir: Path, index: int) -> Path:
    """Where a run keeps the weights that stage `index` starts from."""
    return RunDir(run_dir).start(index)


def start_hash(run_dir: Path, index: int) -> str:
    """Hash of the copy that stage `index` starts from."""
    return file_sha256(start_path(run_dir, index) / MANIFEST_NAME)


def check_start(run_dir: Path, index: int, known: Mapping[str, str]) -> tuple[str, str]:
    """Name and hash of what stage `index` starts from. Raises DataChangedError if the run began with something else."""
    name, found = f"stages.{index}.start_from", start_hash(run_dir, index)
    if known.get(name, found) != found:
        raise DataChangedError(
            f"{start_path(run_dir, index)} is not what the run was started with",
            hint="bring the old directory back, or start a new run: --set run.dir=PATH",
        )
    return name, found


def check_starts(run_dir: Path, recipe: Recipe, known: Mapping[str, str]) -> dict[str, str]:
    """Name -> hash of what the stages start from. Raises DataChangedError if one is not what the run began with."""
    return dict(check_start(run_dir, index, known) for index in from_outside(recipe))


def check_caches(recipe: Recipe, known: Mapping[str, str]) -> dict[str, str]:
    """Name -> hash of the latent caches that stages read. Raises DataChangedError if the run began with other ones.

    known: of a run that has begun, else empty.
    """
    caches: dict[str, str] = {}
    for index, stage in enumerate(recipe.stages):
        name = f"stages.{index}.cache"
        if stage.cache_place:
            caches[name] = file_sha256(Path(stage.cache_place) / MANIFEST_NAME)
        if known and known.get(name) != caches.get(name):
            raise DataChangedError(
                f"{name} ({stage.cache_place or 'none'}) is not what the run was started with",
                hint="bring the old cache back, or start a new run: --set run.dir=PATH",
            )
    return caches
