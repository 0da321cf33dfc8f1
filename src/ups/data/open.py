"""From a recipe's task to its reader: which format a path has is decided here and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from ups.buckets.block_cache import use_cache
from ups.buckets.client import is_address
from ups.buckets.path import data_path, matching_paths
from ups.config.description import TaskDescription, description_next_to, read_description
from ups.config.model import ModelConfig
from ups.config.schema import DataConfig, TaskConfig
from ups.errors import ConfigError, DataError, PluginError
from ups.formats.base import FULL, Format, Reader, Subsampling
from ups.formats.described import open_described
from ups.formats.open_container import is_container, needs_description
from ups.formats.set_aside import SetAside
from ups.formats.zarr_store import is_own_store
from ups.registry import READERS
from ups.spec.grid import uneven_axes

DESCRIBED = "described"


def open_task(config: TaskConfig) -> Reader:
    """The reader of one task of a recipe, called by the recipe's name for it. Opens nothing that outlives the call."""
    _check_made(config)
    reader = open_paths(
        config.path,
        Subsampling(config.time_stride, config.space_stride, config.antialias, config.first_frame),
        valid_fraction=config.valid_fraction,
        test_fraction=config.test_fraction,
        problem=config.problem,
        format=config.format,
        description=config.description,
    )
    if config.calibration_fraction:
        reader = SetAside(reader, config.calibration_fraction)
    reader.rename(config.name)
    return reader


def _check_made(config: TaskConfig) -> None:
    """Raises DataError if data of the recipe is not there, or was not made yet."""
    missing = next((path for path in config.paths if not (is_address(path) or Path(path).exists())), None)
    if missing is None:
        return
    if config.source is None:
        raise DataError(
            f"{missing} of task '{config.name}' does not exist",
            hint="correct the path; or make it: with `ups data generate`, `import` or `fetch`, or by `ups run RECIPE`, "
            "which needs a `source:` of the task (docs/run.md)",
        )
    kind, dataset = config.source.type, config.source.dataset
    by_hand = f", `ups data fetch {dataset} --only '{Path(missing).name}'` fetches this file" if kind == "fetch" else ""
    raise DataError(
        f"{missing} of task '{config.name}' does not exist yet, and shapes are read from the data",
        hint=f"`ups run RECIPE` makes what is missing by its source ({kind}){by_hand}",
    )


@contextlib.contextmanager
def open_tasks(data: DataConfig) -> Iterator[list[Reader]]:
    """Readers of the tasks of a recipe, in their order; closed at the end of the block."""
    use_cache(data.cache_dir, data.cache_bytes)
    with contextlib.ExitStack() as stack:
        readers: list[Reader] = []
        for config in data.tasks:
            readers.append(open_task(config))
            stack.callback(readers[-1].close)
        yield readers


def open_paths(
    path: str | Path | Sequence[str | Path],
    subsampling: Subsampling = FULL,
    *,
    valid_fraction: float = 0.1,
    test_fraction: float = 0.1,
    problem: str | None = None,
    format: str = "auto",
    description: TaskDescription | str | Path | None = None,
) -> Reader:
    """The reader of a store, or of one or several files; the fractions are for data without splits.

    problem: which problem of PDEBench the files hold, where they do not say so. format: a registered reader, or auto.
    description: what the arrays of the files mean, or a file that says so; default the task.yaml next to them.
    """
    paths = [data_path(one) for one in matching_paths(path)]
    if not paths:
        raise DataError("no file is named")
    for one in paths:
        if not one.exists():
            hint = (
                "correct the path" if one.suffix != ".zarr" else "make it with `ups data generate`, or correct the path"
            )
            raise DataError(f"{one} does not exist", hint=hint)
    described = _description_of(paths, description, problem, format)
    if described is not None:
        fractions = {"valid_fraction": valid_fraction, "test_fraction": test_fraction}
        reader = open_described(paths, described, subsampling, **fractions)
        if description is None:
            reader.assume([f"what the arrays mean is said by '{description_next_to(paths)}', which lies next to them"])
        return reader
    name = recognized(paths) if format == "auto" else format
    chosen: Format = READERS.factory(name)
    return chosen.open(paths, subsampling, valid_fraction=valid_fraction, test_fraction=test_fraction, problem=problem)


def _description_of(
    paths: Sequence[Path], description: TaskDescription | str | Path | None, problem: str | None, format: str
) -> TaskDescription | None:
    """What is said about these files; None for a store, and where only the reader of a format knows."""
    if description is None and (problem is not None or format not in ("auto", DESCRIBED)):
        return None
    stores = [path for path in paths if is_own_store(path)]
    if description is not None and (stores or problem is not None):
        what = (
            f"{stores[0]} is a store, which says itself what it holds"
            if stores
            else "problem and description are both given"
        )
        raise DataError(what, hint="leave the description out" if stores else "keep one of them")
    if stores:
        return None
    if isinstance(description, str | Path):
        return read_description(description)
    if description is not None:
        return description
    beside = description_next_to(paths) if all(is_container(path) for path in paths) else None
    if beside is not None:
        return read_description(beside)
    if format == DESCRIBED or any(needs_description(path) for path in paths):
        raise DataError(
            f"{paths[0]} does not say what its arrays mean, and no task.yaml lies next to it",
            hint=f"`ups init DIR --data {paths[0]}` writes DIR/task.yaml: put it next to the data, or name it "
            "(`description` of the task in a recipe, --task of `ups data`)",
        )
    return None


def recognized(paths: Sequence[Path]) -> str:
    """The reader that knows all of these paths, ours first. What none knows is left to ours, which say what is wrong.

    Readers look at names and first bytes only, so that a hostile file meets no library here; a reader whose package
    cannot be imported is skipped.
    """
    knowing = []
    for name in READERS.names():
        try:
            known = all(READERS.factory(name).recognizes(path) for path in paths)
        except PluginError:
            continue
        if known and READERS.origin(name).is_ours:
            return name
        if known:
            knowing.append(name)
    if len(knowing) > 1:
        raise DataError(
            f"{paths[0]} is recognized by several readers: {', '.join(knowing)}",
            hint="choose one: `format` of the task in a recipe, --format of a command",
        )
    return knowing[0] if knowing else "store" if any(path.is_dir() for path in paths) else "pdebench"


def check_conserved(model: ModelConfig, reader: Reader) -> None:
    """Raises ConfigError where the model would keep what is no integral, or no divergence, on such a grid."""
    uneven = uneven_axes(reader.task.axes, reader.coordinates)
    if reader.task.divergence_free and uneven:
        raise ConfigError(
            f"task '{reader.task.name}' has fields without divergence ({', '.join(reader.task.divergence_free)}), and "
            f"the points of its grid are not equally spaced along {', '.join(uneven)}",
            hint="leave divergence_free out of the description, or interpolate the data to a uniform grid",
        )
    if model.conserves and reader.task.conserved and uneven:
        raise ConfigError(
            f"task '{reader.task.name}' conserves {', '.join(reader.task.conserved)}, and the points of its grid are "
            f"not equally spaced along {', '.join(uneven)}: the model can keep an integral on a uniform grid only",
            hint="set model.conserve: false, or interpolate the data to a uniform grid",
        )
