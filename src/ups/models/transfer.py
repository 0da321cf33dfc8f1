"""Weights of one model as the start of another, whose tasks, fields and dimensions may differ.

Parameters go over by name. In tables whose rows belong to names (tasks, channels, parameters), rows do: those that both
models know are taken. A task that only the new model knows begins with rows of the known one that it is most like,
where the network says so (`Network.borrowed_rows`); other rows stay as the new model drew them. If it knows none of the
tasks, weight matrices are rescaled to their initial norm, so that fine-tuning moves them faster. Kernels of a model
with fewer dimensions are put into the center of larger ones. What does not fit is new, and said.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor

from ups.errors import ConfigError
from ups.models.build import build_model
from ups.models.multiscale import MultiscaleNetwork
from ups.models.network import Network
from ups.models.stepper import OPERATOR, STEADY, Stepper
from ups.models.task_tables import NamedTable
from ups.models.warm_start import NamedRows, UnitChange, unit_change
from ups.spec.task import TaskSpec

_SHOWN = 12


@dataclass
class Taken:
    """What a model got from another.

    whole: parameters that were taken as a whole. rows: parameter -> (names of the rows that were taken, names of the
    new ones). new: parameters that the other model lacks, or has in another shape. num_taken, num_weights: numbers.
    converted: tasks with another time step, extent, or range or statistics of parameters: weights were converted.
    other_scaling: tasks whose frames only one of the models divides by their size (`amplitude`).
    other_kernels: tasks that got the kernels of larger ones, because only the other model has kernels for each number
    of dimensions (`own_kernels`).
    like: new task -> the known one with whose rows it began.
    made_smaller: matrices that were larger than new ones, where all tasks are new.
    """

    whole: tuple[str, ...] = ()
    rows: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    new: tuple[str, ...] = ()
    num_taken: int = 0
    num_weights: int = 0
    converted: tuple[str, ...] = ()
    other_scaling: tuple[str, ...] = ()
    other_kernels: tuple[str, ...] = ()
    like: dict[str, str] = field(default_factory=dict)
    made_smaller: int = 0

    def describe(self) -> str:
        """In words, for the log of a run."""
        share = self.num_taken / max(self.num_weights, 1)
        parts = [f"{self.num_taken:,} of {self.num_weights:,} weights ({share:.1%}) were taken"]
        fresh = sorted({name for _, missing in self.rows.values() for name in missing})
        for what, names in (("new rows", fresh), ("new parameters", self.new)):
            if names:
                more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
                parts.append(f"{what}: {', '.join(names[:_SHOWN])}{more}")
        if self.like:
            pairs = ", ".join(f"{new} like {known}" for new, known in self.like.items())
            parts.append(f"new tasks begin {pairs} (a guess from their descriptions)")
        if self.made_smaller:
            parts.append(
                f"no task was known, so {self.made_smaller} large matrices were rescaled to their initial norm"
            )
        if self.converted:
            parts.append(f"converted to other units of time, length or parameters: {', '.join(self.converted)}")
        if self.other_scaling:
            parts.append(
                f"frames of {', '.join(self.other_scaling)} are divided by their size in only one of the two models "
                "(model.amplitude): weights will have to adapt"
            )
        if self.other_kernels:
            parts.append(
                f"{', '.join(self.other_kernels)} got the kernels of tasks with more dimensions, because this model "
                "shares kernels and the other does not (set model.own_kernels: true to take each)"
            )
        return "; ".join(parts)


@torch.no_grad()
def transfer(source: Stepper, target: Stepper, start_task: str | None = None) -> Taken:
    """Write into `target` what `source` has for it, network by network. Raises ConfigError if that is nothing.

    start_task: of the source, as which the one task of the target begins, so that it predicts at once.
    """
    if start_task is not None:
        return _transfer_as(start_task, source, target)
    pairs, common = _new_and_like(source, target), _in_common(source, target)
    taken = Taken(other_scaling=_other_scaling(source, target), other_kernels=_other_kernels(source, target))
    tables: dict[str, set[str]] = {}
    for name, network in target.networks.items():
        # Steady tasks alone have no network of their own: the model itself predicts them.
        alone = name == OPERATOR and STEADY in source.networks and all(task.steady for task in target.tasks)
        known = STEADY if alone else name
        given = cast(Network, source.networks[known]) if known in source.networks else None
        tables[name] = _transfer(taken, given, cast(Network, network), name, pairs, common)
    if not taken.num_taken:
        if source.config.type == target.config.type:
            raise ConfigError(
                "no weight to start from matches this model (different sizes and tasks)",
                hint="give the model the sizes that the other has (see its config.yaml), or leave start_from out",
            )
        raise ConfigError(
            f"a model of type '{source.config.type}' has no weights for one of type '{target.config.type}'",
            hint="start from a model of the same type, or leave start_from out",
        )
    changes = _unit_changes(source, target)
    converted = [cast(Network, n).change_units(changes, tables[name]) for name, n in target.networks.items()]
    taken.converted = tuple(sorted(changes)) if any(converted) else ()
    return taken


def _transfer_as(start_task: str, source: Stepper, target: Stepper) -> Taken:
    """By way of a model that calls the task and what belongs to it as the source does."""
    task, known = target.tasks[0], {one.name: one for one in source.tasks}.get(start_task)
    fits = known is not None and _outline(known) == _outline(task) and isinstance(target.network, MultiscaleNetwork)
    if known is None or not fits or len(target.tasks) > 1:
        raise ConfigError(
            f"task '{task.name}' cannot begin as start_task '{start_task}' of the weights to start from",
            hint="name one with the same axes and predicted fields, for data of one task and model.type multiscale",
        )
    fields = [_as(task.fields_of(role), known.fields_of(role)) for role in ("static", task.predicted)]
    axes, parameters = _as(task.axes, known.axes), _as(task.parameters, known.parameters)
    alias = TaskSpec(
        known.name,
        (*fields[0], *fields[1]),
        axes,
        parameters,
        task.dt,
        task.time_unit,
        task.steady,
        (),
        task.symmetries,
    )
    statistics = {alias.name: target.statistics[task.name]}
    renamed = build_model(target.configs, [alias], statistics, target.context_frames)
    taken = transfer(source, renamed)
    for theirs, mine in zip(renamed.modules(), target.modules(), strict=True):
        for given, own in zip(theirs.parameters(recurse=False), mine.parameters(recurse=False), strict=True):
            if isinstance(mine, NamedTable) and isinstance(theirs, NamedTable):  # rows are sorted by names
                own[mine.rows(task, own.device)] = given[theirs.rows(alias, given.device)].to(own)
            else:
                own.copy_(given)
    taken.like = {task.name: known.name}
    return taken


def _outline(task: TaskSpec) -> tuple[object, ...]:
    ranks = [field.tensor_rank for field in task.fields_of(task.predicted)]
    return task.steady, [axis.periodic for axis in task.axes], ranks


def _as(mine: tuple[Any, ...], known: tuple[Any, ...]) -> tuple[Any, ...]:
    """Under names that are known: their own where all are, else one after the other."""
    names = [one.name for one in known]
    if {one.name for one in mine} <= set(names):
        return mine
    names += [f"new_{number}" for number in range(len(mine))]
    return tuple(replace(one, name=name) for one, name in zip(mine, names, strict=False))


def _unit_changes(source: Stepper, target: Stepper) -> dict[str, UnitChange]:
    """Of the tasks that both know."""
    changes = {}
    for old, new in _in_common(source, target):
        change = unit_change(old, source.statistics[old.name], new, target.statistics[new.name])
        if change is not None:
            changes[new.name] = change
    return changes


def _other_scaling(source: Stepper, target: Stepper) -> tuple[str, ...]:
    """Tasks that both know whose frames only one of the models divides by their size."""

    def scales(stepper: Stepper, task: TaskSpec) -> bool:
        network = cast(Network, stepper.networks[stepper.network_of(task)])
        return network.scales_frames(task, stepper.statistics[task.name].spans_sizes)

    return tuple(new.name for old, new in _in_common(source, target) if scales(source, old) != scales(target, new))


def _other_kernels(source: Stepper, target: Stepper) -> tuple[str, ...]:
    """Tasks of the target for whose dimensions only the source has kernels of their own."""
    theirs, mine = source.network, target.network
    most = max(theirs.kernel_axes(task.num_spatial_dims) for task in source.tasks)
    return tuple(
        task.name
        for task in target.tasks
        if theirs.kernel_axes(dims := task.num_spatial_dims) == dims < min(most, mine.kernel_axes(dims))
    )


def _new_and_like(source: Stepper, target: Stepper) -> list[tuple[TaskSpec, TaskSpec]]:
    """Each task that only the target knows, and the one of the source that it is most like."""
    known = {task.name for task in source.tasks}
    pairs = [(task, most_alike(task, source.tasks)) for task in target.tasks if task.name not in known]
    return [(task, like) for task, like in pairs if like is not None]


def _in_common(source: Stepper, target: Stepper) -> list[tuple[TaskSpec, TaskSpec]]:
    known = {task.name: task for task in source.tasks}
    return [(known[task.name], task) for task in target.tasks if task.name in known]


def _transfer(
    taken: Taken,
    source: Network | None,
    target: Network,
    network: str,
    pairs: Sequence[tuple[TaskSpec, TaskSpec]],
    common: Sequence[tuple[TaskSpec, TaskSpec]],
) -> set[str]:
    """One network, added to what was taken; parameters of others than the operator are said with its name. Returns the
    names of the tables of which rows were taken. pairs: new tasks, and what each is like. common: known tasks, as the
    source and as the target have them."""
    prefix = "" if network == OPERATOR else f"{network}/"
    own = dict(target.named_parameters())
    taken.num_weights += sum(parameter.numel() for parameter in own.values())
    if source is None:
        taken.new += tuple(prefix + name for name in own)
        return set()
    all_new = not common
    drawn = {id(matrix): _size(matrix) for matrix in target.matrices()} if all_new else {}
    fitted = target.fitted(source, dict(source.named_parameters()))
    known, wanted = source.named_rows(), target.named_rows()
    borrowed: dict[str, dict[str, str | None]] = defaultdict(dict)
    wished: dict[str, set[str]] = defaultdict(set)  # rows of each task
    for task, like in [*((task, old) for old, task in common), *pairs]:
        for name, wishes in target.borrowed_rows(task, like).items():
            borrowed[name].update(wishes)
            wished[task.name].update(wishes)
    tables: set[str] = set()
    lent: set[str] = set()
    whole: set[int] = set()
    for name, parameter in own.items():
        given = fitted.get(name)
        if given is not None and name in wanted and name in known:
            rows = _take_rows(parameter, wanted[name], given, known[name])
            if rows is not None:
                tables.add(name)
                taken.rows[prefix + name] = rows
                lent |= _borrow_rows(parameter, wanted[name], given, known[name], borrowed[name])
                taken.num_taken += parameter.numel() * len(rows[0]) // max(len(wanted[name].names), 1)
                continue
        elif given is not None and given.shape == parameter.shape:
            parameter.copy_(given)
            whole.add(id(parameter))
            taken.whole += (prefix + name,)
            taken.num_taken += parameter.numel()
            continue
        taken.new += (prefix + name,)
    likes = {task.name: like.name for task, like in pairs if lent & wished[task.name]}
    taken.like |= likes
    if likes and all_new:
        taken.made_smaller += sum(_make_smaller(m, drawn[id(m)]) for m in target.matrices() if id(m) in whole)
    return tables


def _size(matrix: Tensor) -> float:
    """Root mean square of the entries, in units of 1 / sqrt(columns), as most matrices are drawn. In float64: the last
    bit of a sum in float32 depends on the number of threads, and all ranks must start alike."""
    return math.sqrt(float(matrix.double().square().mean()) * (matrix.numel() // matrix.shape[0]))


def _make_smaller(matrix: Tensor, drawn: float) -> bool:
    """Scale a matrix down to its size as it was drawn, or to 1 where that is less (some are zeros). Returns whether it
    was larger, by more than matrices that are drawn differ."""
    limit = max(drawn, 1.0)
    size = _size(matrix)
    if not size > 1.05 * limit:  # also if it is no number
        return False
    matrix.mul_(limit / size)
    return True


def _take_rows(
    parameter: Tensor, wanted: NamedRows, given: Tensor, known: NamedRows
) -> tuple[tuple[str, ...], tuple[str, ...]] | None:
    """Names of taken and of new rows; None if rows have another shape."""
    dim = wanted.dim
    if known.dim != dim or _without(parameter, dim) != _without(given, dim):
        return None
    places = {name: place for place, name in enumerate(known.names)}
    pairs = [(place, places[name]) for place, name in enumerate(wanted.names) if name in places]
    if pairs:
        to, of = (torch.tensor(column, device=parameter.device) for column in zip(*pairs, strict=True))
        parameter.index_copy_(dim, to, given.to(parameter).index_select(dim, of))
    taken = tuple(wanted.names[place] for place, _ in pairs)
    return taken, tuple(name for name in wanted.names if name not in places)


def _borrow_rows(
    parameter: Tensor, wanted: NamedRows, given: Tensor, known: NamedRows, wishes: Mapping[str, str | None]
) -> set[str]:
    """Rows that only the new model has, as rows that the other has, or as zeros. Returns the names of the former."""
    lent = set()
    places = {name: place for place, name in enumerate(known.names)}
    for place, name in enumerate(wanted.names):
        if name in places or name not in wishes:
            continue
        wish = wishes[name]
        row = parameter.select(wanted.dim, place)
        if wish is None:
            row.zero_()
        elif wish in places:
            row.copy_(given.select(known.dim, places[wish]))
            lent.add(name)
    return lent


def _without(x: Tensor, dim: int) -> tuple[int, ...]:
    return (*x.shape[:dim], *x.shape[dim + 1 :])


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
