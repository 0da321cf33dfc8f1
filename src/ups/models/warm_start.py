"""What a network may say about its weights, so that they can be the start of another model (`transfer.py` does that).

A network that says nothing hands over its weights as they are to a network of the same class and sizes.

Networks see parameters, times and lengths in units of their task. The same task may come with another time step,
extent, range of a parameter, or statistics of the train split. A weight that multiplies such a number then has to be
multiplied by the change of its unit (`UnitChange`), or a transferred law would be that of another speed. Fields are not
converted: they are normalized by the new data, and their size is what training adapts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ups.spec.statistics import Statistics, safe
from ups.spec.task import TaskSpec


@dataclass(frozen=True, slots=True)
class NamedRows:
    """A dimension of a parameter whose entries belong to names."""

    dim: int
    names: tuple[str, ...]


class WarmStart(nn.Module):
    """Base of `Network`: all of it is optional."""

    def named_rows(self) -> dict[str, NamedRows]:
        """Parameters with rows that belong to names (of tasks, channels, parameters), by the name of the parameter."""
        return {}

    def fitted(self, source: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of another network in the shapes of this one, as far as they mean the same here.

        By default those of a network of the same class as they are, and none of another.
        """
        return dict(weights) if type(source) is type(self) else {}

    def borrowed_rows(self, task: TaskSpec, like: TaskSpec) -> dict[str, dict[str, str | None]]:
        """How rows of a task that is new to taken weights begin: parameter -> row -> row of a task that they know, or
        None for zeros. By default as they were drawn.
        """
        return {}

    def scales_frames(self, task: TaskSpec, spans_sizes: bool) -> bool:
        """Whether frames of a task are divided by their size. spans_sizes: `Statistics.spans_sizes`."""
        return False

    def kernel_axes(self, dims: int) -> int:
        """How many axes the kernels have from which grids of `dims` dimensions take theirs: more if they share them."""
        return dims

    def change_units(self, changes: Mapping[str, UnitChange], taken: Collection[str]) -> bool:
        """Convert weights of these tasks to the units of this model in the tables that were taken, and say whether that
        was anything. By default not."""
        return False


@dataclass(frozen=True, slots=True)
class ParameterUnits:
    """relative, normalized: what slopes of the two forms of a parameter are multiplied by. offset: what of the slope of
    the normalized one, as it was, goes into the constant."""

    relative: float = 1.0
    normalized: float = 1.0
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class UnitChange:
    """From the units of a task in one model to those of the same task in another.

    step: new dt / old dt. lengths: old extent / new extent of each axis.
    """

    step: float
    lengths: tuple[float, ...]
    parameters: Mapping[str, ParameterUnits]

    @property
    def nothing(self) -> bool:
        """Whether all units are the same, to rounding."""
        others = [self.step, *self.lengths, *(f for p in self.parameters.values() for f in (p.relative, p.normalized))]
        offsets = [p.offset for p in self.parameters.values()]
        return all(math.isclose(f, 1, rel_tol=1e-12) for f in others) and all(abs(o) < 1e-12 for o in offsets)


def unit_change(old: TaskSpec, old_statistics: Statistics, new: TaskSpec, statistics: Statistics) -> UnitChange | None:
    """None if all units are the same, or the tasks have not the same number of axes."""
    if len(old.axes) != len(new.axes) or old.steady != new.steady:
        return None
    change = UnitChange(
        1.0 if new.steady or old.time_unit != new.time_unit else new.dt / old.dt,
        # Numbers in other units than before (km, m) are no other length; only where the units are the same they are.
        tuple(a.extent / b.extent if a.unit == b.unit else 1.0 for a, b in zip(old.axes, new.axes, strict=True)),
        _parameters(_units_of(old, old_statistics), _units_of(new, statistics)),
    )
    return None if change.nothing else change


# Unit of the relative form, scale, mean and deviation of a parameter.
_Units = tuple[float, str, float, float]


def _units_of(task: TaskSpec, statistics: Statistics) -> dict[str, _Units]:
    numbers = zip(task.parameters, statistics.parameter_mean, safe(statistics.parameter_std), strict=True)
    return {
        p.name: (max(abs(p.minimum), abs(p.maximum)) or math.hypot(mean, std), p.scale, mean, std)
        for p, mean, std in numbers
    }


def _parameters(old: Mapping[str, _Units], new: Mapping[str, _Units]) -> dict[str, ParameterUnits]:
    units = {}
    for name in (n for n in new if n in old):  # in the order of the task: sums must not depend on hashes of names
        (was, scale, old_mean, old_std), (now, new_scale, mean, std) = old[name], new[name]
        relative = now / was
        if scale != new_scale:
            # Normalized, a parameter and its logarithm grow alike over the data, and the slope stays. To convert it
            # to first order around the mean was worse on burgers1d, and to begin at 0 worse still.
            units[name] = ParameterUnits(relative)
        else:
            units[name] = ParameterUnits(relative, std / old_std, (mean - old_mean) / old_std)
    return units
