"""`ups.open_data`: one data set to look at and to train on with code of your own."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from ups.config.description import TaskDescription
from ups.data.open import open_paths
from ups.data.permutation import Permutation
from ups.data.rank_source import WindowIndex
from ups.errors import ConfigError, DataError, MachineError, MissingExtraError, UpsError
from ups.formats.base import GridReader, Subsampling
from ups.record.processes import bound_to, module_command
from ups.spec.grid import CONVENTIONS, axis_attributes, component_dim, field_attributes, time_attributes
from ups.spec.task import Role, TaskSpec

if TYPE_CHECKING:
    import xarray

    from ups.spec.batch import Batch, Float32


PathLike = str | os.PathLike[str]


def open_data(
    path: PathLike | Sequence[PathLike],
    *,
    first_frame: int = 0,
    time_stride: int = 1,
    space_stride: int = 1,
    antialias: bool = False,
    valid_fraction: float = 0.1,
    test_fraction: float = 0.1,
    problem: str | None = None,
    format: str = "auto",
    task: PathLike | TaskDescription | None = None,
) -> Dataset:
    """Open a store, or one or several files of another format that ups reads. Reads nothing but its description.

    first_frame leaves out the stored frames before it. The strides show every n-th frame and point (with `antialias`
    the mean over cells of n points); the fractions are
    for files without splits; problem: which problem of PDEBench the files hold, where they do not say so; format: the
    reader, where it cannot be recognized; task: what the arrays mean, default the task.yaml next to them.
    """
    paths = [path] if isinstance(path, str | os.PathLike) else list(path)
    texts = [os.fspath(one) for one in paths]
    for name, stride in (("time_stride", time_stride), ("space_stride", space_stride)):
        if stride < 1:
            raise DataError(f"{name} must be 1 or more, not {stride}")
    reader = open_paths(
        texts[0] if len(texts) == 1 else texts,
        Subsampling(time_stride, space_stride, antialias, first_frame),
        valid_fraction=valid_fraction,
        test_fraction=test_fraction,
        problem=problem,
        format=format,
        description=task if task is None or isinstance(task, TaskDescription) else os.fspath(task),
    )
    return Dataset(reader, texts, format)


class Dataset:
    """One task on disk: its card, its splits, trajectories as xarray, batches as torch tensors."""

    def __init__(self, reader: GridReader, paths: Sequence[str], format: str = "auto") -> None:
        self._reader = reader
        self._paths = list(paths)
        self._format = format

    @property
    def task(self) -> TaskSpec:
        """Fields, axes, parameters, time step and equation."""
        return self._reader.task

    @property
    def splits(self) -> Mapping[str, int]:
        """Number of trajectories in train, valid and test."""
        return dict(self._reader.splits)

    @property
    def num_frames(self) -> int:
        """Frames of a trajectory, of the longest where they differ; 0 if the task is steady."""
        return self._reader.num_frames

    @property
    def space(self) -> tuple[int, ...]:
        """Grid points along each axis."""
        return self._reader.space

    @cached_property
    def card(self) -> dict[str, Any]:
        """Facts about the data: shapes, units, ranges, size, boundaries, parameters (`ups data inspect --json`)."""
        from ups.data.inspect import make_card

        return make_card(self._reader, self._paths, format=self._format)

    def trajectory(self, split: str = "train", number: int = 0) -> xarray.Dataset:
        """One whole trajectory: fields over (time, component, space) with units and coordinates, parameters as scalars.

        A frame of it is what `Simulator.rollout` takes: `simulator.rollout(trajectory.isel(time=0), steps=10)`.
        """
        import xarray

        self._check(split, number)
        task, reader = self.task, self._reader
        window = reader.read(split, number, 0, reader.frames_in(split, number))
        variables: dict[str, Any] = {}
        if not task.steady:
            variables |= self._variables("state", window.state, ("time",))
        variables |= self._variables("static", window.static, ())
        variables |= self._variables("target", window.target, ())
        for spec, value in zip(task.parameters, window.parameters, strict=True):
            variables[spec.name] = ((), value, field_attributes(spec))
        coordinates: dict[str, Any] = {
            axis.name: ((axis.name,), values, axis_attributes(axis))
            for axis, values in zip(task.axes, reader.coordinates, strict=True)
        }
        if not task.steady:
            coordinates["time"] = (("time",), reader.times_in(split, number), time_attributes(task))
        facts = {
            "Conventions": CONVENTIONS,
            "task": task.name,
            "equation": task.equation,
            "split": split,
            "trajectory": number,
        }
        return xarray.Dataset(variables, coordinates, facts)

    def trajectories(self, split: str = "train") -> Iterator[xarray.Dataset]:
        """All trajectories of a split, one after the other."""
        self._check(split, 0)
        for number in range(self.splits[split]):
            yield self.trajectory(split, number)

    def batches(
        self, split: str = "train", size: int = 16, *, frames: int = 2, shuffle: int | None = None
    ) -> Iterator[Batch]:
        """Every window of `frames` consecutive frames once, `size` at a time, as CPU tensors in physical units.

        state (B, T, C, *S), static and target (B, C, *S), parameters (B, P), dt (B,). shuffle: a seed for the order,
        None for the order on disk. The last batch may be smaller.
        """

        from ups.spec.batch import Batch

        self._check(split, 0)
        if size < 1:
            raise DataError(f"a batch of {size} windows cannot be read")
        reader = self._reader
        index = WindowIndex.of(reader, split, frames)
        order = Permutation(len(index), shuffle) if shuffle is not None else None
        for first in range(0, len(index), size):
            numbers = np.arange(first, min(first + size, len(index)), dtype=np.int64)
            if order is not None:
                numbers = order.forward(numbers)
            windows = [index.locate(int(number)) for number in numbers]
            block = reader.read_block(split, [p[0] for p in windows], [p[1] for p in windows], index.read_frames)
            yield Batch.of(
                self.task,
                state=block.state,
                static=block.static,
                target=block.target,
                parameters=block.parameters,
                dt=block.dt.astype(np.float32),
                coordinates=block.coordinates,
                numbers=numbers,
            )

    def close(self) -> None:
        """Close the files; they are opened again when something is read."""
        self._reader.close()

    def _variables(self, role: Role, values: Float32, lead: tuple[str, ...]) -> dict[str, Any]:
        """(*lead, C, *S) -> name -> (dimensions, values, attributes) of each field of a role."""
        task, variables, first = self.task, {}, 0
        axes = tuple(axis.name for axis in task.axes)
        for spec in task.fields_of(role):
            last = first + spec.num_channels(task.num_spatial_dims)
            part = values[:, first:last] if lead else values[first:last]
            if not spec.tensor_rank:
                part = part[:, 0] if lead else part[0]
            dims = (*lead, *component_dim(task, spec), *axes)
            variables[spec.name] = (dims, part, {**field_attributes(spec), "role": role})
            first = last
        return variables

    def _check(self, split: str, number: int) -> None:
        splits = self.splits
        if split not in splits:
            raise DataError(f"there is no split '{split}'", hint=f"it has {', '.join(splits)}")
        if not 0 <= number < splits[split]:
            raise DataError(f"split '{split}' has {splits[split]} trajectories, and none of number {number}")

    def __repr__(self) -> str:
        counts = ", ".join(f"{count} {split}" for split, count in self.splits.items())
        return f"Dataset({self.task.name!r}, {counts}, {self.num_frames} frames of {'x'.join(map(str, self.space))})"


_ERRORS: dict[str, type[UpsError]] = {
    kind.cause: kind for kind in (ConfigError, DataError, MachineError, MissingExtraError)
}


def generate_data(
    task: str,
    out: str | os.PathLike[str] = "data",
    *,
    trajectories: tuple[int, int, int] = (512, 64, 64),
    resolution: int | None = None,
    frames: int | None = None,
    parameters: Mapping[str, float] | None = None,
    seed: int = 0,
    processes: int | None = None,
    overwrite: bool = False,
) -> Dataset:
    """Make OUT/TASK.zarr like `ups data generate`, and open it. What is there already is kept.

    trajectories: of train, valid and test. resolution: stored points of each axis; frames: stored frames. parameters:
    values to give instead of drawing them. processes: of the solver, default one for each core.
    """
    options = {"--trajectories": ",".join(map(str, trajectories)), "--resolution": resolution, "--frames": frames}
    options |= {"--seed": seed, "--processes": processes, "--out": os.fspath(out)}
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    words += [f"--parameter={name}={value!r}" for name, value in (parameters or {}).items()]
    words += ["--overwrite"] if overwrite else []
    command = module_command("ups", "data", "generate", task, *words, "--json")
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        # Who is killed leaves no solver behind, which would hold the store against the next try.
        preexec_fn=bound_to(os.getpid()),
    )
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        raise MachineError(f"the generation of '{task}' ended without a result: {done.stderr[-500:].strip()}") from None
    if done.returncode:
        error = answer["error"]
        raise _ERRORS.get(error["cause"], MachineError)(error["message"], hint=error["hint"])
    return open_data(answer[0]["path"])
