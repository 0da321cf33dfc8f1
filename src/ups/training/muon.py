"""Muon for matrices and AdamW for everything else, as one optimizer.

A matrix moves by its orthogonalized momentum: all directions of an update have about the same length, whatever the size
of the gradient. The length is that of a usual AdamW update, so that rates mean the same in both parts.
Sharded matrices are gathered, orthogonalized whole on every rank, and each rank keeps its own rows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ups.distributed.strategies import is_sharded, local, locals_of

MOMENTUM = 0.95
# Root mean square of a usual AdamW update, in units of its learning rate.
_UPDATE_SIZE = 0.2
_STEPS = 5
# A quintic that is steep at 0: five applications bring every singular value above about 0.001 to between 0.7 and 1.2.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM = 1e-7


class _NotCompiled(torch.optim.Optimizer):
    """Without what torch wraps around compiled steps: that imports the compiler, 900 files in each rank."""

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)


class AdamW(_NotCompiled, torch.optim.AdamW):
    """torch's, which is not compiled."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(_NotCompiled):
    """Groups of AdamW, and a last group of matrices of two and more dimensions: (first dimension, all others)."""

    def __init__(
        self,
        matrices: Sequence[nn.Parameter],
        others: Sequence[dict[str, Any]],
        *,
        learning_rate: float,
        matrix_learning_rate: float,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        group = {"params": list(matrices), "lr": matrix_learning_rate, "weight_decay": weight_decay}
        # What `set_learning_rate` multiplies the rate of the schedule by.
        group["rate_ratio"] = matrix_learning_rate / learning_rate
        super().__init__([group], {})
        self._matrices = self.param_groups[0]
        # () float: where it is not 0, a step changes nothing. What torch calls it in its fused optimizers.
        self.found_inf: Tensor | None = None
        self._adamw = AdamW(list(others), lr=learning_rate, betas=betas, fused=True) if others else None
        if self._adamw is not None:
            self._adamw.state = self.state
            self.param_groups[:0] = self._adamw.param_groups

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Also for the AdamW inside: torch puts new groups and a new state in the place of those that both share."""
        super().load_state_dict(state_dict)
        self._matrices = self.param_groups[-1]
        if self._adamw is not None:
            self._adamw.param_groups = self.param_groups[:-1]
            self._adamw.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of all parameters with a gradient. Collective where parameters are sharded: all ranks.

        closure: computes the gradients first, as other trainers have it; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._adamw is not None:
            self._adamw.found_inf = self.found_inf  # type: ignore[attr-defined]
            self._adamw.step()
        rate, decay = self._matrices["lr"], self._matrices["weight_decay"]
        moved = [p for p in self._matrices["params"] if p.grad is not None]
        if not moved:
            return loss
        used = in_use(moved)
        if self.found_inf is not None:
            used &= self.found_inf.to(used.device) == 0
        gradients = locals_of([p.grad for p in moved if p.grad is not None])
        buffers = locals_of([self.state[p]["momentum_buffer"] for p in moved])
        momenta = torch._foreach_lerp(buffers, gradients, 1 - MOMENTUM)
        directions = torch._foreach_lerp(gradients, momenta, MOMENTUM)
        for parameter, buffer, momentum, direction, moves in zip(
            moved, buffers, momenta, directions, used.unbind(), strict=True
        ):
            weights = local(parameter)
            size = _UPDATE_SIZE * math.sqrt(max(parameter.shape[0], parameter.numel() // parameter.shape[0]))
            decayed = weights * (1 - rate * decay) if decay else weights
            there = torch.add(decayed, orthogonal_part(parameter, direction), alpha=-rate * size)
            torch.where(moves, momentum, buffer, out=buffer)
            torch.where(moves, there, weights, out=weights)
        return loss


def in_use(parameters: list[nn.Parameter]) -> Tensor:
    """(number of parameters,) bool: whose gradient is not zero. A matrix that no task of a step uses stays as it is.

    Its momentum has a direction still, and the length of an update does not shrink with it. The same on all ranks, and
    collective where parameters are sharded.
    """
    # Sums of magnitudes: that of a rank which has no row of a matrix is 0, and that of small numbers is not.
    sizes = torch.stack(
        [size.float() for size in torch._foreach_norm(locals_of([p.grad for p in parameters if p.grad is not None]), 1)]
    )
    for mesh in dict.fromkeys(p.device_mesh for p in parameters if is_sharded(p)):
        whole = sizes.to(mesh.device_type)
        for dim in range(mesh.ndim):
            torch.distributed.all_reduce(whole, torch.distributed.ReduceOp.MAX, mesh.get_group(dim))
        sizes = whole.to(sizes.device)
    return sizes != 0


def orthogonal_part(parameter: Tensor, direction: Tensor) -> Tensor:
    """This rank's part of the orthogonalized direction; `direction` is this rank's part of the whole one."""
    if not is_sharded(parameter):
        return orthogonalized(direction.reshape(direction.shape[0], -1)).reshape(direction.shape)
    from torch.distributed.tensor import DTensor, distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements
    sharded = DTensor.from_local(
        direction, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    whole = sharded.full_tensor()
    found = orthogonalized(whole.reshape(whole.shape[0], -1)).reshape(whole.shape)
    # Every rank has found the same: nothing is sent.
    mine: Tensor = distribute_tensor(found, mesh, placements, src_data_rank=None).to_local()
    return mine.to(direction.device)  # parameters that are kept on the host are gathered on the mesh's device


def orthogonalized(matrix: Tensor) -> Tensor:
    """The matrix (M, N) with singular values near 1 (Newton-Schulz).

    The polynomials are applied to the small Gram matrix, whose product with the matrix is formed once: a third of the
    work of the usual form for the shapes of convolutions. In float32 that leaves errors of thousandths at most, where
    the usual form in bfloat16 leaves hundredths.
    """
    tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.mT if tall else matrix
    x: Tensor = wide / wide.norm().clamp(min=_SMALLEST_NORM)
    gram = x @ x.mT
    applied: Tensor | None = None
    for step in range(_STEPS):
        polynomial = torch.addmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC)
        polynomial.diagonal().add_(_LINEAR)
        applied = polynomial if applied is None else polynomial @ applied
        if step + 1 < _STEPS:
            gram = polynomial @ gram @ polynomial
    assert applied is not None
    x = applied @ x
    return x.mT if tall else x
