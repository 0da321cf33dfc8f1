"""The multiscale network: convolutions at full resolution and attention on a coarse grid, shared by all tasks.

    fields / amplitude -> lift -> [blocks, shrink] .. [blocks, attention] .. [grow + skip, blocks] -> lower x amplitude
    last frame         -> propagator: what is linear ---------------------------------------------------> +

Everything between lift and lower is the same for all tasks, or for all tasks with as many dimensions (`own_kernels`);
tasks differ by rows of tables. The tasks of a group run as one graph: their samples stand one behind the other, and
only padding and rotary positions depend on their boundaries. Queries and keys of the attention are rotated by angles
that grow along each axis, so that their products depend on the offset between two points.

B samples, C channels, S space, D width of a level, M modulations of all blocks. Grids are (B, *grid, D).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.config.model import MultiscaleConfig
from ups.errors import ConfigError
from ups.models.grid_convolution import (
    GridKernel,
    Grow,
    Layout,
    Range,
    ResidualBlock,
    Shrink,
    extended,
    grid_rank,
    plus_product,
    smoothed,
)
from ups.models.grid_fit import GridFit
from ups.models.network import Network, NetworkInput, NetworkWithLinearPart
from ups.models.normalization import Constants, as_type, wide, without_autocast
from ups.models.propagator import Propagator, last_frame
from ups.models.task_tables import Lift, Lower, NamedTable, NamedVectors, RowName
from ups.models.vocabulary import BOUNDARIES, MAX_AXES, Vocabulary
from ups.models.warm_start import NamedRows, UnitChange
from ups.spec.batch import Memo
from ups.spec.task import TaskSpec

_LIFT_TAPS = 3
_COARSE_TAPS = 3
# What the condition tells the blocks, with a row for each number, in their order.
_MODULATIONS = ("condition.out.weight", "condition.out.bias", "condition.noise.weight")
# The smallest size of a frame, in usual deviations, that still counts as one: what is weaker is noise.
_SMALLEST_AMPLITUDE = 1e-3


class MultiscaleNetwork(NetworkWithLinearPart):
    """One network for all tasks; its output is the scaled change, or the normalized target of a steady task."""

    def __init__(self, config: MultiscaleConfig, tasks: Sequence[TaskSpec], context_frames: int) -> None:
        super().__init__()
        self.config = config
        known = sorted(Vocabulary.of(tasks).dims)
        axes = max(known)
        dims = known if config.own_kernels else [axes]
        self._dims = frozenset(dims)
        widths, counts = config.widths, config.blocks
        sizes = [config.kernel_size, *[_COARSE_TAPS] * (len(widths) - 1)]
        self.axes, self._sizes = axes, sizes
        if config.attention and axes == 3 and widths[-1] < 6 * config.num_heads:
            raise ConfigError(
                f"3D attention needs at least 6 channels per head; widths[-1]={widths[-1]} / "
                f"num_heads={config.num_heads} gives {widths[-1] // config.num_heads}",
                hint="use fewer heads or a larger last width",
            )
        self.lift = Lift(tasks, context_frames, widths[0], _LIFT_TAPS, axes)
        levels = list(zip(widths, counts, sizes, strict=True))
        self.down = nn.ModuleList(_blocks(*level, dims) for level in levels[:-1])
        self.shrink = nn.ModuleList(Shrink(a, b, dims) for a, b in itertools.pairwise(widths))
        self.middle = _blocks(*levels[-1], dims)
        # By the number of the block before it, so that weights keep their name whichever other blocks have one.
        seeing = {True: range(counts[-1]), "last": range(counts[-1])[-1:], False: range(0)}[config.attention]
        self.attention = nn.ModuleDict({str(n): CoarseAttention(widths[-1], config.num_heads) for n in seeing})
        self.grow = nn.ModuleList(Grow(b, a, dims) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(_blocks(*level, dims) for level in levels[:-1])
        self.lower = Lower(tasks, widths[0])
        moving = config.propagator and not all(task.steady for task in tasks)
        self.propagator = Propagator(tasks) if moving else None
        self._modulated = [m for m in self.modules() if isinstance(m, ResidualBlock | CoarseAttention)]
        self._told = [m.num_modulations for m in self._modulated]
        self.condition = MultiscaleCondition(tasks, widths[-1], self._told, config.noise_size)
        self._constants = Constants()
        # Halving, and a kernel that must not be longer than the axis twice, ask for a grid of their own.
        self._fit = GridFit(2 ** len(self.shrink), least=config.kernel_size // 2)

    def forward(self, given: NetworkInput) -> Tensor:
        """fields (B, F, *S) -> (B, C, *S)."""
        return self.forward_group([given])[0]

    def forward_group(self, group: Sequence[NetworkInput]) -> list[Tensor]:
        """All tasks of a group as one graph; they have the same grid, and boundaries of any kind."""
        # Tasks with the same boundaries side by side: one range for all of them.
        order = sorted(range(len(group)), key=lambda n: _wraps(group[n].task))
        ordered = [group[n] for n in order]
        memo = ordered[0].memo if len(ordered) == 1 else Memo()
        layout = memo.once("layout", lambda: _layout([g.task for g in ordered], [g.fields.shape[0] for g in ordered]))
        amplitudes = [self._amplitude(g) for g in ordered]
        device = ordered[0].fields.device
        with without_autocast(device):
            modulations = self._modulations(ordered, amplitudes)
        x = _joined([self._lifted(g, a) for g, a in zip(ordered, amplitudes, strict=True)])
        x = wide(self._trunk(wide(x), modulations, layout, memo.once("halos", list)))
        predictions: dict[int, Tensor] = {}
        with without_autocast(device):
            parts = torch.split(x, [g.fields.shape[0] for g in ordered]) if len(ordered) > 1 else (x,)
            changes = self._linear(ordered)
            for n, given, part, amplitude, change in zip(order, ordered, parts, amplitudes, changes, strict=True):
                y = wide(self.lower(part, given, self._fit))
                y = y if amplitude is None else y * _by_sample(amplitude, y)
                predictions[n] = y if change is None else y + change
        return [predictions[n] for n in range(len(group))]

    def linear(self, given: NetworkInput) -> Tensor:
        """The propagator's part of the scaled change (B, C, *S) of a transient task, which can be fitted alone."""
        with without_autocast(given.fields.device):
            change = self._linear([given])[0]
        if change is None or given.task.steady:
            raise ValueError(f"task '{given.task.name}' has no linear part: it is steady, or the propagator is off")
        return change

    @property
    def linear_part(self) -> nn.Module:  # type: ignore[override]
        """The module that a stage fits alone."""
        if self.propagator is None:
            raise ConfigError("this network has no linear part: the propagator is off, or all of its tasks are steady")
        return self.propagator

    def linear_rows(self) -> list[tuple[nn.Parameter, list[str]]]:
        """The propagator's table, and the task of each row."""
        return [] if self.propagator is None else [(self.propagator.table, [n[0] for n in self.propagator.row_names])]

    def noise_sizes(self) -> tuple[nn.Parameter, list[str]] | None:
        """How strongly noise acts on each task, and their names."""
        noise = self.condition.noise
        return None if noise is None else (noise.sizes.table, [name for (name,) in noise.sizes.row_names])

    def fix_weights(self, fixed: bool = True) -> None:
        """Kernels are made once for each number of dimensions from now on, or each time again."""
        for module in self.modules():
            if isinstance(module, GridKernel):
                module.kept = {} if fixed else None

    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one."""
        return [m for m in self.modules() if isinstance(m, ResidualBlock | CoarseAttention | Shrink | Grow)]

    def feature_module(self) -> nn.Module:
        """The last block at the coarsest level, which has seen the whole frame."""
        return self.middle[-1]

    def named_rows(self) -> dict[str, NamedRows]:
        """The rows of all tables."""
        return {
            f"{name}.{parameter}": NamedRows(0, tuple(table.lasting_name(row) for row in table.row_names))
            for name, table in self.tables().items()
            for parameter, _ in table.named_parameters()
        }

    def borrowed_rows(self, task: TaskSpec, like: TaskSpec) -> dict[str, dict[str, str | None]]:
        """Of what enters the network: it has no norm, and where trained blocks meet a condition or fields as nobody
        trained them for, features grow by orders of magnitude. What leaves it is 0 for a new task. What a known task
        has more than it had (a channel, a parameter, a frame) says nothing at first."""
        if task.name == like.name:
            tables = {"lift": self.lift, **{f"condition.{n}": t for n, t in self.condition.told().items()}}
            return {
                f"{name}.table": {table.lasting_name(row): None for row in table.names_of(task)}
                for name, table in tables.items()
            }
        found = {f"condition.{name}.table": rows for name, rows in self.condition.borrowed_rows(task, like).items()}
        return {"lift.table": self.lift.borrowed_rows(task, like), **found}

    def fitted(self, source: Network, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of another multiscale network, with its kernels in as many dimensions as this one has."""
        if not isinstance(source, MultiscaleNetwork):
            return {}
        fitting = self.extended(weights, source.axes)
        if source.modulated_blocks() != self.modulated_blocks():
            # Rows belong to blocks in their order: those of other blocks may be as many, and mean something else.
            told = {name: fitting.pop(name) for name in list(fitting) if name in _MODULATIONS}
            fitting |= self._modulations_of(source, told)
        if (source.config.widths, source.config.kernel_size) != (self.config.widths, self.config.kernel_size):
            # Blocks meet others than those they were trained with, and what comes out of that is not to be believed:
            # predictions begin as no change. With more or fewer blocks alone, each still adds what it did.
            fitting = {name: weight for name, weight in fitting.items() if not name.startswith("lower.")}
        noise = self.condition.noise
        taken = fitting.get("condition.noise.weight")
        if noise is not None and (taken is None or taken.shape != noise.weight.shape):
            # Without weights that were trained for them, sizes of noise would say that there are some.
            fitting.pop("condition.noise.sizes.table", None)
        return fitting

    def scales_frames(self, task: TaskSpec, spans_sizes: bool) -> bool:
        """As the settings say; a steady task has no frame to divide."""
        return not task.steady and (spans_sizes if self.config.amplitude == "auto" else self.config.amplitude)

    def kernel_axes(self, dims: int) -> int:
        """As many as the largest task has, but where a number of dimensions has kernels of its own."""
        return dims if dims in self._dims else self.axes

    def change_units(self, changes: Mapping[str, UnitChange], taken: Collection[str]) -> bool:
        """Of the linear law, and of what the condition is told."""
        law = self.propagator if "propagator.table" in taken else None
        if law is not None:
            law.change_units(changes)
        told = {"condition.scalars.table", "condition.tasks.table"} <= set(taken)
        if told:
            self.condition.change_units(changes)
        return told or law is not None

    def _modulations_of(self, source: MultiscaleNetwork, told: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What the condition of another network tells each block that both have; the rest as it was drawn."""
        theirs, mine = source.modulated_blocks(), self.modulated_blocks()
        modulations: dict[str, Tensor] = {}
        for name, own in self.named_parameters():
            # A bias goes with its matrix.
            fits = name in told and own.shape[1:] == told[name].shape[1:]
            if not fits or (name == "condition.out.bias" and "condition.out.weight" not in modulations):
                continue
            rows = dict(zip(theirs, torch.split(told[name], [size for _, size in theirs]), strict=True))
            drawn = zip(mine, torch.split(own.detach(), [size for _, size in mine]), strict=True)
            modulations[name] = torch.cat([rows.get(block, new).to(new) for block, new in drawn])
        return modulations

    def modulated_blocks(self) -> list[tuple[str, int]]:
        """Names of the blocks that the condition modulates, in its order, and how many numbers each gets."""
        return [
            (n, m.num_modulations) for n, m in self.named_modules() if isinstance(m, ResidualBlock | CoarseAttention)
        ]

    def tables(self) -> dict[str, NamedTable]:
        """The tables whose rows belong to names, by the name of the module."""
        return {name: module for name, module in self.named_modules() if isinstance(module, NamedTable)}

    def extended(self, state: Mapping[str, Tensor], axes: int) -> dict[str, Tensor]:
        """The state dict of such a network for tasks of at most `axes` dimensions, with kernels as this one has them.

        On tasks of as many dimensions as both take, the result is the same as before. A kernel that differs in more
        than its axes is left out.
        """
        taken = dict(state)
        for name, module in self.named_modules():
            if isinstance(module, GridKernel) and f"{name}.weight" in state:
                own = {int(key.rsplit(".", 1)[1]): key for key in state if key.startswith(f"{name}.own.")}
                kernels = {dims: taken.pop(key) for dims, key in (own | {axes: f"{name}.weight"}).items()}
                taken |= {f"{name}.{key}": value for key, value in module.converted(kernels).items()}
        if axes == self.axes:
            return taken
        table = state["lift.table"]
        taps = table.reshape(table.shape[0], *[_LIFT_TAPS] * axes, -1)
        taken["lift.table"] = extended(taps, axes, self.axes).flatten(1, -2)
        return taken

    def _amplitude(self, given: NetworkInput) -> Tensor | None:
        """(B,): the size of the last frame, in usual deviations. The network sees fields of size 1, and is told. None
        for a task whose frames stay as they are."""
        if not self.scales_frames(given.task, given.spans_sizes):
            return None
        # Clamped before the root, whose slope at 0 is infinite.
        return wide(last_frame(given)).flatten(1).square().mean(1).clamp_min(_SMALLEST_AMPLITUDE**2).sqrt()

    def _modulations(self, group: Sequence[NetworkInput], amplitudes: Sequence[Tensor | None]) -> Tensor:
        """(B, 1, .., M): scales and shifts of all blocks. Of one task they are made once for a rollout, if no amplitude
        and no noise is part of them."""
        rank = grid_rank(group[0].task.num_spatial_dims)

        def told() -> Tensor:
            modulations: Tensor = self.condition(group, amplitudes)
            return modulations.reshape(modulations.shape[0], *[1] * rank, -1)

        first = group[0]
        lasting = len(group) == 1 and amplitudes[0] is None and first.noise is None
        return first.memo.once("modulations", told) if lasting else told()

    def _lifted(self, given: NetworkInput, amplitude: Tensor | None) -> Tensor:
        task, fields = given.task, given.fields
        if amplitude is not None:
            static, state = torch.tensor_split(fields, [task.num_channels("static")], dim=1)
            scaled = state / _by_sample(amplitude, state)
            fields = torch.cat([static, scaled], dim=1) if static.shape[1] else scaled
        layout = given.memo.once("layout", lambda: _layout([task], [fields.shape[0]]))
        lifted: Tensor = self.lift(given, fields, self._fit, layout)
        return lifted

    def _trunk(self, x: Tensor, modulations: Tensor, layout: Layout, halos: list[tuple[Tensor, ...]]) -> Tensor:
        """x (B, *grid, D), modulations (B, 1, .., M) -> (B, *grid, D). halos: sources of the known levels."""
        # Scales and shifts of one module after the other.
        halves = iter(torch.split(modulations, [n // 2 for n in self._told for _ in range(2)], dim=-1))
        of: dict[nn.Module, tuple[Tensor, Tensor]] = {m: (next(halves), next(halves)) for m in self._modulated}

        def through(level: int, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
            if level == len(halos):
                halos.append(layout.sources(x.shape[1:-1], self._sizes[level], self._constants, x.device))
            for block in blocks:
                x = block(x, *of[block], layout, *halos[level])
            return x

        passed = []
        for level, (blocks, shrink) in enumerate(zip(self.down, self.shrink, strict=True)):
            x = through(level, blocks, x)  # type: ignore[arg-type]
            passed.append(x)
            x = wide(shrink(self._smoothed(x, layout), layout))
        phases = self._phases(x, layout) if self.attention else x
        for number, block in enumerate(self.middle):
            x = through(len(passed), [block], x)
            if str(number) in self.attention:
                attention = self.attention[str(number)]
                x = attention(x, *of[attention], phases)
        for level in reversed(range(len(passed))):
            grown = self._smoothed(self.grow[level](x, layout), layout)
            x = through(level, self.up[level], passed[level] + grown)  # type: ignore[arg-type]
        return x

    def _smoothed(self, x: Tensor, layout: Layout) -> Tensor:
        """x (B, *grid, D) around halving and doubling: without waves that the coarser grid cannot hold.

        In 1D that costs more at shocks than it brings.
        """
        return smoothed(x, layout, self._constants) if self.config.smooth and layout.dims > 1 else x

    def _phases(self, x: Tensor, layout: Layout) -> Tensor:
        """Rotary phases by the boundaries of each sample: (B or 1, points, level width), complex; exported (.., 2)."""
        grid, heads = tuple(x.shape[1:-1]), self.config.num_heads
        num_pairs = x.shape[-1] // heads // 2
        all_phases = []
        for first, stop, wraps in layout.ranges:
            phases = self._constants.get(
                lambda: rope_phases(rope_angles(grid, wraps, num_pairs), heads),  # noqa: B023
                ("phases", grid, wraps),
                x.device,
                wide(x).dtype,
            )
            all_phases.append(phases.expand(1 if len(layout.ranges) == 1 else stop - first, -1, -1, -1))
        joined = all_phases[0] if len(all_phases) == 1 else torch.cat(all_phases)
        # Complex here and not in the module: fully_shard rounds real inputs of a module to bfloat16.
        return joined if torch.compiler.is_exporting() else torch.view_as_complex(joined)

    def _linear(self, group: Sequence[NetworkInput]) -> list[Tensor | None]:
        """The propagator's scaled change of each task of a group; None where there is none."""
        transient = [g for g in group if not g.task.steady]
        if self.propagator is None:
            return [None] * len(group)
        if not transient:  # every parameter is in every graph
            return [self.propagator.table.sum() * 0.0 for _ in group]
        changes = iter(self.propagator(transient))
        return [None if g.task.steady else next(changes) * _by_channel(g.change_gain, g.fields) for g in group]


def build(config: MultiscaleConfig, tasks: Sequence[TaskSpec], context_frames: int) -> MultiscaleNetwork:
    """The multiscale network for a set of tasks."""
    return MultiscaleNetwork(config, tasks, context_frames)


def _blocks(width: int, count: int, size: int, dims: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(ResidualBlock(width, size, dims) for _ in range(count))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _by_sample(numbers: Tensor, like: Tensor) -> Tensor:
    """numbers (B,) -> (B, 1, ..) with as many dimensions as `like` (B, C, *S)."""
    return numbers.reshape(-1, *[1] * (like.ndim - 1))


def _by_channel(numbers: Tensor, like: Tensor) -> Tensor:
    """numbers (C,) -> (C, 1, ..) for tensors like `like` (B, C, *S)."""
    return numbers.reshape(-1, *[1] * (like.ndim - 2))


def _wraps(task: TaskSpec) -> tuple[bool, ...]:
    """Which axes of the grid are periodic; that of a line has one more, which is not."""
    wraps = tuple(axis.periodic for axis in task.axes)
    return (*[False] * (grid_rank(len(wraps)) - len(wraps)), *wraps)


def _layout(tasks: Sequence[TaskSpec], counts: Sequence[int]) -> Layout:
    """Samples of tasks one behind the other; neighbors with the same boundaries are one range."""
    ranges: list[Range] = []
    start = 0
    for task, count in zip(tasks, counts, strict=True):
        wraps = _wraps(task)
        if ranges and ranges[-1][2] == wraps:
            ranges[-1] = (ranges[-1][0], start + count, wraps)
        else:
            ranges.append((start, start + count, wraps))
        start += count
    return Layout(tasks[0].num_spatial_dims, tuple(ranges))


class _Tasks(NamedVectors):
    def names_of(self, task: TaskSpec) -> list[RowName]:
        return [(task.name,)]


class _Boundaries(NamedVectors):
    """One row for each axis and kind, or for each end where the kinds of an axis differ; an unknown kind has none: it
    says nothing."""

    def names_of(self, task: TaskSpec) -> list[RowName]:
        names: list[RowName] = []
        for number, axis in enumerate(task.axes):
            if isinstance(axis.boundary, str):
                names += [("", str(number), axis.boundary)] if axis.boundary in BOUNDARIES else []
            else:
                ends = zip(axis.boundary, ("first", "last"), strict=True)
                names += [("", str(number), f"{kind} {end}") for kind, end in ends if kind in BOUNDARIES]
        return names + [("", str(number), "absent") for number in range(len(task.axes), MAX_AXES)]


class _Scalars(NamedVectors):
    """Slopes: of dt and amplitude, and of each parameter twice, as it is and normalized."""

    def names_of(self, task: TaskSpec) -> list[RowName]:
        names = [p.name for p in task.parameters]
        return [("", "log dt"), ("", "log amplitude"), *(("", n, "relative") for n in names), *(("", n) for n in names)]


class _Noise(nn.Module):
    """Noise of each sample -> modulations: weight (M, K), after a factor for each task.

    Both are 0 until a stage trains members: a task that no such stage had stays without.
    """

    def __init__(self, tasks: Sequence[TaskSpec], noise_size: int, num_modulations: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_modulations, noise_size))
        self.sizes = _Tasks(tasks, 1, std=0.0)

    def forward(self, group: Sequence[NetworkInput]) -> Tensor:
        """(B, M); zeros where no noise is given, so that every parameter is in every graph."""
        return F.linear(torch.cat([self._of(given) for given in group]), self.weight)

    def _of(self, given: NetworkInput) -> Tensor:
        samples = (given.dt.shape[0], self.weight.shape[1])
        noise = self.weight.new_zeros(samples) if given.noise is None else given.noise.to(self.weight.dtype)
        return noise * self.sizes.of(given.task)


class MultiscaleCondition(nn.Module):
    """Scalars and names of all samples -> scales and shifts of all blocks."""

    def __init__(self, tasks: Sequence[TaskSpec], width: int, modulations: Sequence[int], noise_size: int = 0) -> None:
        """modulations: how many numbers each block gets; the first half of them are scales."""
        super().__init__()
        self._halves = [n // 2 for n in modulations]
        self._constants = Constants()
        num_modulations = sum(modulations)
        self._specs = tuple(tasks)
        self.tasks = _Tasks(tasks, width, std=0.5)
        self.boundaries = _Boundaries(tasks, width, std=0.1)
        self.scalars = _Scalars(tasks, width, std=0.1)
        self.hidden = nn.Linear(width, width)
        self.out = nn.Linear(width, num_modulations)
        nn.init.normal_(self.out.weight, std=0.02)
        nn.init.zeros_(self.out.bias)
        self.noise = _Noise(tasks, noise_size, num_modulations) if noise_size else None

    def forward(self, group: Sequence[NetworkInput], amplitudes: Sequence[Tensor | None]) -> Tensor:
        """amplitudes (B,) of each task -> (B, M) for the samples of the group, one task after the other."""
        entry = _joined([self._entry(g, a) for g, a in zip(group, amplitudes, strict=True)])
        modulations: Tensor = self.out(F.silu(self.hidden(F.silu(entry))))
        modulations = modulations + self._constants.get(self._identity, "identity", entry.device, modulations.dtype)
        return modulations if self.noise is None else modulations + self.noise(group)

    def _identity(self) -> Tensor:
        """(M,): scales of 1 and shifts of 0."""
        return torch.cat([torch.cat([torch.ones(half), torch.zeros(half)]) for half in self._halves])

    def told(self) -> dict[str, NamedTable]:
        """The tables of what it is told about a sample, by name."""
        return {"tasks": self.tasks, "boundaries": self.boundaries, "scalars": self.scalars}

    def borrowed_rows(self, task: TaskSpec, like: TaskSpec) -> dict[str, dict[str, str | None]]:
        """Table -> row of a new task -> that of one that is like it; a new parameter says nothing at first."""
        pairs = [
            (mine, of_axis[number % len(of_axis)])
            for axis in {row[1]: None for row in self.boundaries.names_of(task)}
            if (of_axis := [row for row in self.boundaries.names_of(like) if row[1] == axis])
            for number, mine in enumerate(row for row in self.boundaries.names_of(task) if row[1] == axis)
        ]
        return {
            "tasks": {self.tasks.lasting_name((task.name,)): self.tasks.lasting_name((like.name,))},
            "boundaries": {self.boundaries.lasting_name(a): self.boundaries.lasting_name(b) for a, b in pairs},
            "scalars": {self.scalars.lasting_name(row): None for row in self.scalars.names_of(task)},
        }

    def change_units(self, changes: Mapping[str, UnitChange]) -> None:
        """Slopes over parameters in other units. Tasks share a slope: it is left alone where they ask for different
        ones. Without gradients."""
        for name in sorted({parameter for change in changes.values() for parameter in change.parameters}):
            users = [task.name for task in self._specs if any(p.name == name for p in task.parameters)]
            units = [changes[user].parameters.get(name) if user in changes else None for user in users]
            first = units[0]
            if first is None or any(other != first for other in units):
                continue
            slope, relative = (self.scalars.row(row) for row in (("", name), ("", name, "relative")))
            for user in users:
                self.tasks.row((user,)).add_(first.offset * slope)
            slope.mul_(first.normalized)
            relative.mul_(first.relative)

    def _entry(self, given: NetworkInput, amplitude: Tensor | None) -> Tensor:
        """(B, D). What does not follow from the state is made once for a rollout."""
        task, slopes = given.task, given.memo.once("slopes", lambda: self.scalars.of(given.task))

        def lasting() -> Tensor:
            fixed = self.tasks.of(task).sum(0) + self.boundaries.of(task).sum(0)  # (D,)
            # A task's own step is 0: its unit of time means nothing to other tasks.
            log_dt = torch.zeros_like(given.dt) if task.steady else torch.log(given.dt / task.dt)
            values = [log_dt[:, None], torch.zeros_like(log_dt[:, None]), given.relative_parameters, given.parameters]
            return torch.addmm(fixed, torch.cat([v.to(fixed.dtype) for v in values], dim=1), slopes)

        entry = given.memo.once("entry", lasting)
        if amplitude is None:
            return entry
        return torch.addcmul(entry, amplitude.log()[:, None].to(entry.dtype), slopes[1])


class CoarseAttention(nn.Module):
    """x + O [attention, gated MLP] of the modulated norm of x; one matrix in, one out. The identity when new."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.width, self.num_heads = width, num_heads
        self.inner = nn.Linear(width, 5 * width, bias=False)
        self.outer = nn.Linear(2 * width, width, bias=False)
        nn.init.normal_(self.inner.weight, std=width**-0.5)
        nn.init.zeros_(self.outer.weight)
        self.num_modulations = 2 * width

    def forward(self, x: Tensor, scale: Tensor, shift: Tensor, phases: Tensor) -> Tensor:
        """x (B, *grid, D), scale and shift (B, 1, .., D), phases as `_phases` gives them."""
        z = x.flatten(1, -2)  # (B, L, D)
        y = as_type(F.layer_norm(wide(x), (self.width,)), shift.dtype)
        y = torch.addcmul(shift, y, scale).view(z.shape)
        y = self.inner(as_type(y, self.inner.weight.dtype))
        pairs, v, value, gate = torch.split(y, [2 * self.width, *[self.width] * 3], dim=-1)
        # Scores in float32: differences of large products decide, and half precision is slower here on a CPU.
        with without_autocast(x.device):
            heads = (*y.shape[:2], self.num_heads, -1)
            q, k = torch.split(rotated(wide(pairs), phases), self.width, dim=-1)
            q, k, v = (part.reshape(heads).transpose(1, 2) for part in (q, k, wide(v)))  # each (B, H, L, D/H)
            seen = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)  # (B, L, D)
        of_seen, of_gated = torch.split(as_type(self.outer.weight, y.dtype), self.width, dim=1)
        z = plus_product(plus_product(z, as_type(seen, y.dtype), of_seen), F.silu(gate) * value, of_gated)
        return z.reshape(x.shape)


def rotated(x: Tensor, phases: Tensor) -> Tensor:
    """x (B, L, 2 D): each pair of neighboring components rotated by its angle.

    A product of complex numbers is one pass over memory; with cosines and sines it is six, on runs of a few numbers.
    Exported graphs have no complex numbers, and take the second way.
    """
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    if not torch.compiler.is_exporting():
        return torch.view_as_real(torch.view_as_complex(pairs) * phases).flatten(-2)
    (first, second), (cos, sin) = pairs.unbind(-1), phases.unbind(-1)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)


def rope_phases(angles: Tensor, num_heads: int) -> Tensor:
    """angles (L, P) -> (L, 2 H P, 2): cosine and sine, for the queries and then the keys of all heads."""
    return torch.stack([angles.cos(), angles.sin()], dim=-1).repeat(1, 2 * num_heads, 1)


def rope_angles(grid: Sequence[int], wraps: Sequence[bool], num_pairs: int) -> Tensor:
    """(L, P) angles in float64. The last two axes have half of the pairs each, with frequencies 1, 2, 3, ...

    A third axis takes the pairs with the highest frequencies from both: weights of a plane keep their meaning in space.
    """
    half = num_pairs // 2
    kept = half if len(grid) < 3 else max(1, min(-(-num_pairs // 3), half - 1))
    columns = {len(grid) - 2: [*range(kept)], len(grid) - 1: [*range(half, half + kept)]}
    if len(grid) == 3:
        columns[0] = [*range(kept, half), *range(half + kept, num_pairs)]
    angles = torch.zeros(*grid, num_pairs, dtype=torch.float64)
    for axis, pairs in columns.items():
        points = grid[axis]
        frequencies = torch.arange(1, len(pairs) + 1, dtype=torch.float64) * (1.0 if wraps[axis] else 0.5)
        turn = 2 * math.pi * torch.arange(points, dtype=torch.float64)[:, None] * frequencies / points
        shape = [1] * len(grid)
        shape[axis] = points
        angles[..., pairs] += turn.reshape(*shape, -1)
    return angles.flatten(0, -2)
