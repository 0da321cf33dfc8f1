"""The latent operator: tokens of now and a condition -> the update of the tokens; and the network around it.

The network is encoder, operator and decoder in normalized units. The decoder is linear and has no constant part: the
decoded update of a latent is the change of the fields, with no cancellation in half precision. Encoder and decoder do
not know where a token stands: on periodic axes latents commute with shifts by whole patches. Physical units, contexts
and what a prediction means for a task are the stepper's business.

B samples, F input channels, C output channels, S space, N tokens along each axis, L all tokens, D width, Z channels of
a latent token (D unless the settings say otherwise).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ups.config.model import LatentOperatorConfig
from ups.models.blocks import (
    Block,
    NeighborMixing,
    Partition,
    RelativeBias,
    attention_bias,
    global_partition,
    modulated_norm,
    window_mask,
    windowed_partition,
)
from ups.models.network import Network, NetworkInput, NetworkWithLatents
from ups.models.normalization import Constants
from ups.models.vocabulary import BOUNDARIES, MAX_AXES, Channels, Vocabulary, patch_rows
from ups.models.warm_start import NamedRows
from ups.spec.task import AxisSpec, TaskSpec


class LatentOperator(nn.Module):
    """Transformer blocks on the token grid. Its output is zero when new, so that an untrained model is persistence."""

    def __init__(self, config: LatentOperatorConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.config = config
        channels = config.latent_channels or config.width
        self.lift = nn.Linear(channels, config.width) if config.latent_channels else None
        self.conditioning = Conditioning(vocabulary, config.width)
        self.positions = Positions(config.width)
        self.entry = NeighborMixing(config.width) if config.neighbor_mixing else None
        self.relative_bias = RelativeBias(config.depth * config.num_heads)
        self.blocks = nn.ModuleList(
            Block(config.width, config.num_heads, config.mlp, config.mlp_ratio) for _ in range(config.depth)
        )
        self.modulation = nn.Linear(config.width, 2 * config.width)
        self.out = nn.Linear(config.width, channels)
        for layer in (self.modulation, self.out):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def forward(
        self, tokens: Tensor, task: TaskSpec, parameters: Tensor, dt: Tensor, coordinates: Sequence[Tensor]
    ) -> Tensor:
        """tokens (B, *N, Z), parameters (B, P) normalized, dt (B,) -> update (B, *N, Z)."""
        grid = tokens.shape[1:-1]
        condition = self.conditioning(task, parameters, dt, [c.shape[0] for c in coordinates])
        x = tokens if self.lift is None else self.lift(tokens)
        x = x + self.positions(task, grid, coordinates)
        if self.entry is not None:
            x = self.entry(x, [axis.periodic for axis in task.axes])
        x = x.flatten(1, -2)  # (B, L, D)
        partitions = self.partitions(task, grid)
        biases = self.biases(partitions)
        for block, bias, partition in zip(self.blocks, biases, partitions, strict=True):
            x = block(x, condition, bias, partition)
        shift, scale = self.modulation(F.silu(condition))[:, None].chunk(2, dim=-1)  # each (B, 1, D)
        update: Tensor = self.out(modulated_norm(x, shift, scale)).reshape(tokens.shape)
        return update

    def partitions(self, task: TaskSpec, grid: Sequence[int]) -> list[Partition]:
        """Which tokens see each other, block by block; shifted and unshifted windows take turns."""
        missing = 3 - len(grid)
        sizes = (*grid, *[1] * missing)
        periodic = (*(axis.periodic for axis in task.axes), *[False] * missing)
        chosen: list[Partition] = []
        num_windowed = 0
        for number in range(self.config.depth):
            if self.config.attention == "global" or (self.config.attention == "alternating" and number % 2):
                chosen.append(global_partition(sizes, periodic))
            else:
                shifted = num_windowed % 2 == 1
                chosen.append(windowed_partition(sizes, periodic, self.config.window_tokens, shifted))
                num_windowed += 1
        return chosen

    def biases(self, partitions: Sequence[Partition]) -> list[Tensor]:
        """One attention bias per block; each distinct partition is worked out once."""
        values = {p: self.relative_bias(p) for p in set(partitions)}
        masks = {p: window_mask(p, self.out.weight.device) for p in values}
        heads = self.config.num_heads
        return [
            attention_bias(values[p][number * heads : (number + 1) * heads], masks[p])
            for number, p in enumerate(partitions)
        ]


class LatentNetwork(NetworkWithLatents):
    """Encoder -> latent operator -> decoder, in normalized units."""

    predicts_update = True
    encoder: GridEncoder
    operator: LatentOperator

    def __init__(self, config: LatentOperatorConfig, vocabulary: Vocabulary, context_frames: int) -> None:
        super().__init__()
        self.encoder = GridEncoder(config, vocabulary, context_frames)
        self.operator = LatentOperator(config, vocabulary)
        self.decoder = GridDecoder(config, vocabulary)
        self.patch_size = config.patch_size

    def forward(self, given: NetworkInput) -> Tensor:
        """fields (B, F, *S) -> (B, C, *S): the decoded update of the latent, one channel per name in `outputs`."""
        tokens = self.encoder(given.fields, given.channels, given.task)
        update = self.operator(tokens, given.task, given.parameters, given.dt, given.coordinates)
        decoded: Tensor = self.decoder(update, given.outputs, given.task)
        return decoded

    def named_rows(self) -> dict[str, NamedRows]:
        """The rows of the vocabulary's tables."""
        words = self.encoder.vocabulary
        scalars = (*OWN_SCALARS, *words.parameters)
        return {
            "encoder.table": NamedRows(1, words.channels),
            "decoder.table": NamedRows(0, words.channels),
            "operator.conditioning.task": NamedRows(0, words.tasks),
            "operator.conditioning.scalar_slope": NamedRows(0, scalars),
            "operator.conditioning.scalar_offset": NamedRows(0, scalars),
        }

    def fitted(self, source: Network, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of another latent operator; tables only if they have rows for all dimensions that this one has."""
        if not isinstance(source, LatentNetwork):
            return {}
        taken = dict(weights)
        for name, dim in (("encoder.table", 2), ("decoder.table", 1)):
            theirs, ours = source.encoder.rows, self.encoder.rows
            if ours.keys() <= theirs.keys() and source.encoder.patch_size == self.encoder.patch_size:
                picked = [weights[name].narrow(dim, theirs[d].start, theirs[d].stop - theirs[d].start) for d in ours]
                taken[name] = torch.cat(picked, dim)
            else:
                del taken[name]
        return taken

    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one."""
        return list(self.operator.blocks)


def build(config: LatentOperatorConfig, tasks: Sequence[TaskSpec], context_frames: int) -> LatentNetwork:
    """The network of this project for a set of tasks."""
    return LatentNetwork(config, Vocabulary.of(tasks), context_frames)


_MLP_RATIO = 2


def patchify(values: Tensor, patch_size: int, grid: Sequence[int]) -> Tensor:
    """(B, F, *S) -> (B, *N, F * p^d): the points of a patch become the last dimension."""
    d = len(grid)
    split = [size for n in grid for size in (n, patch_size)]
    x = values.reshape(*values.shape[:2], *split)  # (B, F, N1, p, N2, p, ...)
    order = [0, *range(2, 2 + 2 * d, 2), 1, *range(3, 3 + 2 * d, 2)]
    return x.permute(order).reshape(values.shape[0], *grid, values.shape[1] * patch_size**d)


class EncoderBlock(nn.Module):
    """x + MLP of each token and its nearest neighbors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixing = NeighborMixing(width)
        self.mlp_in = nn.Linear(width, _MLP_RATIO * width)
        self.mlp_out = nn.Linear(_MLP_RATIO * width, width)

    def forward(self, x: Tensor, periodic: Sequence[bool]) -> Tensor:
        """x (B, *N, D), periodic for each axis -> (B, *N, D)."""
        seen = self.mixing(F.rms_norm(x, (x.shape[-1],), eps=1e-6), periodic)
        out: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(seen)))
        return out


class GridEncoder(nn.Module):
    """Patches of named channels -> tokens of `latent_channels`.

    table (slots, channel names, rows, D): rows hold p weights for 1D, p^2 for 2D, p^3 for 3D, as far as in use. Without
    blocks the table is all there is, and D is the number of latent channels.
    """

    def __init__(self, config: LatentOperatorConfig, vocabulary: Vocabulary, context_frames: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.patch_size = config.patch_size
        self.rows = patch_rows(config.patch_size, vocabulary.dims)
        num_rows = max(s.stop for s in self.rows.values())
        latent_channels, num_blocks = config.latent_channels or config.width, config.encoder_blocks
        width = config.width if num_blocks else latent_channels
        self.table = nn.Parameter(torch.empty(context_frames, len(vocabulary.channels), num_rows, width))
        for rows in self.rows.values():
            # Points of a patch are nearly equal for smooth fields: 1 / sqrt(points) keeps tokens at a few units.
            nn.init.normal_(self.table[:, :, rows], std=(rows.stop - rows.start) ** -0.5)
        self.blocks = nn.ModuleList(EncoderBlock(width) for _ in range(num_blocks))
        self.out = nn.Linear(width, latent_channels, bias=False) if num_blocks else None

    def forward(self, values: Tensor, channels: Channels, task: TaskSpec) -> Tensor:
        """(B, F, *S) normalized values -> (B, *N, Z), on a grid that patches divide (`ups.models.grid_fit`)."""
        space = values.shape[2:]
        grid = [points // self.patch_size for points in space]
        device = values.device
        slots, ids = (_rows(n, device) for n in (channels.slots, self.vocabulary.channel_ids(channels.names)))
        weight = self.table[slots, ids, self.rows[len(space)]].flatten(0, 1)  # (F * p^d, D)
        patches = patchify(values.to(weight.dtype), self.patch_size, grid)  # (B, *N, F * p^d)
        tokens: Tensor = patches @ weight * len(channels.names) ** -0.5
        periodic = [axis.periodic for axis in task.axes]
        for block in self.blocks:
            tokens = block(tokens, periodic)
        return tokens if self.out is None else self.out(tokens)


def unpatchify(patches: Tensor, patch_size: int, num_channels: int) -> Tensor:
    """(B, *N, C * p^d) -> (B, C, *S): inverse of `patchify`."""
    grid = patches.shape[1:-1]
    d = len(grid)
    x = patches.reshape(patches.shape[0], *grid, num_channels, *([patch_size] * d))  # (B, *N, C, p, ...)
    order = [0, 1 + d]
    for axis in range(d):
        order += [1 + axis, 2 + d + axis]
    return x.permute(order).reshape(patches.shape[0], num_channels, *(n * patch_size for n in grid))


class GridDecoder(nn.Module):
    """Tokens of `latent_channels` -> named channels on the grid. table (channel names, rows, D).

    If the encoder has blocks, a token also counts in the patches next to its own; without, D is the number of latent
    channels.
    """

    def __init__(self, config: LatentOperatorConfig, vocabulary: Vocabulary) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self.patch_size = config.patch_size
        self.rows = patch_rows(config.patch_size, vocabulary.dims)
        num_rows = max(s.stop for s in self.rows.values())
        latent_channels, overlapping = config.latent_channels or config.width, config.encoder_blocks > 0
        width = config.width if overlapping else latent_channels
        self.table = nn.Parameter(torch.randn(len(vocabulary.channels), num_rows, width) * width**-0.5)
        self.lift = nn.Linear(latent_channels, width, bias=False) if overlapping else None
        self.mixing = NeighborMixing(width) if overlapping else None

    def forward(self, tokens: Tensor, names: Sequence[str], task: TaskSpec) -> Tensor:
        """(B, *N, Z) -> (B, C, *S), one channel per name."""
        if self.lift is not None and self.mixing is not None:
            tokens = self.mixing(self.lift(tokens), [axis.periodic for axis in task.axes])
        ids = _rows(self.vocabulary.channel_ids(names), tokens.device)
        weight = self.table[ids, self.rows[tokens.ndim - 2]].flatten(0, 1)  # (C * p^d, D)
        return unpatchify(tokens.to(weight.dtype) @ weight.T, self.patch_size, len(names))


# Rows of the scalar table before the named parameters.
OWN_SCALARS = ("log dt", *(f"log {what} {axis}" for what in ("points", "extent") for axis in range(MAX_AXES)))
# Brings the logarithms of usual steps, extents and resolutions (2^4 to 2^10 points) to about unit size.
_LOG_SCALE = 3.0
_TYPICAL_LOG2_POINTS = 6.0

_NUM_WAVES = 8
_constants = Constants()
_FEATURES_PER_AXIS = 2 * _NUM_WAVES + 2


class Conditioning(nn.Module):
    """Parameters, dt, task, boundary kinds and resolution -> (B, D)."""

    def __init__(self, vocabulary: Vocabulary, width: int) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        num_scalars = len(OWN_SCALARS) + len(vocabulary.parameters)
        self.scalar_slope = nn.Parameter(torch.randn(num_scalars, width))
        self.scalar_offset = nn.Parameter(torch.randn(num_scalars, width))
        self.task = nn.Parameter(torch.randn(len(vocabulary.tasks), width) * 0.5)
        self.boundary = nn.Parameter(torch.randn(MAX_AXES, len(BOUNDARIES), width) * 0.5)
        self.mix = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, task: TaskSpec, parameters: Tensor, dt: Tensor, space: Sequence[int]) -> Tensor:
        """parameters (B, P) normalized, dt (B,) in the task's unit, space (X[, Y[, Z]]) points -> (B, D)."""
        device, dtype = dt.device, self.scalar_slope.dtype
        rows: list[int] = []
        values: list[Tensor] = []
        if not task.steady:
            rows.append(OWN_SCALARS.index("log dt"))
            values.append(torch.log(dt) / _LOG_SCALE)
        for axis, (points, spec) in enumerate(zip(space, task.axes, strict=True)):
            rows += [OWN_SCALARS.index(f"log points {axis}"), OWN_SCALARS.index(f"log extent {axis}")]
            values.append(torch.full_like(dt, (math.log2(points) - _TYPICAL_LOG2_POINTS) / _LOG_SCALE))
            values.append(torch.full_like(dt, math.log(spec.extent) / _LOG_SCALE))
        names = [p.name for p in task.parameters]
        rows += [len(OWN_SCALARS) + i for i in self.vocabulary.parameter_ids(names)]
        values += parameters.unbind(1)
        scalars = torch.stack([v.to(dtype) for v in values], dim=1)  # (B, K)
        index = _rows(rows, device)
        features = scalars[:, :, None] * self.scalar_slope[index] + self.scalar_offset[index]  # (B, K, D)
        embedded = nn.functional.silu(features).sum(1) * len(rows) ** -0.5  # (B, D)
        absent = ["absent"] * (MAX_AXES - len(task.axes))
        boundaries = self._boundaries([*(axis.ends[0] for axis in task.axes), *absent], device)
        if any(isinstance(axis.boundary, tuple) for axis in task.axes):
            last = self._boundaries([*(axis.ends[1] for axis in task.axes), *absent], device)
            # Turned by one place: otherwise a wall and then an open end would be the same as the other way round.
            differ = _rows([*(axis.ends[0] != axis.ends[1] for axis in task.axes), *[False] * len(absent)], device)
            boundaries = torch.where(differ[:, None] > 0, (boundaries + last.roll(1, dims=-1)) / 2, boundaries)
        task_index = _rows([self.vocabulary.task_id(task.name)], device)
        fixed = self.task[task_index] + boundaries.sum(0)  # (1, D)
        mixed: Tensor = self.mix(embedded + fixed)
        return mixed

    def _boundaries(self, kinds: Sequence[str], device: torch.device) -> Tensor:
        """(axes, D), a kind for each axis."""
        # An unknown boundary takes some row times 0: it says nothing, and the table stays in the graph.
        kind_index = _rows([BOUNDARIES.index(k) if k in BOUNDARIES else 0 for k in kinds], device)
        known = _rows([k in BOUNDARIES for k in kinds], device)  # (axes,)
        return self.boundary[torch.arange(MAX_AXES, device=device), kind_index] * known[:, None]


def _rows(numbers: Sequence[int], device: torch.device) -> Tensor:
    """Row numbers, or flags, as a tensor that is made once."""
    return _constants.index(lambda: list(numbers), tuple(numbers), device)


def position_features(center: Tensor, axis: AxisSpec, translation: bool) -> Tensor:
    """Patch centers (N,) from 0 to 1 along the axis -> (N, features); all 0 where position must not matter."""
    wave_numbers = torch.arange(1, _NUM_WAVES + 1, dtype=center.dtype, device=center.device)
    features = center.new_zeros(center.shape[0], _FEATURES_PER_AXIS)
    if axis.periodic and translation:
        return features
    turn = 2 * math.pi if axis.periodic else math.pi
    angle = turn * center[:, None] * wave_numbers
    features[:, : 2 * _NUM_WAVES] = torch.cat([angle.sin(), angle.cos()], dim=1)
    if not axis.periodic:
        tokens_from_start = torch.arange(center.shape[0], dtype=center.dtype, device=center.device)
        features[:, -2] = torch.exp(-tokens_from_start)
        features[:, -1] = torch.exp(-tokens_from_start.flip(0))
    return features


class Positions(nn.Module):
    """Where a token stands -> (*N, D), added to the tokens at the entry of the operator."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(MAX_AXES, _FEATURES_PER_AXIS, width) * 0.1)

    def forward(self, task: TaskSpec, grid: Sequence[int], coordinates: Sequence[Tensor]) -> Tensor:
        """grid: tokens along each axis; coordinates: one (n,) tensor per axis, in the axis' unit."""
        translation = "translation" in task.symmetries
        total = self.table.new_zeros(*grid, self.table.shape[-1])
        for number, (axis, tokens, points) in enumerate(zip(task.axes, grid, coordinates, strict=True)):
            # A periodic axis does not repeat its first point: its period is the extent, not last minus first.
            length = axis.extent if axis.periodic else points[-1] - points[0]
            center = ((points - points[0]) / length).reshape(tokens, -1).mean(1)
            features = position_features(center.to(self.table.dtype), axis, translation)
            shape = [1] * len(grid)
            shape[number] = tokens
            total = total + (features @ self.table[number]).reshape(*shape, -1)
        return total
