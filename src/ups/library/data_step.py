"""The data of a recipe, made where it is missing: by a solver, from files of one's own, or by fetching what is
published. What is there is never replaced. No torch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ups.buckets.path import data_path, matching_paths
from ups.config.schema import TaskConfig
from ups.config.source import SETTINGS, SourceConfig
from ups.errors import ConfigError, DataChangedError, DataError
from ups.run.steps_file import digest

MADE_FROM = "made_from"


def source_facts(task: TaskConfig) -> dict[str, Any]:
    """What the store of a task would be made from; of files their content, not their place or time."""
    source = task.source
    if source is None:
        return {}
    if source.type == "import":
        return {"type": "import", "path": task.path, MADE_FROM: _made_from(task, source)}
    # Where it is fetched from changes nothing about what is fetched.
    said = SETTINGS[source.type] - {"mirror"}
    return {"type": source.type, "path": task.path, **source.model_dump(mode="json", include=said)}


def _files(source: SourceConfig) -> list[str]:
    return matching_paths(source.files or [])


def _made_from(task: TaskConfig, source: SourceConfig) -> str:
    """Hash of the content of the files and of what is said about them; '' if a file is not there any more."""
    from ups.data.content import content_sample

    if not all(Path(file).exists() for file in _files(source)):
        return ""
    said = source.model_dump(mode="json", include={"description"})
    return digest([content_sample(_files(source))[0], said, task.valid_fraction, task.test_fraction])


def make_data(task: TaskConfig, progress: Callable[[int, int], None] | None = None) -> str:
    """Make the data of a task if it is not there; returns what was done. Raises DataError if there is nothing.

    progress: told bytes here and bytes in all, of what is fetched.
    """
    path, source = task.paths[0], task.source
    if source is None:
        missing = [one for one in task.paths if not data_path(one).exists()]
        if missing:
            raise DataError(
                f"{missing[0]} of task '{task.name}' does not exist",
                hint="correct the path, or say in `source` of the task how it is made",
            )
        return f"{path} is there"
    if source.type == "fetch":
        return _fetch(task, source, progress)
    existed = Path(path).exists()
    if not existed:
        _check_name(task, source)
    if source.type == "generate":
        _generate(task, source)
    else:
        _import(task, source)
    return f"{path} was there" if existed else f"made {path}"


def _fetch(task: TaskConfig, source: SourceConfig, progress: Callable[[int, int], None] | None) -> str:
    from ups.data.fetch import fetch, find

    name = find(source.dataset or "").name
    places = [_place_in(path, name, task.name) for path in task.paths]
    out, files = places[0][0], [file for _, file in places if file]
    if any(other != out for other, _ in places):
        raise ConfigError(
            f"task '{task.name}': its paths lie in several copies of {name}", hint="name files of one directory"
        )
    if files and source.only:
        raise ConfigError(
            f"task '{task.name}': its path names files, and `only` of its source as well",
            hint="leave `only` out, or name the directory as path",
        )
    found = fetch(name, out, only=files or source.only, mirror=source.mirror, progress=progress)
    return f"fetched {found.num_fetched} of {len(found.paths)} files of {name}"


def _place_in(path: str, name: str, task: str) -> tuple[Path, str]:
    """The directory into which a data set is fetched so that it lies at `path`, and the file of it; '' for all."""
    parts, wanted = Path(path).parts, tuple(name.split("/"))
    for at in range(len(parts) - len(wanted), -1, -1):
        if parts[at : at + len(wanted)] == wanted:
            return Path(*parts[:at]), "/".join(parts[at + len(wanted) :])
    raise ConfigError(
        f"task '{task}': {path} is not where {name} would be fetched to",
        hint=f"let the path end in {name}, or in {name}/FILE",
    )


def _store_name(task: TaskConfig, source: SourceConfig) -> str:
    return f"{source.task or task.name}.zarr"


def _check_name(task: TaskConfig, source: SourceConfig) -> None:
    """Raises ConfigError if the path that is missing is not what the source would make."""
    name = Path(task.paths[0]).name
    if not isinstance(task.path, str) or not name.endswith(".zarr"):
        raise ConfigError(
            f"task '{task.name}': its source makes a store, and {task.paths[0]} is not the name of one",
            hint="give one path that ends in .zarr",
        )
    if source.type == "generate" and name != _store_name(task, source):
        raise ConfigError(
            f"task '{task.name}': {task.paths[0]} does not exist, and its solver makes {_store_name(task, source)}",
            hint=f"end the path in {_store_name(task, source)}",
        )


def _generate(task: TaskConfig, source: SourceConfig) -> None:
    from ups.library.generate import generate_data

    if Path(task.paths[0]).name != _store_name(task, source):
        return  # it is there (`_check_name`), and was moved by somebody who knows what it is
    # Also where the store is there: it may be another data set of that name, and that is refused.
    generate_data(
        source.task or task.name,
        Path(task.paths[0]).parent,
        trajectories=(source.trajectories[0], source.trajectories[1], source.trajectories[2]),
        resolution=source.resolution,
        frames=source.frames,
        parameters=source.parameters,
        seed=source.seed,
    )


def _import(task: TaskConfig, source: SourceConfig) -> None:
    from ups.data.pack import pack
    from ups.formats.zarr_store import read_store_attributes
    from ups.library.own_data import open_own

    path, now = Path(task.paths[0]), _made_from(task, source)
    if path.exists():
        generator = read_store_attributes(path).get("generator")
        known = generator.get(MADE_FROM) if isinstance(generator, dict) else None
        # A store that was made by other means says nothing; and files may be gone once they are imported.
        if known and now and known != now:
            raise DataChangedError(
                f"{path} was made from other files than {_files(source)[0]}, or from another description of them",
                hint="bring the old files back; or remove the store to import anew, and give the run another run.name",
            )
        return
    fractions = {"valid_fraction": task.valid_fraction, "test_fraction": task.test_fraction}
    reader, names = open_own(_files(source), source.description, **fractions)
    path.parent.mkdir(parents=True, exist_ok=True)
    pack(reader, path, generator={"source": names, MADE_FROM: now})
