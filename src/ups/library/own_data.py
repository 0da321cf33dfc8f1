"""`ups.import_data`: from data of your own to a store; and what `ups init` does."""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args

from ups.buckets.path import data_path, matching_paths
from ups.config.description import TaskDescription, describe_values, description_next_to, read_description
from ups.config.recipe import resolve
from ups.config.schema import Recipe
from ups.config.yaml_subset import scalar_text
from ups.data.guess import Guess, description_page, guess_description, guess_lines
from ups.data.pack import pack
from ups.errors import ConfigError, DataError
from ups.formats.base import LEAST_TEST, LEAST_TO_SPLIT, GridReader
from ups.formats.container import Container, MemoryContainer
from ups.formats.described import DescribedReader, task_name
from ups.formats.open_container import needs_description, open_containers
from ups.formats.set_aside import LEAST_TO_SET_ASIDE, SetAside, open_calibration
from ups.formats.zarr_store import is_own_store
from ups.library.data import Dataset, PathLike, open_data
from ups.record.files import write_file_atomically
from ups.record.run_dir import shipped_models
from ups.record.text import duration_text, printable
from ups.spec.statistics import Statistics
from ups.spec.task import Role

# What `ups init` proposes to train, in CPU time of one core, and the fewest steps that make a model; the largest grid
# on which it tries a step, and points of all samples of such a step.
TRAINING_SECONDS, _FEWEST_STEPS = 300.0, 500
_MOST_POINTS, _TRIED_POINTS = 1 << 18, 1 << 15
# What it sets aside for error bars: a part of the train split, and the most trajectories that make them better.
_CALIBRATION_FRACTION, _MOST_CALIBRATION = 0.2, 256

# Data resemble a task that explains so much of a change (benchmarks/model/finetune.py). How large data may be to be
# compared in seconds: points in all frames of 16 trajectories.
_SIMILAR, _MOST_COMPARED = 0.6, 1 << 25
logger = logging.getLogger(__name__)

TaskLike = TaskDescription | Mapping[str, Any] | PathLike


def import_data(
    source: Any,
    out: PathLike,
    task: TaskLike | None = None,
    *,
    valid_fraction: float = 0.1,
    test_fraction: float = 0.1,
    compress: bool = False,
    overwrite: bool = False,
) -> Dataset:
    """Write arrays of your own as a store, and open it.

    source: a file (NumPy, HDF5, NetCDF, Zarr) or a list of files of one task, a mapping of names to arrays, an array,
    an xarray.Dataset or an xarray.DataArray. task: what the arrays mean, as a task.yaml, its content or a
    TaskDescription; default the task.yaml next to the file, else a guess (what was guessed stands in the `assumptions`
    of the card).
    """
    reader, names = open_own(source, task, valid_fraction=valid_fraction, test_fraction=test_fraction)
    pack(reader, Path(out), compression="zstd" if compress else None, overwrite=overwrite, generator={"source": names})
    return open_data(out)


def open_own(source: Any, task: TaskLike | None, **fractions: Any) -> tuple[GridReader, list[str]]:
    """The reader of the user's data, and the names of its files; fractions: as in `import_data`."""
    containers, paths = _containers(source)
    described = task if task is not None else description_next_to(paths)
    reader, guess = _reader(containers, paths, described, **fractions)
    if guess is not None:
        rows = [row for row in guess_lines(guess) if row[2].startswith(("guess", "check"))]
        reader.assume([f"{field} {value} ({why})" for field, value, why in rows])
    return reader, [path.name for path in paths]


def _reader(
    containers: Sequence[Container],
    paths: Sequence[Path],
    task: TaskLike | None,
    dims: Sequence[str] = (),
    **fractions: Any,
) -> tuple[DescribedReader, Guess | None]:
    """The reader by a description; by a guess, and the guess, where there is none."""
    name = task_name(paths[0]) if len(paths) == 1 else task_name(paths[0].absolute().parent) if paths else "data"
    guess = guess_description(containers, _common_name(paths) or name, dims) if task is None else None
    described = task if guess is None else guess.description
    if isinstance(described, Mapping):
        described = describe_values(dict(described))
    elif not isinstance(described, TaskDescription):
        assert described is not None
        described = read_description(described)
    return DescribedReader(containers, described, name=name, **fractions), guess


def guessed_description(source: str) -> TaskDescription | None:
    """What the arrays of a file seem to mean; None for one whose format says it."""
    if not data_path(source).exists() or is_own_store(source) or not needs_description(data_path(source)):
        return None
    _, guess = _reader(*_containers(source), None)
    assert guess is not None
    guesses = ", ".join(f"{name} {value}" for name, value, why in guess_lines(guess) if why[:5] in ("guess", "check"))
    logger.warning("%s does not say what its arrays mean; guessed (`ups init` says why): %s", source, guesses)
    return guess.description


