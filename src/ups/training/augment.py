"""Symmetry augmentation: each sample is seen under one random symmetry of its task, another one in every step.

Only what the task declares: `translation` (rolls along periodic axes), `reflection` (of each axis), `rotation90` (turns
in planes of two alike axes; without `reflection` proper turns alone). Components of vectors and tensors change place
and sign with the axes. `galilean` is not used: it changes the state and not only where it stands.

A transient task with static fields keeps those as they are, because a forcing that is the same in all data makes moved
copies other problems than the data's: such a task is rolled along axes on which its static fields are constant, and not
mirrored or turned. A steady task is a map from static fields, which move with the target. An axis whose two ends differ
is not mirrored.

`noisy` adds noise to the given frames: what a rollout's own errors look like to the next step. A model that only sees
clean frames leaves alone, or amplifies, what its errors put into waves that the data does not contain. Part of the
samples stay clean; the others get white noise whose size is log-uniform over two decades, relative to how much the
frame itself varies over space. Draws are keyed and counted in whole numbers: every device and every cut of a batch has
the same ones.

B samples, T frames, C channels, S space, A axes, N points of space, E elements of a group.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.models.normalization import Normalization, keyed_normal, sent
from ups.spec.batch import Batch
from ups.spec.grid import is_uniform
from ups.spec.keyed import key_of, keyed_uniform
from ups.spec.task import AxisSpec, Role, TaskSpec

_ROLES: tuple[Role, ...] = ("state", "static", "target")


@dataclass(frozen=True)
class Moves:
    """What may be done to the samples of one task on one grid.

    rolled (A,): number of shifts along an axis, 0 where it may not be rolled. first, along, stride (E, A): point i of
    output axis a is point first + along * i of the input axis whose points are `stride` apart in memory.
    sources, signs (E, C) by role: the channel that a channel is made from.
    """

    rolled: npt.NDArray[np.int64]
    first: Tensor
    along: Tensor
    stride: Tensor
    sources: dict[Role, Tensor]
    signs: dict[Role, Tensor]


class Augmentation:
    """Moves batches of all tasks, keyed by (seed, task, step, window number)."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._moves: dict[tuple[str, tuple[int, ...]], Moves | None] = {}

    def __call__(self, batch: Batch) -> Batch:
        """The batch with every sample under its own symmetry; the same batch if the task has none."""
        moves = self.moves_of(batch)
        if moves is None:
            return batch
        return moved(batch, moves, self.draws_of(batch))

    def draws_of(self, batch: Batch) -> npt.NDArray[np.float64]:
        """(B, A + 1) uniform draws of this step, as `draws_of`."""
        return draws_of(batch.task, batch.numbers.numpy(), batch.stage_step, self._seed)

    def moves_of(self, batch: Batch) -> Moves | None:
        """What may be done to the samples of a batch."""
        key = (batch.task.name, batch.space)
        if key not in self._moves:
            self._moves[key] = moves_of(batch.task, batch.coordinates)
        return self._moves[key]


def draws_of(task: TaskSpec, numbers: npt.NDArray[np.int64], step: int, seed: int) -> npt.NDArray[np.float64]:
    """(B, A + 1) uniform draws: the shift along each axis, and the element of the group of turns and reflections."""
    return keyed_uniform(key_of(seed, "augment", task.name, step), numbers, task.num_spatial_dims + 1)


