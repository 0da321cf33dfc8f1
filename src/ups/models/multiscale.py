"""The multiscale network: convolutions at full resolution and attention on a coarse grid, shared by all tasks.

    fields / amplitude -> lift -> [blocks, shrink] .. [blocks, attention] .. [grow + skip, blocks] -> lower x amplitude
    last frame         -> propagator: what is linear ---------------------------------------------------> +

Everything between lift and lower is the same for all tasks, or for all tasks with as many dimensions (`own_kernels`);
tasks differ by rows of tables. The tasks of a group run as one graph: their samples stand one behind the other, and
only padding and rotary positions depend on their boundaries.

B samples, C channels, S space, D width of a level, M modulations of all blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ups.config.model import MultiscaleConfig
from ups.errors import ConfigError
from ups.models.coarse_attention import CoarseAttention, rotary_angles, rotary_turns
from ups.models.constants import Constants
from ups.models.grid_convolution import GridKernel, Grow, Layout, Range, ResidualBlock, Shrink, extended, grid_rank
from ups.models.grid_fit import GridFit
from ups.models.multiscale_condition import MultiscaleCondition
from ups.models.network import NamedRows, Network, NetworkInput, NetworkWithLinearPart
from ups.models.normalization import wide
from ups.models.propagator import Propagator, last_frame
from ups.models.task_tables import Lift, Lower, NamedTable
from ups.models.unit_change import UnitChange
from ups.models.vocabulary import Vocabulary
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
                f"{config.num_heads} heads of the last width ({widths[-1]}) leave no position along one of three axes",
                hint="use fewer heads, or a last width of at least 6 for each",
            )
        self.lift = Lift(tasks, context_frames, widths[0], _LIFT_TAPS, axes)
        self.down = nn.ModuleList(_blocks(*level, dims) for level in zip(widths[:-1], counts, sizes, strict=False))
        self.shrink = nn.ModuleList(Shrink(a, b, dims) for a, b in itertools.pairwise(widths))
        self.middle = _blocks(widths[-1], counts[-1], sizes[-1], dims)
        # By the number of the block before it, so that weights keep their name whichever other blocks have one.
        seeing = {True: range(counts[-1]), "last": range(counts[-1])[-1:], False: range(0)}[config.attention]
        self.attention = nn.ModuleDict({str(n): CoarseAttention(widths[-1], config.num_heads) for n in seeing})
        self.grow = nn.ModuleList(Grow(b, a, dims) for a, b in itertools.pairwise(widths))
        self.up = nn.ModuleList(_blocks(*level, dims) for level in zip(widths[:-1], counts, sizes, strict=False))
        self.lower = Lower(tasks, widths[0])
        moving = config.propagator and not all(task.steady for task in tasks)
        self.propagator = Propagator(tasks) if moving else None
        self._modulated = [m for m in self.modules() if isinstance(m, ResidualBlock | CoarseAttention)]
        modulations = sum(m.num_modulations for m in self._modulated)
        self.condition = MultiscaleCondition(tasks, widths[-1], modulations, config.noise_size)
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
        layout = _layout([g.task for g in ordered], [g.fields.shape[0] for g in ordered])
        amplitudes = [self._amplitude(g) for g in ordered]
        device_type = ordered[0].fields.device.type
        with torch.autocast(device_type, enabled=False):
            modulations = self.condition(ordered, [a.log() for a in amplitudes])
        x = torch.cat([self._lifted(g, a) for g, a in zip(ordered, amplitudes, strict=True)])
        x = wide(self._trunk(wide(x), modulations, layout))
        found: dict[int, Tensor] = {}
        with torch.autocast(device_type, enabled=False):
            parts = torch.split(x, [g.fields.shape[0] for g in ordered])
            changes = self._linear(ordered)
            for n, given, part, amplitude, change in zip(order, ordered, parts, amplitudes, changes, strict=True):
                y = wide(self.lower(part, given, self._fit)) * amplitude.reshape(-1, *[1] * (given.fields.ndim - 1))
                found[n] = y if change is None else y + change
        return [found[n] for n in range(len(group))]

    def linear(self, given: NetworkInput) -> Tensor:
        """The propagator's part of the scaled change (B, C, *S) of a transient task, which can be fitted alone."""
        with torch.autocast(given.fields.device.type, enabled=False):
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

    def uses_noise(self, task: TaskSpec | None = None) -> bool:
        """Whether noise acts (on a task)."""
        noise = self.condition.noise
        if noise is None or (task is not None and (task.name,) not in noise.sizes.row_names):
            return False
        sizes = noise.sizes.table.detach()
        sizes = sizes.full_tensor() if isinstance(sizes, DTensor) else sizes
        rows = range(len(sizes)) if task is None else [noise.sizes.row_names.index((task.name,))]
        return any(bool(sizes[row] != 0) for row in rows)

    def fix_weights(self, fixed: bool = True) -> None:
        """Kernels are made once for each number of dimensions from now on, or each time again."""
        for module in self.modules():
            if isinstance(module, GridKernel):
                module.kept = {} if fixed else None

    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one."""
        return [m for m in self.modules() if isinstance(m, ResidualBlock | CoarseAttention | Shrink | Grow)]

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
        found = self.extended(weights, source.axes)
        if source.modulated_blocks() != self.modulated_blocks():
            # Rows belong to blocks in their order: those of other blocks may be as many, and mean something else.
            told = {name: found.pop(name) for name in list(found) if name in _MODULATIONS}
            found |= self._modulations_of(source, told)
        if (source.config.widths, source.config.kernel_size) != (self.config.widths, self.config.kernel_size):
            # Blocks meet others than those they were trained with, and what comes out of that is not to be believed:
            # predictions begin as no change. With more or fewer blocks alone, each still adds what it did.
            found = {name: weight for name, weight in found.items() if not name.startswith("lower.")}
        noise = self.condition.noise
        taken = found.get("condition.noise.weight")
        if noise is not None and (taken is None or taken.shape != noise.weight.shape):
            # Without weights that were trained for them, sizes of noise would say that there are some.
            found.pop("condition.noise.sizes.table", None)
        return found

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
        found: dict[str, Tensor] = {}
        for name, own in self.named_parameters():
            # A bias goes with its matrix.
            fits = name in told and own.shape[1:] == told[name].shape[1:]
            if not fits or (name == "condition.out.bias" and "condition.out.weight" not in found):
                continue
            rows = dict(zip(theirs, torch.split(told[name], [size for _, size in theirs]), strict=True))
            drawn = zip(mine, torch.split(own.detach(), [size for _, size in mine]), strict=True)
            found[name] = torch.cat([rows.get(block, new).to(new) for block, new in drawn])
        return found

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

    def _amplitude(self, given: NetworkInput) -> Tensor:
        """(B,): the size of the last frame, in usual deviations. The network sees fields of size 1, and is told."""
        if not self.scales_frames(given.task, given.spans_sizes):
            return torch.ones_like(wide(given.dt))
        # Clamped before the root, whose slope at 0 is infinite.
        return wide(last_frame(given)).flatten(1).square().mean(1).clamp_min(_SMALLEST_AMPLITUDE**2).sqrt()

    def _lifted(self, given: NetworkInput, amplitude: Tensor) -> Tensor:
        task = given.task
        num_static = task.num_channels("static")
        static, state = given.fields[:, :num_static], given.fields[:, num_static:]
        scaled = state / amplitude.reshape(-1, *[1] * (state.ndim - 1))
        layout = _layout([task], [given.fields.shape[0]])
        lifted: Tensor = self.lift(given, torch.cat([static, scaled], dim=1), self._fit, layout)
        return lifted

    def _trunk(self, x: Tensor, modulations: Tensor, layout: Layout) -> Tensor:
        """x (B, D, *grid), modulations (B, M) -> (B, D, *grid)."""
        split = torch.split(modulations, [m.num_modulations for m in self._modulated], dim=1)
        of: dict[nn.Module, Tensor] = dict(zip(self._modulated, split, strict=True))

        def through(level: int, blocks: Iterable[nn.Module], x: Tensor) -> Tensor:
            sources = layout.sources(x.shape[2:], self._sizes[level], self._constants, x.device)
            for block in blocks:
                x = block(x, of[block], layout, *sources)
            return x

        passed = []
        for level, (blocks, shrink) in enumerate(zip(self.down, self.shrink, strict=True)):
            x = through(level, blocks, x)  # type: ignore[arg-type]
            passed.append(x)
            x = wide(shrink(x, layout))
        turns = self._turns(x, layout) if self.attention else x
        for number, block in enumerate(self.middle):
            x = through(-1, [block], x)
            if str(number) in self.attention:
                attention = self.attention[str(number)]
                x = attention(x, of[attention], turns)
        for level in reversed(range(len(passed))):
            x = through(level, self.up[level], self.grow[level](x, layout) + passed[level])  # type: ignore[arg-type]
        return x

    def _turns(self, x: Tensor, layout: Layout) -> Tensor:
        """What turns queries and keys, (B or 1, points, width of the level): by the boundaries of each sample."""
        grid, heads = tuple(x.shape[2:]), self.config.num_heads
        num_pairs = x.shape[1] // heads // 2
        found = []
        for first, stop, wraps in layout.ranges:
            turns = self._constants.get(
                lambda: rotary_turns(rotary_angles(grid, wraps, num_pairs), heads),  # noqa: B023
                ("turns", grid, wraps),
                x.device,
                wide(x).dtype.to_complex(),
            )
            found.append(turns.expand(1 if len(layout.ranges) == 1 else stop - first, -1, -1))
        return found[0] if len(found) == 1 else torch.cat(found)

    def _linear(self, group: Sequence[NetworkInput]) -> list[Tensor | None]:
        """The propagator's scaled change of each task of a group; None where there is none."""
        transient = [g for g in group if not g.task.steady]
        if self.propagator is None:
            return [None] * len(group)
        if not transient:  # every parameter is in every graph
            return [self.propagator.table.sum() * 0.0 for _ in group]
        changes = iter(self.propagator(transient))
        return [
            None if g.task.steady else next(changes) * g.change_gain.reshape(-1, *[1] * (g.fields.ndim - 2))
            for g in group
        ]


