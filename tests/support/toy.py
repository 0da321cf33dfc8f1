"""A stage and a loader small enough for tests of the engine: two tasks with different channels and dimensions.

Samples are functions of (task, window number), and which windows form a step depends on the step alone, as in the real
sampler; ranks and micro-batches only cut the block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ups.spec.batch import Batch, RankInfo
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec
from ups.training.stages import LossModule

WIDTH = 16
SHAPES: dict[str, tuple[int, tuple[int, ...]]] = {"line": (1, (12,)), "plane": (3, (4, 5))}


def toy_task(name: str) -> TaskSpec:
    """'line': one channel in 1D; 'plane': three channels in 2D."""
    channels, space = SHAPES[name]
    fields = tuple(FieldSpec(name=f"u{c}", role="state") for c in range(channels))
    axes = tuple(AxisSpec(name="xyz"[a], boundary="periodic") for a in range(len(space)))
    return TaskSpec(name=name, equation="toy", dt=1.0, fields=fields, axes=axes)


def toy_batch(name: str, numbers: list[int], step: int) -> Batch:
    """Windows `numbers` of a task: two frames, the second a fixed function of the first."""
    channels, space = SHAPES[name]
    frames = []
    for number in numbers:
        generator = torch.Generator().manual_seed(number * 7919 + channels)
        first = torch.randn((channels, *space), generator=generator, dtype=torch.float64).float()
        frames.append(torch.stack([first, torch.roll(first, 1, dims=-1).tanh()]))
    none = torch.zeros((len(numbers), 0, *space))
    return Batch(
        task=toy_task(name),
        state=torch.stack(frames),
        static=none,
        target=none,
        parameters=torch.zeros((len(numbers), 0)),
        dt=torch.ones(len(numbers)),
        coordinates=tuple(torch.linspace(0, 1, n, dtype=torch.float64) for n in space),
        numbers=torch.tensor(numbers, dtype=torch.int64),
        stage_step=step,
    )


class ToyBlock(nn.Module):
    """One residual unit; the thing to shard."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Linear(width, 2 * width)
        self.second = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.second(torch.tanh(self.first(x)))
        return x + added


class ToyStage(LossModule):
    """Point-wise network over neighbors; one table row per task, so that every parameter is in every graph."""

    def __init__(self, seed: int = 0, width: int = WIDTH, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.table = nn.Parameter(torch.randn(len(SHAPES), width))
        self.lift = nn.Linear(2, width)
        self.blocks = nn.ModuleList(ToyBlock(width) for _ in range(depth))
        self.project = nn.Linear(width, 1)
        self.hurt: Callable[[Batch], float] = lambda batch: 1.0

    def shard_units(self) -> list[nn.Module]:
        return list(self.blocks)

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.blocks.parameters() if p.ndim >= 2]

    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        (batch,) = batches
        now, after = batch.state[:, 0], batch.state[:, 1]  # (B, C, *S)
        chosen = torch.zeros(len(SHAPES), dtype=now.dtype, device=now.device)
        chosen[list(SHAPES).index(batch.task.name)] = 1.0
        features = torch.stack([now, torch.roll(now, 1, dims=-1)], dim=-1)
        x = self.lift(features) + chosen @ self.table
        for block in self.blocks:
            x = block(x)
        error = self.project(x).squeeze(-1) - after
        return [{"loss": error.flatten(1).square().mean(1) * self.hurt(batch)}]


class ToyLoader:
    """Blocks of `batch_size` windows, one task each, cut over ranks and micro-batches."""

    def __init__(self, rank_info: RankInfo, *, batch_size: int = 8, micro_batch_size: int | None = None) -> None:
        share = batch_size // rank_info.world_size
        self.micro = micro_batch_size or share
        assert batch_size % rank_info.world_size == 0
        assert share % self.micro == 0
        self.rank_info, self.batch_size, self.share = rank_info, batch_size, share
        self.global_batch = len(SHAPES) * batch_size
        self.step = 0
        self.seen: list[tuple[int, str, list[int]]] = []

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]

    def batches_in_step(self, step: int) -> int:
        return len(SHAPES) * self.share // self.micro

    def windows_in_step(self, step: int) -> int:
        return self.global_batch

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        step = self.step
        while True:
            for name in SHAPES:
                start = step * self.batch_size + self.rank_info.rank * self.share
                for at in range(start, start + self.share, self.micro):
                    numbers = list(range(at, at + self.micro))
                    self.seen.append((step, name, numbers))
                    yield (replace(toy_batch(name, numbers, step), sample_weight=1 / self.global_batch),)
            step += 1