def similar_task(source: PathLike, reader: GridReader) -> tuple[str, float] | None:
    """The task of a run or bundle that the data resemble most, and how much it explains; None if they resemble none."""
    from ups.run.warm_start import explained, stepper_at

    if 16 * math.prod(reader.space) * reader.num_frames > _MOST_COMPARED:
        return None
    shares = explained(stepper_at(os.fspath(source)), reader)
    return max((one for one in shares.items() if one[1] >= _SIMILAR), key=lambda one: one[1], default=None)


def _containers(source: Any) -> tuple[list[Container], list[Path]]:
    if isinstance(source, str | os.PathLike):
        source = [source]
    if isinstance(source, Sequence) and source and all(isinstance(one, str | os.PathLike) for one in source):
        paths = [Path(one) for one in matching_paths(source)]
        for path in paths:
            if not path.exists():
                raise DataError(f"{path} does not exist", hint="correct the path")
            if is_own_store(path):
                raise DataError(f"{path} is a store already", hint="train on it, or thin it with `ups data pack`")
        return open_containers(paths), paths
    if isinstance(source, Mapping) or hasattr(source, "data_vars"):
        return [MemoryContainer(source)], []
    if hasattr(source, "to_dataset"):  # an xarray.DataArray: its dimensions and coordinates say what it is
        return [MemoryContainer(source.to_dataset(name=source.name or "u"))], []
    if hasattr(source, "shape") and hasattr(source, "dtype"):
        return [MemoryContainer({"u": source})], []
    raise DataError(
        f"{type(source).__name__} is no data that can be imported",
        hint="give a file, a list of files, an array, a mapping of names to arrays, or an xarray.Dataset",
    )


@dataclass(frozen=True)
class Started:
    """What `init_run` wrote. guess: None where a description was there already. start: the model that training starts
    from, and why; empty where it starts from none."""

    recipe: Path
    description: Path | None
    guess: Guess | None
    reader: GridReader
    start: str = ""


def init_run(directory: PathLike, data: PathLike | Sequence[PathLike], dims: Sequence[str] = ()) -> Started:
    """Look at a file, and write `recipe.yaml` and `task.yaml` into a directory; neither is replaced.

    dims: what each dimension of the main array is, where you know better than the guess; the rest is guessed from it.
    """
    folder = Path(directory)
    paths = [Path(one) for one in matching_paths(data if isinstance(data, Sequence) else os.fspath(data))]
    recipe, page = folder / "recipe.yaml", folder / "task.yaml"
    if recipe.exists():
        raise ConfigError(f"{recipe} exists already", hint="choose another directory, or remove the file")
    guess: Guess | None = None
    description: Path | None = None
    if len(paths) == 1 and is_own_store(paths[0]):
        reader: GridReader = open_data(paths[0])._reader
    else:
        containers, paths = _containers([str(path) for path in paths])
        beside = description_next_to(paths)
        if beside is not None:
            description = Path(beside)
        elif page.exists():
            description = page
        if dims and description is not None:
            raise ConfigError(
                f"{description} says already what the dimensions are",
                hint="correct it there; or remove it, and --dims lets everything else be guessed anew",
            )
        reader, guess = _reader(containers, paths, description, dims)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if guess is not None:
            write_file_atomically(page, description_page(guess, _few(paths)).encode())
            read_description(page)  # what is written is what is read
            description = page
        named = None if description is None else os.path.relpath(description, folder)
        write_file_atomically(
            recipe, _recipe_page(folder, paths, reader, named, (_FEWEST_STEPS, "not measured: interrupted", ""))
        )
        steps, (start, lines) = _measured_steps(recipe, reader), _warm_start(reader)
        write_file_atomically(recipe, _recipe_page(folder, paths, reader, named, (*steps, lines)))
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written: {error.strerror}", hint="name a directory of yours") from error
    aside = _calibration_fraction(reader)
    return Started(recipe, description, guess, open_calibration(SetAside(reader, aside)) if aside else reader, start)


def _few(paths: Sequence[Path]) -> str:
    """The first of many files, for a comment."""
    names = ", ".join(path.name for path in paths[:3])
    return f"{names} and {len(paths) - 3} more" if len(paths) > 3 else names


def _common_name(paths: Sequence[Path]) -> str:
    """What the names of several files begin with, without their numbers; '' if that is not a name."""
    stems = [path.name.split(".")[0] for path in paths] if len(paths) > 1 else []
    same = takewhile(lambda letters: len(set(letters)) == 1, zip(*stems, strict=False))
    stem = "".join(letters[0] for letters in same)
    stem = stem.rstrip("0123456789").rstrip("_- ")
    return task_name(Path(stem)) if stem[:1].isalpha() else ""


