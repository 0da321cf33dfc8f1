"""Optimizer, learning-rate schedule, clipping and moving average of the weights of a stage.

The schedule is a pure function of the part of the stage that is done, so it has no state to save. The optimizer's state
is made at once instead of in its first step, so that a checkpoint has the same entries before and after that step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ups.config.schema import EmaConfig
from ups.config.stage import OptimConfig
from ups.distributed.strategies import locals_of
from ups.errors import PluginError
from ups.registry import OPTIMIZERS, SCHEDULES
from ups.training.muon import AdamW, Muon
from ups.training.progress import Progress


def build_optimizer(
    config: OptimConfig, parameters: Mapping[str, nn.Parameter], matrices: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """The optimizer that a recipe names, over named parameters, with the state of its first step in place.

    matrices: those that an optimizer may orthogonalize. A factory in `ups.registry.OPTIMIZERS` gets these three.
    """
    optimizer = OPTIMIZERS.factory(config.type)(config, parameters, matrices)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise PluginError(f"optimizer '{config.type}' is a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if not OPTIMIZERS.origin(config.type).is_ours:
        _fill_state(optimizer, parameters.values())
    return optimizer


def adamw(
    config: OptimConfig, parameters: Mapping[str, nn.Parameter], matrices: Collection[nn.Parameter]
) -> torch.optim.Optimizer:
    """AdamW, with weight decay only on what has two dimensions and more."""
    betas = (config.beta1, config.beta2)
    groups = _decay_groups(parameters.values(), config.weight_decay)
    optimizer = AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)
    for parameter in parameters.values():
        optimizer.state[parameter] = _moments(parameter)
    return optimizer


def sgd(
    config: OptimConfig, parameters: Mapping[str, nn.Parameter], matrices: Collection[nn.Parameter]
) -> torch.optim.Optimizer:
    """SGD with momentum beta1. Not fused: torch has no fused SGD for sharded parameters."""
    groups = _decay_groups(parameters.values(), config.weight_decay)
    optimizer = torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1, foreach=True)
    for parameter in parameters.values():
        optimizer.state[parameter] = _momentum(parameter) if config.beta1 > 0 else {}
    return optimizer


def muon(
    config: OptimConfig, parameters: Mapping[str, nn.Parameter], matrices: Collection[nn.Parameter]
) -> torch.optim.Optimizer:
    """Muon for the matrices, AdamW for the rest. Only those matrices decay: among the others are tables, and rows that
    a step does not use must not move."""
    wanted = {id(p) for p in matrices}
    optimizer = Muon(
        [p for p in parameters.values() if id(p) in wanted],
        _decay_groups([p for p in parameters.values() if id(p) not in wanted], 0.0),
        learning_rate=config.learning_rate,
        matrix_learning_rate=config.matrix_learning_rate,
        weight_decay=config.weight_decay,
        betas=(config.beta1, config.beta2),
    )
    for parameter in parameters.values():
        optimizer.state[parameter] = _momentum(parameter) if id(parameter) in wanted else _moments(parameter)
    return optimizer


def _decay_groups(parameters: Iterable[nn.Parameter], weight_decay: float) -> list[dict[str, Any]]:
    parameters = list(parameters)
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _moments(parameter: Tensor) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter, requires_grad=False),
        "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
    }


def _momentum(parameter: Tensor) -> dict[str, Tensor]:
    """A zero buffer and no buffer give the same first step: m * 0 + g = g."""
    return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)}


@torch.no_grad()
def _fill_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Make the state of an optimizer of a plugin by a step at rate 0, and set it to zeros; weights stay as they are."""
    parameters = list(parameters)
    rates = [group["lr"] for group in optimizer.param_groups]
    before = [p.detach().clone() for p in parameters]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for parameter, weights in zip(parameters, before, strict=True):
        parameter.copy_(weights)
        for name, value in optimizer.state[parameter].items():
            if not isinstance(value, Tensor):
                raise PluginError(
                    f"the state '{name}' of optimizer {type(optimizer).__name__} is a {type(value).__name__}",
                    hint="keep tensors: a checkpoint holds nothing else",
                )
            value.zero_()


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state as `<parameter name>/<entry>` -> tensor: the live tensors, so that loading into them is loading."""
    return {
        f"{name}/{entry}": value
        for name, parameter in parameters.items()
        for entry, value in sorted(optimizer.state[parameter].items())
    }


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """The rate of the next step, for all groups; a group with a peak of its own gets its share."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("rate_ratio", 1.0)


