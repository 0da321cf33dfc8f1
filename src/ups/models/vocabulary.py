"""Names to rows of weight tables: what lets tasks with different fields, parameters and dimensions share one model.

Every table is indexed by name and sliced by dimension, so each parameter of the model is in every graph, whatever the
task of a batch: a row that is not used gets a zero gradient, never a missing one. DDP then needs no search for unused
parameters, and `fully_shard` reduces the same tensors on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from ups.errors import ConfigError, DataError
from ups.spec.task import Boundary, Role, TaskSpec

ROLES: tuple[Role, ...] = get_args(Role)
MAX_AXES = 3
# Rows of weight tables: "unknown" has none, so that it says nothing, and tables keep the size they have in bundles.
BOUNDARIES: tuple[str, ...] = (*(kind for kind in get_args(Boundary) if kind != "unknown"), "absent")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The names a model knows, each sorted, so that the order of tasks in a recipe does not change the weights.

    tasks, channels (of any role), parameters; dims: numbers of spatial dimensions in use.
    """

    tasks: tuple[str, ...]
    channels: tuple[str, ...]
    parameters: tuple[str, ...]
    dims: tuple[int, ...]

    @classmethod
    def of(cls, tasks: Sequence[TaskSpec]) -> Vocabulary:
        """The names in `tasks`. Raises ConfigError if there is none, or two share a name."""
        names = [t.name for t in tasks]
        twice = sorted({n for n in names if names.count(n) > 1})
        if not tasks or twice:
            raise ConfigError(
                f"two tasks are called '{twice[0]}'" if twice else "a model needs at least one task",
                hint="give each entry of data.tasks its own name",
            )
        return cls(
            tasks=tuple(sorted(names)),
            channels=tuple(sorted({c for t in tasks for role in ROLES for c in t.channel_names(role)})),
            parameters=tuple(sorted({p.name for t in tasks for p in t.parameters})),
            dims=tuple(sorted({t.num_spatial_dims for t in tasks})),
        )

    def task_id(self, name: str) -> int:
        return _position("task", self.tasks, name)

    def channel_ids(self, names: Sequence[str]) -> list[int]:
        return [_position("field channel", self.channels, n) for n in names]

    def parameter_ids(self, names: Sequence[str]) -> list[int]:
        return [_position("parameter", self.parameters, n) for n in names]


def _position(kind: str, names: tuple[str, ...], name: str) -> int:
    try:
        return names.index(name)
    except ValueError:
        raise DataError(
            f"the model does not know the {kind} '{name}'; it was built for {', '.join(names) or 'none'}",
            hint="use a model that was trained on this task",
        ) from None


@dataclass(frozen=True, slots=True)
class Channels:
    """What the channels of a field tensor are: one name and one slot each.

    slot: which context frame the channel belongs to, 0 the oldest; static and target fields stand in the last one.
    """

    names: tuple[str, ...]
    slots: tuple[int, ...]


def patch_rows(patch_size: int, dims: Sequence[int]) -> dict[int, slice]:
    """Rows of a patch table for each number of dimensions: p for 1D, then p^2 for 2D, then p^3 for 3D."""
    rows: dict[int, slice] = {}
    start = 0
    for d in sorted(dims):
        rows[d] = slice(start, start + patch_size**d)
        start += patch_size**d
    return rows