def moves_of(task: TaskSpec, coordinates: Sequence[Tensor]) -> Moves | None:
    """What the declared symmetries of a task allow on this grid; None if nothing."""
    even = [is_uniform(c.double().cpu().numpy()) for c in coordinates]
    space = [len(c) for c in coordinates]
    shifts = "translation" in task.symmetries
    rolled = [shifts and ok and axis.periodic for axis, ok in zip(task.axes, even, strict=True)]
    # Where a periodic axis begins says nothing about where its mirror stands, unless it may be rolled as well; and an
    # axis whose ends differ, in kind or in the values that fields have there, is no mirror image of itself.
    values = [_values_at_ends(task, axis) for axis in task.axes]
    free = [
        ok and (roll or not axis.periodic) and axis.ends[0] == axis.ends[1] and first == last
        for axis, roll, ok, (first, last) in zip(task.axes, rolled, even, values, strict=True)
    ]
    keeps_static = not task.steady and task.num_channels("static") > 0
    # A component of a vector that is not 0 at an end would have the other sign there, or belong to another axis.
    scalars = {f.name for f in task.fields if f.tensor_rank == 0}
    keeps_sign = any(known.value and known.channel not in scalars for known in task.boundary_values)
    elements = [_identity(len(space))] if keeps_static or keeps_sign else point_group(task, space, free)
    if len(elements) == 1 and not any(rolled):
        return None
    maps = {role: [_channel_map(task, role, perm, flip) for perm, flip in elements] for role in _ROLES}
    strides = [math.prod(space[axis + 1 :]) for axis in range(len(space))]
    return Moves(
        rolled=np.array(rolled) * np.array(space),
        first=torch.tensor([[n - 1 if on else 0 for n, on in zip(space, flip, strict=True)] for _, flip in elements]),
        along=torch.tensor([[-1 if on else 1 for on in flip] for _, flip in elements]),
        stride=torch.tensor([[strides[axis] for axis in perm] for perm, _ in elements]),
        sources={role: torch.tensor([m[0] for m in found], dtype=torch.int64) for role, found in maps.items()},
        signs={role: torch.tensor([m[1] for m in found], dtype=torch.float32) for role, found in maps.items()},
    )


def point_group(
    task: TaskSpec, space: Sequence[int], free: Sequence[bool]
) -> list[tuple[tuple[int, ...], tuple[bool, ...]]]:
    """All (axes, backwards) that reflections and turns of the free axes make, the identity first."""
    mirrors, turns = "reflection" in task.symmetries, "rotation90" in task.symmetries
    kind = [(a.extent, a.unit, a.boundary, n, _values_at_ends(task, a)) for a, n in zip(task.axes, space, strict=True)]
    axes = range(len(space))
    twins = [[turns and free[a] and free[b] and a != b and kind[a] == kind[b] for b in axes] for a in axes]
    elements = []
    for perm in itertools.permutations(axes):
        if any(a != b and not twins[a][b] for a, b in enumerate(perm)):
            continue
        for flip in itertools.product((False, True), repeat=len(space)):
            may_flip = all(not on or (free[a] if mirrors else any(twins[a])) for a, on in enumerate(flip))
            if may_flip and (mirrors or _parity(perm) * (-1) ** sum(flip) == 1):
                elements.append((perm, flip))
    return elements


def _values_at_ends(task: TaskSpec, axis: AxisSpec) -> tuple[dict[str, float], ...]:
    """What the task knows about channels at the first and at the last end of an axis."""
    return tuple(
        {known.channel: known.value for known in task.boundary_values if (known.axis, known.end) == (axis.name, end)}
        for end in ("first", "last")
    )


