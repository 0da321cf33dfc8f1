"""From a recipe's task to its reader: which format a path has is decided here and nowhere else."""

from __future__ import annotations

from pathlib import Path

from ups.config.schema import TaskConfig
from ups.data.readers.base import GridReader, Reader, Subsampling
from ups.data.readers.pdebench import PdebenchReader
from ups.data.readers.zarr_store import StoreReader, is_store
from ups.errors import DataError


def open_task(config: TaskConfig) -> Reader:
    """The reader of one task of a recipe, called by the recipe's name for it. Opens nothing that outlives the call."""
    paths = [config.path] if isinstance(config.path, str) else list(config.path)
    if not paths:
        raise DataError(f"task '{config.name}' names no file")
    subsampling = Subsampling(config.time_stride, config.space_stride, config.antialias)
    for path in paths:
        if not Path(path).exists():
            raise DataError(f"task '{config.name}': {path} does not exist", hint="make it with `ups data generate`")
    if is_store(paths[0]):
        if len(paths) > 1:
            raise DataError(f"task '{config.name}' names {len(paths)} paths; a store is one path")
        reader: GridReader = StoreReader(paths[0], subsampling)
    else:
        reader = PdebenchReader(
            paths, subsampling, valid_fraction=config.valid_fraction, test_fraction=config.test_fraction
        )
    reader.rename(config.name)
    return reader