def build(config: MultiscaleConfig, tasks: Sequence[TaskSpec], context_frames: int) -> MultiscaleNetwork:
    """The multiscale network for a set of tasks."""
    return MultiscaleNetwork(config, tasks, context_frames)


def count_parameters(network: MultiscaleNetwork, tasks: Sequence[TaskSpec]) -> dict[str, tuple[int, int]]:
    """Task -> (parameters that its forward pass uses, how many of them another task uses too)."""
    tables = list(network.tables().values())
    in_tables = {id(p) for table in tables for p in table.parameters()}
    kernels = [module for module in network.modules() if isinstance(module, GridKernel)]
    of_dims = {id(p) for kernel in kernels for p in (kernel.weight, *kernel.own.values()) if kernel.own}
    common = sum(p.numel() for p in network.parameters() if id(p) not in in_tables | of_dims)
    counts = {}
    for task in tasks:
        active = shared = common
        own_dims = sum(kernel.of(task.num_spatial_dims).numel() for kernel in kernels if kernel.own)
        active += own_dims
        if any(t.num_spatial_dims == task.num_spatial_dims for t in tasks if t.name != task.name):
            shared += own_dims
        for table in tables:
            row_size = sum(p.shape[1:].numel() for p in table.parameters())
            own = set(table.names_of(task))
            others = {name for t in tasks if t.name != task.name for name in table.names_of(t)}
            active += row_size * len(own)
            shared += row_size * len(own & others)
        counts[task.name] = (active, shared)
    return counts


def _blocks(width: int, count: int, size: int, dims: Sequence[int]) -> nn.ModuleList:
    return nn.ModuleList(ResidualBlock(width, size, dims) for _ in range(count))


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