def moved(batch: Batch, moves: Moves, draws: npt.NDArray[np.float64]) -> Batch:
    """The batch under the drawn moves (B, A + 1): each array is gathered once."""
    device, space = batch.state.device, batch.space
    chosen = torch.from_numpy((draws[:, -1] * len(moves.first)).astype(np.int64))  # (B,)
    shift = sent(torch.from_numpy((draws[:, :-1] * moves.rolled).astype(np.int64)), device)  # (B, A)
    if not batch.task.steady and batch.static.shape[1]:
        shift = shift * _constant_along(batch.static)
    first, along, stride = (sent(table[chosen], device) for table in (moves.first, moves.along, moves.stride))
    first = first - shift
    index = torch.zeros((), dtype=torch.int64, device=device)
    for axis, count in enumerate(space):
        place = torch.arange(count, device=device)
        source = torch.addcmul(first[:, axis, None], along[:, axis, None], place)  # (B, n), above -n
        source = torch.where(source < 0, source + count, source)
        shape = [-1] + [count if a == axis else 1 for a in range(len(space))]
        index = index + (source * stride[:, axis, None]).reshape(shape)
    index = index.flatten(1)  # (B, N): the point that a point is taken from

    def taken(x: Tensor, role: Role) -> Tensor:
        """x (B, ..., C, *S) moved."""
        if x.numel() == 0:
            return x
        if all(f.tensor_rank == 0 for f in batch.task.fields_of(role)):
            flat = x.reshape(x.shape[0], -1, index.shape[1])
            return flat.gather(2, index[:, None].expand(flat.shape)).reshape(x.shape)
        source = sent(moves.sources[role][chosen], device)  # (B, C)
        sign = sent(moves.signs[role][chosen], device, x.dtype)
        both = (source[:, :, None] * index.shape[1] + index[:, None]).flatten(1)  # (B, C * N)
        flat = x.reshape(x.shape[0], -1, both.shape[1])
        gathered = flat.gather(2, both[:, None].expand(flat.shape)).reshape(*flat.shape[:2], source.shape[1], -1)
        return (gathered * sign[:, None, :, None]).reshape(x.shape)

    return replace(
        batch,
        state=taken(batch.state, "state"),
        static=taken(batch.static, "static"),
        target=taken(batch.target, "target"),
    )


def _constant_along(static: Tensor) -> Tensor:
    """(B, A): whether all static fields (B, C, *S) of a sample are constant along an axis."""
    axes = range(2, static.ndim)
    constant = [(static == static.narrow(axis, 0, 1)).flatten(1).all(1) for axis in axes]
    return torch.stack(constant, dim=1)


def _identity(count: int) -> tuple[tuple[int, ...], tuple[bool, ...]]:
    return tuple(range(count)), (False,) * count


def _parity(perm: Sequence[int]) -> int:
    inversions = sum(a > b for a, b in itertools.combinations(perm, 2))
    return -1 if inversions % 2 else 1


def _channel_map(
    task: TaskSpec, role: Role, perm: Sequence[int], flip: Sequence[bool]
) -> tuple[list[int], list[float]]:
    """(C,) source and sign of each channel of a role: component a of a vector is component perm[a], turned with it."""
    sources: list[int] = []
    signs: list[float] = []
    for field in task.fields_of(role):
        start, dims = len(sources), task.num_spatial_dims
        for component in itertools.product(range(dims), repeat=field.tensor_rank):
            place, sign = 0, 1.0
            for axis in component:
                place = place * dims + perm[axis]
                sign = -sign if flip[axis] else sign
            sources.append(start + place)
            signs.append(sign)
    return sources, signs


_DECADES = 2.0


def noisy(
    batch: Batch, frames: Tensor, normalization: Normalization, seed: int, *, largest: float, clean: float
) -> Tensor:
    """frames (B, T, C, *S) of a batch with noise up to `largest` deviations; a share `clean` of samples has none."""
    if largest == 0 or clean == 1:
        return frames
    task = batch.task
    key = key_of(seed, "noise", task.name, batch.stage_step)
    numbers = batch.numbers.numpy()
    draws = keyed_uniform(key, numbers, 2)  # (B, 2): size, and whether there is any
    hit = np.flatnonzero(draws[:, 1] >= clean)
    if len(hit) == 0:
        return frames
    size = torch.from_numpy(largest * 10.0 ** (-_DECADES * draws[hit, 0]))
    index = sent(torch.from_numpy(hit), frames.device)
    chosen = frames.index_select(0, index)
    space = tuple(range(3, frames.ndim))
    deviation = chosen.std(space, correction=0, keepdim=True)
    deviation = torch.minimum(deviation, normalization.state_scale(task, frames))
    values = keyed_normal(
        key_of(seed, "noise values", task.name, batch.stage_step), numbers[hit], chosen[0].numel(), frames
    )
    scale = deviation * sent(size, frames.device, frames.dtype).reshape(-1, *([1] * (frames.ndim - 1)))
    return frames.index_add(0, index, values.reshape(chosen.shape) * scale)
