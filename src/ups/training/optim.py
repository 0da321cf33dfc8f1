"""Optimizer, learning-rate schedule, clipping and moving average of the weights of a stage.

The schedule is a pure function of the part of the stage that is done, so it has no state to save. The optimizer's state
is made at once instead of in its first step, so that a checkpoint has the same entries before and after that step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ups.config.schema import EmaConfig
from ups.config.stage import OptimConfig
from ups.distributed.strategies import locals_of
from ups.training.muon import Muon
from ups.training.progress import Progress


def build_optimizer(
    config: OptimConfig, parameters: Mapping[str, nn.Parameter], matrices: Collection[nn.Parameter] = ()
) -> torch.optim.Optimizer:
    """AdamW, SGD or Muon over named parameters; weight decay only on what has two dimensions and more.

    matrices: those that Muon may orthogonalize; the other parameters, and all under another rule, are its AdamW's. With
    Muon only those matrices decay: among the others are tables, and rows that a step does not use must not move.
    """
    wanted = {id(p) for p in matrices} if config.type == "muon" else set()
    orthogonal = [p for p in parameters.values() if id(p) in wanted]
    rest = [p for p in parameters.values() if id(p) not in wanted]
    decayed = [p for p in rest if p.ndim >= 2]
    plain = [p for p in rest if p.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": 0.0 if config.type == "muon" else config.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    groups = [g for g in groups if g["params"]]
    optimizer: torch.optim.Optimizer
    if config.type == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), fused=True)
    elif config.type == "muon":
        optimizer = Muon(
            orthogonal,
            groups,
            learning_rate=config.learning_rate,
            matrix_learning_rate=config.matrix_learning_rate,
            weight_decay=config.weight_decay,
            betas=(config.beta1, config.beta2),
        )
    else:
        # Not fused: torch has no fused SGD for sharded parameters.
        optimizer = torch.optim.SGD(groups, lr=config.learning_rate, momentum=config.beta1, foreach=True)
    for parameter in parameters.values():
        has_moments = config.type == "adamw" or (config.type == "muon" and id(parameter) not in wanted)
        momentum = config.type == "muon" or config.beta1 > 0
        optimizer.state[parameter] = _zero_state(parameter, has_moments=has_moments, momentum=momentum)
    return optimizer


def _zero_state(parameter: Tensor, *, has_moments: bool, momentum: bool) -> dict[str, Tensor]:
    if has_moments:
        return {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, requires_grad=False),
            "exp_avg_sq": torch.zeros_like(parameter, requires_grad=False),
        }
    # A zero buffer and no buffer give the same first step: m * 0 + g = g.
    return {"momentum_buffer": torch.zeros_like(parameter, requires_grad=False)} if momentum else {}


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
    """Rate at the part `done` (0 to 1) of a stage: linear warm-up, then cosine decay to final_fraction of the peak."""
    done = min(max(done, 0.0), 1.0)
    if done < config.warmup_fraction:
        return config.learning_rate * done / config.warmup_fraction
    rest = 1.0 - config.warmup_fraction
    along = (done - config.warmup_fraction) / rest if rest > 0 else 1.0
    cosine = 0.5 * (1.0 + math.cos(math.pi * along))
    return config.learning_rate * (config.final_fraction + (1.0 - config.final_fraction) * cosine)


def trainable(named: Iterable[tuple[str, nn.Parameter]]) -> dict[str, nn.Parameter]:
    """Those that require a gradient, by name."""
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def matrices_of(stage: nn.Module) -> list[nn.Parameter]:
    """The matrices that a stage names for Muon, as they are after sharding; none if it names none."""
    name_matrices = getattr(stage, "matrices", None)
    return list(name_matrices()) if callable(name_matrices) else []


_MEMORY = 0.95
# Norms of the first updates fall fast and are few: no mean to be relative to.
_FIRST_UPDATES = 20


def clip_factor(config: OptimConfig, norm: float, progress: Progress) -> float:
    """What a finite gradient of this norm is to be multiplied by (1: left as it is); counts the norm in `progress`.

    A norm above the relative limit counts as the limit: an outlier must not raise the limit for the next one.
    """
    limits = [config.clip_norm] if config.clip_norm > 0 else []
    if config.clip_ratio > 0:
        counted = norm
        # Gradients that were all zero so far (of steps without a task that a stage trains) say nothing.
        if progress.updates >= _FIRST_UPDATES and progress.mean_norm > 0:
            relative = config.clip_ratio * progress.mean_norm
            limits.append(relative)
            counted = min(norm, relative)
        first = progress.updates == 0
        progress.mean_norm = counted if first else _MEMORY * progress.mean_norm + (1 - _MEMORY) * counted
    limit = min(limits, default=norm)
    return limit / (norm + 1e-6) if limit < norm else 1.0


class Ema:
    """Average of named parameters. Not a module: DDP and fully_shard must not see its tensors."""

    def __init__(self, config: EmaConfig, parameters: Mapping[str, nn.Parameter]) -> None:
        self.decay = config.decay
        self.tensors: dict[str, Tensor] = {name: p.detach().clone() for name, p in parameters.items()}
        self._averages = locals_of(self.tensors.values())
        self._parameters = list(parameters.values())

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Move the average toward the weights, after the `num_updates`-th optimizer step (from 1).

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
