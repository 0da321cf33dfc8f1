"""Normalization statistics of one task: computed by `ups.data.normalize`, applied by the models, kept in bundles."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, get_args

from ups.errors import DataError
from ups.spec.task import Role, TaskSpec

# For each channel and descriptor: smallest and largest value of the train split, and the limits of what is usual.
Ranges = tuple[tuple[tuple[float, float, float, float], ...], ...]


@dataclass(frozen=True, slots=True)
class Statistics:
    """Mean and standard deviation of each channel over the train split, in physical units.

    Channels are in the order of `TaskSpec.channel_names(role)`. A constant channel has std 0 here; whoever divides
    replaces it (see `safe`). `difference_*` are those of (frame t+1 - frame t) of the state, at the stride of the
    reader. Parameters with a log scale have the statistics of their natural logarithm.
    smooth_from: for each state channel and axis, the points of the grid on which the train split never has the shortest
    wave, that of two points; 0 where it has it, and along axes that are not periodic. Empty: not measured.
    size_spread: standard deviation of the logarithm of the sizes of frames, around the mean and in usual deviations.
    ranges: role -> ranges of the descriptors of its channels (`ups.spec.descriptors`). Empty: not measured.
    data_identity: `Reader.identity()` of the data that was measured; num_frames: frames that went in.
    """

    state_mean: tuple[float, ...] = ()
    state_std: tuple[float, ...] = ()
    difference_mean: tuple[float, ...] = ()
    difference_std: tuple[float, ...] = ()
    static_mean: tuple[float, ...] = ()
    static_std: tuple[float, ...] = ()
    target_mean: tuple[float, ...] = ()
    target_std: tuple[float, ...] = ()
    parameter_mean: tuple[float, ...] = ()
    parameter_std: tuple[float, ...] = ()
    smooth_from: tuple[tuple[int, ...], ...] = ()
    size_spread: float = 0.0
    ranges: Mapping[str, Ranges] = field(default_factory=dict)
    data_identity: str = ""
    num_frames: int = 0

    def waves_fit(self, task: TaskSpec) -> bool:
        """Whether `smooth_from` has the channels and axes of a task."""
        return [len(row) for row in self.smooth_from] == [len(task.axes)] * task.num_channels("state")

    @property
    def spans_sizes(self) -> bool:
        """Whether frames go through orders of magnitude, as those of a field that decays: more than a factor of e up
        and down from the usual size. Of the benchmark's tasks burgers1d has 2.4, and no other more than 0.53."""
        return self.size_spread > 1.0

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        if not self.ranges:  # as statistics were written before there were any: caches of latents keep their identity
            del data["ranges"]
        return data

    @classmethod
    def from_json(cls, data: object) -> Statistics:
        """Reads what `to_json` wrote. Raises DataError for anything else."""
        names = {f.name for f in fields(cls)}
        # Bundles and runs from before these were measured have none.
        if not isinstance(data, Mapping) or set(data) | {"smooth_from", "size_spread", "ranges"} != names:
            raise DataError("statistics are malformed: not the expected JSON object")
        values = dict(data)
        values["smooth_from"] = _points(values.get("smooth_from", ()))
        (values["size_spread"],) = _numbers("size_spread", [values.get("size_spread", 0.0)])
        values["ranges"] = _ranges(values.get("ranges", {}))
        for name, value in values.items():
            if name.endswith(("_mean", "_std")):
                values[name] = _numbers(name, value)
        for name in ("state", "difference", "static", "target", "parameter"):
            if len(values[f"{name}_mean"]) != len(values[f"{name}_std"]) or any(s < 0 for s in values[f"{name}_std"]):
                raise DataError(f"statistics are malformed: '{name}' needs one deviation of 0 or more for each mean")
        if not isinstance(values["data_identity"], str) or type(values["num_frames"]) is not int:
            raise DataError("statistics are malformed: 'data_identity' must be a text and 'num_frames' a number")
        return cls(**values)


def _numbers(name: str, value: object) -> tuple[float, ...]:
    wrong = DataError(f"statistics are malformed: '{name}' must be a list of finite numbers")
    if not isinstance(value, list | tuple) or any(type(v) not in (int, float) for v in value):
        raise wrong
    try:
        numbers = tuple(float(v) for v in value)
    except OverflowError as error:
        raise wrong from error
    if not all(math.isfinite(v) for v in numbers):
        raise wrong
    return numbers


def _points(value: object) -> tuple[tuple[int, ...], ...]:
    found = []
    for row in value if isinstance(value, list | tuple) else [None]:
        if not isinstance(row, list | tuple) or any(type(n) is not int or n < 0 for n in row):
            raise DataError("statistics are malformed: 'smooth_from' must be lists of numbers of points")
        found.append(tuple(row))
    return tuple(found)


def _ranges(value: object) -> dict[str, Ranges]:
    wrong = DataError("statistics are malformed: 'ranges' must be four numbers of each descriptor, by role and channel")
    if not isinstance(value, Mapping) or not all(role in get_args(Role) for role in value):
        raise wrong
    try:
        rows = {role: tuple(tuple(_numbers("ranges", r) for r in channel) for channel in value[role]) for role in value}
    except TypeError as error:
        raise wrong from error
    if not all(len(row) == 4 for channels in rows.values() for channel in channels for row in channel):
        raise wrong
    return rows  # type: ignore[return-value]


def safe(std: tuple[float, ...]) -> tuple[float, ...]:
    """Standard deviations to divide by: 1 where a channel is constant, so that it maps to 0 and back exactly."""
    return tuple(s if s > 0 else 1.0 for s in std)