def learning_rate(config: OptimConfig, done: float) -> float:
    """Rate at the part `done` (0 to 1) of a stage: linear warm-up, then the schedule down to final_fraction."""
    done = min(max(done, 0.0), 1.0)
    if done < config.warmup_fraction:
        return config.learning_rate * done / config.warmup_fraction
    rest = 1.0 - config.warmup_fraction
    along = (done - config.warmup_fraction) / rest if rest > 0 else 1.0
    height = float(SCHEDULES.factory(config.schedule)(along))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * height)


def cosine(along: float) -> float:
    """From 1 to 0 along the rest of a stage after warm-up, flat at both ends."""
    return 0.5 * (1.0 + math.cos(math.pi * along))


def linear(along: float) -> float:
    """From 1 to 0 in a straight line."""
    return 1.0 - along


def constant(along: float) -> float:
    """The peak rate to the end."""
    return 1.0


def trainable(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Those that require a gradient, by name."""
    return {name: parameter for name, parameter in named if parameter.requires_grad}


_MEMORY = 0.95
# Norms of the first steps fall fast and are few: no mean to be relative to.
_FIRST_STEPS = 20


class GradientJudge:
    """Judges the gradient of each step: how much it is clipped, and whether the step counts.

    The numbers stay on the device, so that no step waits for it, until `read` counts them in the progress.
    """

    def __init__(self, config: OptimConfig) -> None:
        self._config = config
        self._norms: list[Tensor] = []
        self._mean: Tensor | None = None  # () moving average of the norm

    @property
    def num_unread(self) -> int:
        """Steps since the last `read`."""
        return len(self._norms)

    @torch.no_grad()
    def judge(self, progress: Progress, norm: Tensor, gradients: list[Tensor]) -> Tensor:
        """Clip the gradients of this norm (float64), in place. Returns () bool: whether the norm is finite.

        progress: as it was before the step. A norm above the relative limit counts as the limit: an outlier must not
        raise the limit for the next one.
        """
        self._norms.append(norm)
        finite = norm.isfinite()
        mean = torch.full_like(norm, progress.mean_norm) if self._mean is None else self._mean
        limit = torch.full_like(norm, self._config.clip_norm or math.inf)
        if self._config.clip_ratio > 0:
            # Gradients that were all zero so far (of steps without a task that a stage trains) say nothing.
            counted = norm
            if progress.stage_step >= _FIRST_STEPS:
                relative = torch.where(mean > 0, self._config.clip_ratio * mean, math.inf)
                limit, counted = torch.minimum(limit, relative), torch.minimum(norm, relative)
            followed = torch.where(mean > 0, _MEMORY * mean + (1 - _MEMORY) * counted, counted)
            mean = torch.where(finite, followed, mean)
        self._mean = mean
        if self._config.clip_norm > 0 or self._config.clip_ratio > 0:
            factor = torch.where(limit < norm, limit / (norm + 1e-6), 1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, gradients[0].dtype))
        return finite

    def read(self, progress: Progress) -> list[float]:
        """Norms of the steps since the last call, now counted in `progress`. Waits for the device."""
        if self._mean is None or not self._norms:
            return []
        *norms, progress.mean_norm = torch.stack([*self._norms, self._mean]).tolist()
        self._norms.clear()
        for norm in norms:
            progress.count(math.isfinite(norm))
        return norms


def update(optimizer: torch.optim.Optimizer, finite: Tensor) -> None:
    """One step of the optimizer if `finite` () holds; else weights and state stay bitwise as they are.

    Muon and our fused AdamW decide that on the device. Others would not look at `found_inf`: the host waits for the
    answer.
    """
    if isinstance(optimizer, Muon) or (type(optimizer) in (AdamW, torch.optim.AdamW) and optimizer.defaults["fused"]):
        optimizer.found_inf = (~finite).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(finite):
        optimizer.step()


class Ema:
    """Average of named parameters. Not a module: DDP and fully_shard must not see its tensors."""

    def __init__(self, config: EmaConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self.decay = config.decay
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}
        self._averages = locals_of(self.tensors.values())
        self._parameters = list(parameters.values())

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Move the average toward the weights, after the `num_updates`-th step (from 1), skipped ones included.

        The memory is short at first, so that the initial weights are forgotten quickly.
        """
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        torch._foreach_lerp_(self._averages, locals_of(self._parameters), 1.0 - decay)

    @torch.no_grad()
    def restart(self) -> None:
        """Forget the past: the average is the weights."""
        torch._foreach_copy_(self._averages, locals_of(self._parameters))

    @torch.no_grad()
    def become_weights(self) -> None:
        """Write the average into the weights."""
        torch._foreach_copy_(locals_of(self._parameters), self._averages)

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """The weights are the average inside, and bitwise what they were after."""
        weights = locals_of(self._parameters)
        with torch.no_grad():
            kept = [w.clone() for w in weights]
            torch._foreach_copy_(weights, self._averages)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(weights, kept)
