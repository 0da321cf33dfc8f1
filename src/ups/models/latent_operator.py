"""The latent operator: tokens of now and a condition -> the update of the tokens; and the network around it.

The network is encoder, operator and decoder in normalized units. Physical units, contexts and what a prediction means
for a task are the stepper's business.

B samples, F input channels, C output channels, S space, N tokens along each axis, L all tokens, D width,
Z channels of a latent token (D unless the settings say otherwise).
"""

from __future__ import annotations

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
    Triple,
    attention_bias,
    global_partition,
    modulated_norm,
    window_mask,
    windowed_partition,
)
from ups.models.conditioning import OWN_SCALARS, Conditioning, Positions
from ups.models.decoder import GridDecoder
from ups.models.encoder import GridEncoder
from ups.models.network import NamedRows, Network, NetworkInput, NetworkWithLatents
from ups.models.vocabulary import Vocabulary
from ups.spec.task import TaskSpec


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
        sizes: Triple = (grid[0], grid[1] if len(grid) > 1 else 1, grid[2] if len(grid) > 2 else 1)
        wraps = [axis.periodic for axis in task.axes] + [False] * (3 - len(grid))
        periodic = (wraps[0], wraps[1], wraps[2])
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
        channels, blocks = config.latent_channels or config.width, config.encoder_blocks
        self.encoder = GridEncoder(
            vocabulary, config.patch_size, config.width, context_frames, latent_channels=channels, num_blocks=blocks
        )
        self.operator = LatentOperator(config, vocabulary)
        self.decoder = GridDecoder(
            vocabulary, config.patch_size, config.width, latent_channels=channels, overlapping=blocks > 0
        )
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
