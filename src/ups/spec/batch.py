"""Windows (numpy, one sample), batches (torch, many samples of one task) and the rank they are for.

Batches are on the CPU until the step.

Shape legend, the same in 1D, 2D and 3D:
    B samples   T frames   C channels of a role, in the order of `TaskSpec.channel_names(role)`
    S space: (X,), (X, Y) or (X, Y, Z), in the order of `TaskSpec.axes`   P parameters
A steady task has T = 0 and no state channels; a task without static fields has 0 static channels: a reader never has
to ask whether an array is there, only how many channels it has.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from ups.spec.task import TaskSpec

if TYPE_CHECKING:
    import torch


Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Window:
    """A few consecutive frames of one trajectory, as read, in physical units.

    state (T, C, *S), static (C, *S), target (C, *S), parameters (P,), dt between the frames of this window,
    coordinates one (n,) array per axis; number identifies the window in its task (see ups.data.sampler).
    """

    task: TaskSpec
    state: Float32
    static: Float32
    target: Float32
    parameters: Float32
    dt: float
    coordinates: tuple[Float64, ...]
    trajectory: int
    start_frame: int
    number: int = -1


@dataclass(frozen=True, slots=True)
class Batch:
    """Windows of one task, stacked: what a stage is trained on, and what a predictor gets.

    A predictor (`ups.models.stepper.Predictor`) finds in `state` the frames that are given, oldest first, and nothing
    in `target`.
    state (B, T, C, *S), static (B, C, *S), target (B, C, *S), parameters (B, P), dt (B,): floating point tensors.
    coordinates: one (n,) float64 tensor per axis, shared by the batch.
    numbers (B,) int64, always on the CPU: window numbers, the key (with seed and step) of every random draw for a
    sample, made on the host so that all devices see the same draws.
    stage_step: the optimizer step this batch belongs to; with `numbers` it keys randomness.
    sample_weight: of each sample in the loss of that step. Blocks count alike whatever their size, and the weights of a
    global batch add up to 1.
    noise (B, K): what makes each sample a member of an ensemble (`ups.models.ensemble`); None is the central one.
    latents (B, L, *N, Z): of an encoder, where they were kept (`ups.data.latent_cache`); fields may then be missing.
    """

    task: TaskSpec
    state: torch.Tensor
    static: torch.Tensor
    target: torch.Tensor
    parameters: torch.Tensor
    dt: torch.Tensor
    coordinates: tuple[torch.Tensor, ...]
    numbers: torch.Tensor
    stage_step: int = 0
    sample_weight: float = 1.0
    noise: torch.Tensor | None = None
    latents: torch.Tensor | None = None

    @property
    def num_samples(self) -> int:
        return int(self.numbers.shape[0])

    @property
    def space(self) -> tuple[int, ...]:
        """(X,), (X, Y) or (X, Y, Z)."""
        return tuple(int(c.shape[0]) for c in self.coordinates)

    def to(self, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False) -> Batch:
        """The same batch on `device`; floating point tensors as `dtype` if given, but for coordinates: cells of a grid
        far from 0 would be uneven in float32."""

        def move(x: torch.Tensor) -> torch.Tensor:
            return x.to(device=device, dtype=dtype or x.dtype, non_blocking=non_blocking)

        return replace(
            self,
            state=move(self.state),
            static=move(self.static),
            target=move(self.target),
            parameters=move(self.parameters),
            dt=move(self.dt),
            coordinates=tuple(c.to(device=device, non_blocking=non_blocking) for c in self.coordinates),
            noise=None if self.noise is None else move(self.noise),
            latents=None if self.latents is None else move(self.latents),
        )

    def with_state(self, state: torch.Tensor) -> Batch:
        """The same samples with other frames (B, T, C, *S)."""
        return replace(self, state=state)

    def pin_memory(self) -> Batch:
        """Page-locked copies, so that the transfer to an accelerator can overlap with work."""
        return replace(
            self,
            state=self.state.pin_memory(),
            static=self.static.pin_memory(),
            target=self.target.pin_memory(),
            parameters=self.parameters.pin_memory(),
            dt=self.dt.pin_memory(),
            coordinates=tuple(c.pin_memory() for c in self.coordinates),
            latents=None if self.latents is None else self.latents.pin_memory(),
        )

    def pick(self, rows: torch.Tensor) -> Batch:
        """The samples of these numbers (n,), on the CPU."""
        index = rows.to(self.dt.device)
        return replace(
            self,
            state=self.state[index],
            static=self.static[index],
            target=self.target[index],
            parameters=self.parameters[index],
            dt=self.dt[index],
            numbers=self.numbers[rows],
            noise=None if self.noise is None else self.noise[index],
            latents=None if self.latents is None else self.latents[index],
        )

    def cut(self, start: int, stop: int) -> Batch:
        """Samples start..stop-1: how a block is cut into ranks and micro-batches."""
        return replace(
            self,
            state=self.state[start:stop],
            static=self.static[start:stop],
            target=self.target[start:stop],
            parameters=self.parameters[start:stop],
            dt=self.dt[start:stop],
            numbers=self.numbers[start:stop],
            noise=None if self.noise is None else self.noise[start:stop],
            latents=None if self.latents is None else self.latents[start:stop],
        )


DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The position of a rank in the world. Made only by `ups.distributed.runtime` (and by tests).

    A loader takes a `RankInfo`, and only a started runtime makes one: a loader built before the process group exists is
    a type error, not a race in which every rank reads the same data.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    device_kind: DeviceKind = "cpu"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")
        if not 0 <= self.local_rank < self.local_world_size:
            raise ValueError(f"local rank {self.local_rank} is not among {self.local_world_size} local ranks")
