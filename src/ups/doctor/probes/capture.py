"""What one rank and many ranks must agree on: weights at the start, gradient of the first step, learning rates, scores.

Written by the check `alone` in a process without other ranks, and compared by the check `parity`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ups.distributed.agreement import Status
from ups.distributed.strategies import gathered
from ups.doctor.probes.parts import Enough
from ups.run.assemble import Assembled
from ups.training.engine import Engine, Hook

NUM_STEPS = 2
_TENSORS = "alone_{}.safetensors"
_FACTS = "alone.json"


class Capture(Hook):
    """A hook that keeps the reduced gradient of the first step and the learning rates, and stops after two steps."""

    def __init__(self, after_first: Callable[[dict[str, Tensor]], None] | None = None) -> None:
        self.gradients: dict[str, Tensor] = {}
        self.rates: list[list[float]] = []
        self._after_first = after_first

    def after_step(self, engine: Engine, agreed: Status) -> None:
        self.rates.append([float(group["lr"]) for group in engine.optimizer.param_groups])
        if len(self.rates) == 1:
            self.gradients = {n: whole(p.grad) for n, p in engine.parameters.items() if p.grad is not None}
            if self._after_first is not None:
                self._after_first(self.gradients)
        if len(self.rates) >= NUM_STEPS:
            raise Enough

    def at_end(self, engine: Engine) -> None:
        raise Enough


def whole(tensor: Tensor) -> Tensor:
    """A copy in host memory, gathered where it is sharded. Collective for a sharded tensor: all ranks."""
    return gathered(tensor).to("cpu", torch.float64).clone().contiguous()


def weights_of(parts: Assembled) -> dict[str, Tensor]:
    """All parameters by name. Collective for sharded ones: all ranks."""
    return {name: whole(parameter) for name, parameter in parts.stage.named_parameters()}


def plain_gradient(parts: Assembled) -> dict[str, Tensor]:
    """Gradient of the loss of the global batch of step 0, without the engine: what is right by definition."""
    parts.stage.train()
    device, dtype = parts.engine.runtime.device, next(parts.stage.parameters()).dtype
    for _ in range(parts.loader.batches_in_step(0)):
        parts.stage([batch.to(device, dtype) for batch in next(parts.loader)]).total.backward()
    found = {n: whole(p.grad) for n, p in parts.stage.named_parameters() if p.grad is not None}
    parts.stage.zero_grad(set_to_none=True)
    return found


def keep_alone(folder: Path, index: int, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> None:
    """Keep the tensors of one rank for stage `index`."""
    tensors = {f"weight/{n}": t for n, t in weights.items()} | {f"gradient/{n}": t for n, t in gradients.items()}
    save_file(tensors, folder / _TENSORS.format(index))


def read_alone(folder: Path, index: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights, gradients) of one rank for stage `index`."""
    tensors = load_file(folder / _TENSORS.format(index))
    parts = [{n.partition("/")[2]: t for n, t in tensors.items() if n.startswith(kind)} for kind in ("weight", "grad")]
    return parts[0], parts[1]


def keep_facts(folder: Path, facts: Mapping[str, Any]) -> None:
    """Keep rates and scores of one rank."""
    (folder / _FACTS).write_text(json.dumps(facts))


def read_facts(folder: Path) -> dict[str, Any]:
    """Rates and scores of one rank."""
    found: dict[str, Any] = json.loads((folder / _FACTS).read_text())
    return found
