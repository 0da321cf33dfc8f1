"""From a recipe's task to its reader: which format a path has is decided here and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ups.config.schema import TaskConfig
from ups.errors import DataError
from ups.formats.base import FULL, GridReader, Reader, Subsampling
from ups.formats.pdebench import PdebenchReader
from ups.formats.zarr_store import StoreReader


def open_task(config: TaskConfig) -> Reader:
    """The reader of one task of a recipe, called by the recipe's name for it. Opens nothing that outlives the call."""
    reader = open_paths(
        config.path,
        Subsampling(config.time_stride, config.space_stride, config.antialias),
        valid_fraction=config.valid_fraction,
        test_fraction=config.test_fraction,
        problem=config.problem,
    )
    reader.rename(config.name)
    return reader


def open_paths(
    path: str | Path | Sequence[str | Path],
    subsampling: Subsampling = FULL,
    *,
    valid_fraction: float = 0.1,
    test_fraction: float = 0.1,
    problem: str | None = None,
) -> GridReader:
    """The reader of a store, or of one or several PDEBench files; the fractions are for files without splits.

    problem: which problem of PDEBench the files hold, where they do not say so.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    if not paths:
        raise DataError("no file is named")
    for one in paths:
        if not Path(one).exists():
            raise DataError(f"{one} does not exist", hint="make it with `ups data generate`, or correct the path")
    if not any(Path(one).is_dir() for one in paths):
        fractions = {"valid_fraction": valid_fraction, "test_fraction": test_fraction}
        return PdebenchReader(paths, subsampling, **fractions, problem=problem)
    if len(paths) > 1:
        raise DataError(f"{len(paths)} paths are named; a store is one path", hint="make them several tasks")
    if problem is not None:
        raise DataError(f"{paths[0]} is a store, which says itself what it holds", hint="leave `problem` out")
    return StoreReader(paths[0], subsampling)
