"""Windows (numpy, one sample), batches (torch, many samples of one task) and the rank they are for.

Batches are on the CPU until the step.

Shape legend, the same in 1D, 2D and 3D:
    B samples   T frames   C channels of a role, in the order of `TaskSpec.channel_names(role)`
    S space: (X,), (X, Y) or (X, Y, Z), in the order of `TaskSpec.axes`   P parameters
A steady task has T = 0 and no state channels; a task without static fields has 0 static channels: a reader never has
to ask whether an array is there, only how many channels it has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from ups.spec.task import TaskSpec

if TYPE_CHECKING:
    import torch


Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
if TYPE_CHECKING:
    Values = npt.NDArray[Any] | torch.Tensor
Made = TypeVar("Made")
# Cached latents (B, L, *N, Z) of an encoder, in `Batch.extra`.
LATENTS = "latents"
# Tensors of a batch that are not floating point with a row for each sample.
_NOT_ROWS = ("coordinates", "numbers", "extra")


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


class Memo:
    """What predictors made of a batch and may use again for the same samples with other frames.

    `rollout` gives one to its batches; any other batch has none, and what a predictor makes is used once.
    """

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], Made]) -> Made:
        """What `make` returned at the first call with this name."""
        if name not in self._made:
            self._made[name] = make()
        made: Made = self._made[name]
        return made


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
    extra: other tensors (B, ...) by name, for a stage that asked for them (`ups.data.latent_cache`), such as
    cached latents; fields may then be missing.
    memo: of a rollout, whose batches differ in state, stage_step and noise alone; None elsewhere.
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
    extra: Mapping[str, torch.Tensor] = field(default_factory=dict)
    memo: Memo | None = None

    @classmethod
    def of(
        cls,
        task: TaskSpec,
        *,
        coordinates: Sequence[Values],
        dt: Values | float,
        state: Values | None = None,
        static: Values | None = None,
        target: Values | None = None,
        parameters: Values | None = None,
        numbers: Values | Sequence[int] | None = None,
        extra: Mapping[str, Values] | None = None,
        stage_step: int = 0,
        sample_weight: float = 1.0,
    ) -> Batch:
        """The one way to make a batch, from arrays, which are shared if they can be written to, or from tensors.

        A role that is left out has no channels, or no frames. dt: of all samples, or (B,). numbers: default 0, 1, ...
        """
        import torch

        def tensor(values: Values) -> torch.Tensor:
            if isinstance(values, torch.Tensor):
                return values
            return torch.from_numpy(values if values.flags.writeable else values.copy())

        others = {name: tensor(values) for name, values in (extra or {}).items()}
        roles = {n: tensor(x) for n, x in (("state", state), ("static", static), ("target", target)) if x is not None}
        first = next(iter((*roles.values(), *others.values())))
        size, space = first.shape[0], tuple(len(c) for c in coordinates)
        none = first.new_zeros(size, 0, *space)
        return cls(
            task=task,
            state=roles.get("state", first.new_zeros(size, 0, task.num_channels("state"), *space)),
            static=roles.get("static", none),
            target=roles.get("target", none),
            parameters=none.new_zeros(size, 0) if parameters is None else tensor(parameters),
            dt=first.new_full((size,), dt) if isinstance(dt, int | float) else tensor(dt),
            coordinates=tuple(tensor(c) for c in coordinates),
            numbers=torch.arange(size) if numbers is None else torch.as_tensor(numbers, dtype=torch.int64),
            stage_step=stage_step,
            sample_weight=sample_weight,
            extra=others,
        )

    @property
    def num_samples(self) -> int:
        return int(self.numbers.shape[0])

    @property
    def valid(self) -> torch.Tensor | None:
        """(B, 1, *S): 1 where fields have values, 0 in holes; None for a task without a mask."""
        return valid_points(self.task, self.static)

    @property
    def space(self) -> tuple[int, ...]:
        """(X,), (X, Y) or (X, Y, Z)."""
        return tuple(int(c.shape[0]) for c in self.coordinates)

    def map_tensors(
        self,
        change: Callable[[torch.Tensor], torch.Tensor],
        *,
        numbers: Callable[[torch.Tensor], torch.Tensor] | None = None,
        coordinates: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Batch:
        """The batch with `change` applied to every floating point tensor that has a row for each sample.

        numbers: for `numbers`, which are integers on the CPU. coordinates: for each axis; all samples share them.
        """
        rows: dict[str, Any] = {name: change(x) for name in _ROWS if (x := getattr(self, name)) is not None}
        return replace(
            self,
            **rows,
            extra={name: change(x) for name, x in self.extra.items()},
            memo=None,
            numbers=self.numbers if numbers is None else numbers(self.numbers),
            coordinates=self.coordinates if coordinates is None else tuple(map(coordinates, self.coordinates)),
        )

    def to(self, device: torch.device, dtype: torch.dtype | None = None, non_blocking: bool = False) -> Batch:
        """The same batch on `device`; floating point tensors as `dtype` if given, but for coordinates: cells of a grid
        far from 0 would be uneven in float32."""
        return self.map_tensors(
            lambda x: x.to(device=device, dtype=dtype or x.dtype, non_blocking=non_blocking),
            coordinates=lambda x: x.to(device=device, non_blocking=non_blocking),
        )

    def with_state(self, state: torch.Tensor) -> Batch:
        """The same samples with other frames (B, T, C, *S)."""
        return replace(self, state=state)

    def pin_memory(self) -> Batch:
        """Page-locked copies, so that the transfer to an accelerator can overlap with work."""
        return self.map_tensors(lambda x: x.pin_memory(), coordinates=lambda x: x.pin_memory())

    def cut(self, start: int, stop: int) -> Batch:
        """Samples start..stop-1: how a block is cut into ranks and micro-batches."""
        return self.map_tensors(lambda x: x[start:stop], numbers=lambda x: x[start:stop])

    def repeated(self, times: int) -> Batch:
        """The batch with each sample `times` times, one behind the other."""

        def repeat(x: torch.Tensor) -> torch.Tensor:
            return x.repeat_interleave(times, dim=0)

        return self.map_tensors(repeat, numbers=repeat)


def valid_points(task: TaskSpec, static: torch.Tensor) -> torch.Tensor | None:
    """(B, 1, *S) of static fields (B, Cs, *S): 1 where fields have values, 0 in holes; None without a mask."""
    if not task.mask:
        return None
    channel = task.channel_names("static").index(task.mask)
    return (static[:, channel : channel + 1] <= 0).to(static)


# Taken from the class, so that a tensor that is added to it is not forgotten anywhere.
_ROWS = tuple(f.name for f in fields(Batch) if "torch.Tensor" in str(f.type) and f.name not in _NOT_ROWS)


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