def _measured_steps(recipe: Path, reader: GridReader) -> tuple[int, str]:
    """How many steps to train, and why: as many as fit into TRAINING_SECONDS of CPU time, busy or not."""
    points = math.prod(reader.space)
    if points > _MOST_POINTS:
        return _FEWEST_STEPS, f"not measured: a step on {points:,} points takes long; ups plan --measure tells"
    try:
        seconds = _step_seconds(resolve(recipe).recipe, reader, max(1, _TRIED_POINTS // points))
    except Exception as error:  # noqa: BLE001 - a recipe is written all the same, and training says what is wrong
        return _FEWEST_STEPS, f"not measured: {printable(str(error)[:100])}"
    steps = max(_FEWEST_STEPS, TRAINING_SECONDS / seconds)
    steps = round(steps, 1 - math.floor(math.log10(steps)))
    return int(steps), f"about {duration_text(steps * seconds)}: a step took {seconds:.2g} s on one core here"


def _warm_start(reader: GridReader) -> tuple[str, str]:
    """Which model of the package knows such data and why, and the lines of the recipe; empty where none does."""
    with contextlib.suppress(Exception):  # a recipe is written all the same
        for model in shipped_models():
            if like := similar_task(model, reader):
                why = f"its task {like[0]} explains {like[1]:.0%} of a change in the data"
                return f"{model}: {why}", _START.format(model, like[0], why)
    return "", ""


def _step_seconds(recipe: Recipe, reader: GridReader, most_samples: int) -> float:
    """CPU time of a training step, by a few steps with at most `most_samples` samples."""
    from ups.run.assemble import OpenData
    from ups.run.planning import measure_stages

    size, task = recipe.data.batch_size, reader.task
    tried = min(size, most_samples)
    counts = {role: task.num_channels(role) for role in get_args(Role)} | {"parameter": len(task.parameters)}
    counts["difference"] = counts["state"]
    # Real statistics take long to compute, and a step takes the same time with these.
    ones = {f"{name}_{moment}": (1.0,) * n for name, n in counts.items() for moment in ("mean", "std")}
    opened = OpenData([reader], {task.name: Statistics(**ones)})  # type: ignore[arg-type]
    few = recipe.model_copy(update={"data": recipe.data.model_copy(update={"batch_size": tried})})
    return measure_stages(few, opened, steps=3)[0]["step_seconds"] * size / tried


def _recipe_page(
    folder: Path, paths: Sequence[Path], reader: GridReader, description: str | None, steps: tuple[int, str, str]
) -> bytes:
    name = task_name(folder.resolve()).lstrip("_-") or "run"
    listed = [scalar_text(str(path)) for path in paths]
    path = listed[0] if len(listed) == 1 else "\n" + "\n".join(f"        - {one}" for one in listed)
    described = "" if description is None else f"      description: {scalar_text(description)} # next to this file\n"
    return _RECIPE.format(
        source=printable(_few(paths)),
        folder=printable(str(folder)),
        name=scalar_text(name),
        plain=name,
        task=scalar_text(reader.task.name),
        path=path,
        description=described,
        batch_size=_batch_size(reader),
        steps=steps[0],
        why=steps[1],
        calibration=f"{_calibration_fraction(reader):g}",
        least_test=LEAST_TEST,
        least_to_split=LEAST_TO_SPLIT,
        least_aside=LEAST_TO_SET_ASIDE,
        start=steps[2],
    ).encode()


def _calibration_fraction(reader: GridReader) -> float:
    """What `ups init` proposes: nothing where too few trajectories would be left to train on."""
    count = reader.splits["train"]
    return 0.0 if count < LEAST_TO_SET_ASIDE else round(min(_CALIBRATION_FRACTION, _MOST_CALIBRATION / count), 4)


def _batch_size(reader: GridReader) -> int:
    """Windows in a step: as many as a step on a laptop takes well, and no more than there are."""
    points = math.prod(reader.space)
    windows = reader.splits["train"] * max(1, reader.num_frames - 1)
    size = 32
    while size > 4 and size * points > 1 << 16:
        size //= 2
    while size > 1 and size > windows:
        size //= 2
    return size


_START = """\
    start_from: {0} # {2}; to train from scratch, remove these two lines
    start_task: {1}
"""
_RECIPE = """\
# A simulator of {source}. Look at the lines marked "check" in task.yaml first, then
#   ups train {folder}/recipe.yaml
#   ups rollout {plain} --film {plain}.mp4
# Every field with its value: `ups config show {folder}/recipe.yaml`; what it means: `ups config schema`.
version: 1

run:
  name: {name} # the run is kept in runs/{plain}
  seed: 0

data:
  tasks:
    - name: {task}
      path: {path} # as seen from where you start ups
{description}      valid_fraction: 0.1 # trajectories that are held out: for validation while it trains,
      test_fraction: 0.1 # and for the scores at the end, at least {least_test} where there are {least_to_split}
      calibration_fraction: {calibration} # of those left to train on, if at least {least_aside}: only for error bars
  context_frames: 1 # frames that are given; more, if one frame does not determine the next
  batch_size: {batch_size} # windows in each step

model:
  type: multiscale

stages:
  - type: operator
{start}    steps: {steps} # {why}
    loss: nrmse # the error of each field relative to the field
    optim:
      type: muon
      learning_rate: 2e-3
      matrix_learning_rate: 5e-3
      weight_decay: 0
      clip_norm: 0
      clip_ratio: 3

engine:
  ema: {{ decay: 0.998 }}

checkpoint:
  interval_steps: 500
"""
