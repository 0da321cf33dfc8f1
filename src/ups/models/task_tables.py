"""Weights that belong to names: how fields of a task enter the shared network and how its predictions leave.

A table has one row for each name that a task uses, all of them in one parameter: every parameter is in every graph, a
row that is not used gets a zero gradient, and a task more is a few rows more.

B samples, F input channels, C predicted channels, S space, D width.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.models.grid_convolution import Layout, convolved, grid_rank, reduced, working_dtype
from ups.models.grid_fit import GridFit
from ups.models.network import NetworkInput
from ups.models.normalization import Constants, as_type
from ups.spec.task import AxisSpec, TaskSpec

# What a row is for: first the task, '' where tasks share it by the names that follow.
RowName = tuple[str, ...]


class NamedTable(nn.Module, ABC):
    """A module whose parameters all have one row for each of `row_names`, which are sorted: the order of tasks does
    not matter."""

    def __init__(self, tasks: Sequence[TaskSpec]) -> None:
        super().__init__()
        self.row_names: tuple[RowName, ...] = tuple(sorted({name for t in tasks for name in self.names_of(t)}))
        self._rows = {name: row for row, name in enumerate(self.row_names)}
        self._constants = Constants()

    @abstractmethod
    def names_of(self, task: TaskSpec) -> list[RowName]:
        """The rows that a task uses, in the order in which `rows` gives them."""

    def lasting_name(self, row: RowName) -> str:
        """The name under which another model finds this row."""
        return "/".join(row)

    def rows(self, task: TaskSpec, device: torch.device) -> Tensor:
        """Their numbers, as an index."""
        return self._constants.index(lambda: [self._rows[n] for n in self.names_of(task)], task.name, device)


class NamedVectors(NamedTable):
    """Vectors by name: table (rows, D)."""

    def __init__(self, tasks: Sequence[TaskSpec], width: int, std: float) -> None:
        super().__init__(tasks)
        self.table = nn.Parameter(torch.randn(len(self.row_names), width) * std)

    def of(self, task: TaskSpec) -> Tensor:
        """(names of the task, D)."""
        return self.table[self.rows(task, self.table.device)]

    def row(self, name: RowName) -> Tensor:
        """(D,): one of them, in place."""
        return self.table[self._rows[name]]


class Lift(NamedTable):
    """Fields and positions -> D channels: a kernel for each task, channel and context frame. table (rows, taps, D)."""

    def __init__(self, tasks: Sequence[TaskSpec], context_frames: int, width: int, size: int, axes: int) -> None:
        self.context_frames = context_frames
        super().__init__(tasks)
        self.size, self.axes = size, axes
        num_inputs = {t.name: len(self.names_of(t)) for t in tasks}
        std = torch.tensor([(num_inputs[name[0]] * size**axes) ** -0.5 for name in self.row_names])
        self.table = nn.Parameter(torch.randn(len(self.row_names), size**axes, width) * std[:, None, None])

    def names_of(self, task: TaskSpec) -> list[RowName]:
        """In the order of `ups.models.stepper.Stepper.inputs`, then the positions."""
        frames = range(self.context_frames)
        static = [(task.name, name, "given") for name in task.channel_names("static")]
        state = [(task.name, name, str(frame)) for frame in frames for name in task.channel_names("state")]
        places = [
            (task.name, f"{axis.name} {kind}", "position")
            for axis in task.axes
            for kind in position_kinds(axis, "translation" in task.symmetries)
        ]
        return [*static, *state, *places]

    def lasting_name(self, row: RowName) -> str:
        """Frames are counted from the last one: that is what it means in a model with more or fewer of them."""
        frame = row[-1]
        return "/".join((*row[:-1], str(int(frame) - self.context_frames) if frame.isdigit() else frame))

    def borrowed_rows(self, task: TaskSpec, like: TaskSpec) -> dict[str, str | None]:
        """Rows of a new task -> those of one that is like it: of the same frame and part (what comes before a point, as
        in `noisy.u` of a flow), by the name of the channel or else one after the other."""
        borrowed: dict[str, str | None] = {}
        seen: dict[tuple[str, str], int] = {}
        theirs = self.names_of(like)
        for row in self.names_of(task):
            alike = [other for other in theirs if _part(other) == _part(row)]
            alike = alike or [other for other in theirs if other[-1] == row[-1]]
            number = seen[_part(row)] = seen.get(_part(row), -1) + 1
            if alike:
                same = [other for other in alike if other[1] == row[1]]
                borrowed[self.lasting_name(row)] = self.lasting_name(same[0] if same else alike[number % len(alike)])
        return borrowed

    def forward(self, given: NetworkInput, fields: Tensor, fit: GridFit, layout: Layout) -> Tensor:
        """fields (B, F, *S), which may be scaled -> (B, *grid, D) on the grid that fits."""
        task = given.task
        positions = given.memo.once("positions", lambda: self._positions(given, fields))
        inputs = fit.onto(torch.cat([fields, *positions], dim=1) if positions else fields, task).movedim(1, -1)
        if task.num_spatial_dims == 1:
            inputs = inputs.unsqueeze(1)
        dtype = working_dtype(inputs, self.table)
        taps = as_type(given.memo.once("lift", lambda: self._taps(task)), dtype)
        sources = layout.sources(inputs.shape[1:-1], self.size, self._constants, inputs.device)
        return convolved(as_type(inputs, dtype).contiguous(), taps, None, layout, sources)

    def _taps(self, task: TaskSpec) -> Tensor:
        """The kernel (D, *sizes, F)."""
        taps = self.table[self.rows(task, self.table.device)]
        taps = taps.reshape(taps.shape[0], *[self.size] * self.axes, -1)
        return reduced(taps, self.axes, task.num_spatial_dims).transpose(0, -1).contiguous()

    def _positions(self, given: NetworkInput, fields: Tensor) -> list[Tensor]:
        """(B, 1, *S) for each coordinate that matters."""
        positions = []
        space = fields.shape[2:]
        for number, (axis, points) in enumerate(zip(given.task.axes, given.coordinates, strict=True)):
            shape = [1, 1, *[1] * len(space)]
            shape[number + 2] = -1
            for kind in position_kinds(axis, "translation" in given.task.symmetries):
                place = position(points, axis, kind).to(fields.dtype).reshape(shape)
                positions.append(place.expand(fields.shape[0], 1, *space))
        return positions


def _part(row: RowName) -> tuple[str, str]:
    """Of a row of `Lift`: frame, static or position, and what stands before a point in the name of the channel."""
    return row[-1], row[1].rpartition(".")[0]


def position_kinds(axis: AxisSpec, translation: bool) -> tuple[str, ...]:
    """What a network is told about the place along an axis: nothing where the equation is the same everywhere."""
    if not axis.periodic:
        return ("coordinate",)
    return () if translation else ("cosine", "sine")


def position(points: Tensor, axis: AxisSpec, kind: str) -> Tensor:
    """(n,) coordinates -> (n,): from -1 to 1 along the axis, or cosine and sine of the turn around a periodic one."""
    if kind == "coordinate":
        length = points[-1] - points[0]
        return 2 * (points - points[0]) / torch.where(length > 0, length, 1) - 1
    turn = 2 * math.pi * (points - points[0]) / axis.extent
    return turn.cos() if kind == "cosine" else turn.sin()


class Lower(NamedTable):
    """D channels -> the predicted ones of a task, point by point; zero when new.

    weight (rows, D), bias (rows,), log_gain (rows,): the size of the prediction of a channel can change quickly.
    """

    def __init__(self, tasks: Sequence[TaskSpec], width: int) -> None:
        super().__init__(tasks)
        self.weight = nn.Parameter(torch.zeros(len(self.row_names), width))
        self.bias = nn.Parameter(torch.zeros(len(self.row_names)))
        self.log_gain = nn.Parameter(torch.zeros(len(self.row_names)))

    def names_of(self, task: TaskSpec) -> list[RowName]:
        return [(task.name, name) for name in task.channel_names(task.predicted)]

    def forward(self, x: Tensor, given: NetworkInput, fit: GridFit) -> Tensor:
        """x (B, *grid, D) -> (B, C, *S), on the grid of the data."""
        task = given.task

        def scaled() -> tuple[Tensor, Tensor]:
            rows = self.rows(task, self.weight.device)
            gain = self.log_gain[rows].exp()
            return self.weight[rows] * gain[:, None], self.bias[rows] * gain

        weight, bias = given.memo.once("lower", scaled)
        y = F.linear(as_type(x, weight.dtype), weight, bias).movedim(-1, 1)
        y = y.flatten(2, 3) if grid_rank(task.num_spatial_dims) > task.num_spatial_dims else y
        return fit.back(y, task, given.fields.shape[2:])
