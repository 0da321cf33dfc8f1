"""Which known task a new one is most like, as far as descriptions say: a guess, for a better start than chance."""

from __future__ import annotations

from collections.abc import Sequence

from ups.spec.task import TaskSpec


def most_alike(task: TaskSpec, known: Sequence[TaskSpec]) -> TaskSpec | None:
    """As many dimensions count most, then steady or not, boundaries, fields and parameters; the first of equals."""
    return max(known, key=lambda other: _likeness(task, other), default=None)


def _likeness(task: TaskSpec, other: TaskSpec) -> tuple[int, ...]:
    fields, parameters = (
        {one.name for one in mine} & {one.name for one in theirs}
        for mine, theirs in ((task.fields, other.fields), (task.parameters, other.parameters))
    )
    axes = list(zip(task.axes, other.axes, strict=False))
    return (
        int(task.num_spatial_dims == other.num_spatial_dims),
        int(task.steady == other.steady),
        # Whether an axis has ends says more than what happens there.
        sum(mine.periodic == theirs.periodic for mine, theirs in axes),
        sum(mine.boundary == theirs.boundary for mine, theirs in axes),
        len(fields),
        len(parameters),
    )
