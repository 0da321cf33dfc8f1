"""Normalization statistics of one task: computed by `ups.data.normalize`, applied by the models, kept in bundles."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from ups.errors import DataError
from ups.spec.task import TaskSpec, first_mistake

# What counts where statistics are read from a file: a number that is finite, and neither true nor text.
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Numbers = tuple[Number, ...]
Count = Annotated[int, Field(strict=True, ge=0)]
RoleName = Annotated[str, Field(pattern="^(state|static|target)$")]
# For each channel and descriptor: smallest and largest value of the train split, and the limits of what is usual.
Ranges = tuple[tuple[tuple[Number, Number, Number, Number], ...], ...]


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

    state_mean: Numbers = ()
    state_std: Numbers = ()
    difference_mean: Numbers = ()
    difference_std: Numbers = ()
    static_mean: Numbers = ()
    static_std: Numbers = ()
    target_mean: Numbers = ()
    target_std: Numbers = ()
    parameter_mean: Numbers = ()
    parameter_std: Numbers = ()
    smooth_from: tuple[tuple[Count, ...], ...] = ()
    size_spread: Number = 0.0
    ranges: Mapping[RoleName, Ranges] = field(default_factory=dict)
    data_identity: str = ""
    num_frames: Count = 0

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
        try:
            statistics = _READER.validate_python(data)
        except ValidationError as error:
            raise DataError(f"statistics are malformed: {first_mistake(error)}") from None
        for name in ("state", "difference", "static", "target", "parameter"):
            mean, std = getattr(statistics, f"{name}_mean"), getattr(statistics, f"{name}_std")
            if len(mean) != len(std) or any(s < 0 for s in std):
                raise DataError(f"statistics are malformed: '{name}' needs one deviation of 0 or more for each mean")
        return statistics


_READER = TypeAdapter(Statistics)


def safe(std: tuple[float, ...]) -> tuple[float, ...]:
    """Standard deviations to divide by: 1 where a channel is constant, so that it maps to 0 and back exactly."""
    return tuple(s if s > 0 else 1.0 for s in std)
