"""Watches every module of a stage while it trains: which one is at work, and which one made the first bad number.

A module is to blame if what went into it was finite and what came out is not, or if it was the last one entered when
the rank raised, crashed or stood still. The place is written to a file at every step of the way, so that a crash in
native code leaves it behind. Knows nothing about any model: it hooks whatever modules there are. Imports torch.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ups.record.blackbox import BlackBox, Phase
from ups.spec.batch import Batch

_PLACE_BYTES = 1024
_FIELDS = ("state", "static", "target", "parameters", "dt")


class Place:
    """Where this rank is: kept in memory for itself, and in a file for who looks at it when it is gone."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
        self.values: dict[str, Any] = {"phase": "start", "module": "", "step": 0, "stage": 0}
        self.changed = time.monotonic()

    def at(self, **values: Any) -> None:
        """Change some of what is known, in memory and on disk."""
        self.values.update(values)
        self.changed = time.monotonic()
        text = json.dumps(self.values).encode()[: _PLACE_BYTES - 1]
        os.pwrite(self._file, text.ljust(_PLACE_BYTES - 1) + b"\n", 0)


class PlaceBox(BlackBox):
    """The black box of a rehearsal: what the engine says about its phases goes to the place as well."""

    place: Place | None = None

    def record(self, phase: Phase, *arguments: Any, **named: Any) -> None:
        super().record(phase, *arguments, **named)
        if self.place is not None:
            self.place.at(phase=phase.label, module="")

    @classmethod
    def of(cls, place: Place) -> PlaceBox:
        """A box that nobody but the place reads."""
        box = cls.unread()
        assert isinstance(box, PlaceBox)
        box.place = place
        return box


class Watch:
    """Hooks on all modules of a stage. The first bad number that is found is kept in `found`, and nothing after it."""

    def __init__(self, stage: nn.Module, units: Sequence[nn.Module], place: Place, *, inside_units: bool) -> None:
        """inside_units: whether to look into the shard units, too; not if they are compiled, which would be undone."""
        self.place = place
        self.found: dict[str, Any] = {}
        self._stack: list[str] = []
        self._names = {id(module): name for name, module in stage.named_modules()}
        self._units = [self._names[id(unit)] for unit in units if id(unit) in self._names]
        # gradient hooks that fired on the first bad tensor: (kind, module)
        self._bad_gradient: tuple[int, list[tuple[str, str]]] | None = None
        for name, module in stage.named_modules():
            if not inside_units and any(name.startswith(f"{unit}.") for unit in self._units):
                continue
            # Before other hooks, such as those that gather shards: what goes wrong in them is of this module.
            module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave, with_kwargs=True)

    def innermost(self) -> str | None:
        """The module that was entered last and not left, if any: after an exception, where it was raised."""
        return self._stack[-1] if self._stack else None

    def describe(self, name: str) -> dict[str, Any]:
        """A module with the shard unit and the network that it belongs to."""
        unit = next((u for u in self._units if name == u or name.startswith(f"{u}.")), None)
        parts = name.split(".")
        network = parts[2] if parts[:2] == ["stepper", "networks"] and len(parts) > 2 else None
        return {"module": name, "unit": unit, "network": network}

    def backward_culprit(self) -> dict[str, Any]:
        """The module in whose backward pass the first bad gradient was made; empty if there was none."""
        if self._bad_gradient is None:
            return {}
        _, hooks = self._bad_gradient
        consumers = [module for kind, module in hooks if kind == "input"]
        inner = [m for m in consumers if not any(o != m and o.startswith(f"{m}." if m else "") for o in consumers)]
        if inner:
            return {"pass": "backward", "others": inner[1:], **self.describe(inner[0])}
        producer = hooks[0][1]
        return {"pass": "backward", "after": producer, **self.describe(producer.rpartition(".")[0])}

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[id(module)]
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0:
            return  # recomputed in a backward pass, which has its own place
        self._stack.append(name)
        self.place.at(phase="forward", module=name)
        for tensor in tensors_of((args, kwargs)):
            self._follow(tensor, "input", name)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self._names[id(module)]
        if not self._stack or self._stack[-1] != name:
            return
        self._stack.pop()
        self.place.at(phase="forward", module=self._stack[-1] if self._stack else "")
        outputs = tensors_of(output)
        for tensor in outputs:
            self._follow(tensor, "output", name)
        if self.found or all_finite(outputs):
            return
        given = tensors_of((args, kwargs))
        own = [n for n, p in module.named_parameters(recurse=False) if not all_finite([p])]
        self.found = {
            "pass": "forward",
            "inputs_finite": all_finite(given),
            "largest_input": largest(given),
            "bad_parameters": own,
            "dtype": str(outputs[0].dtype).removeprefix("torch."),
            **self.describe(name),
        }

    def _follow(self, tensor: Tensor, kind: str, name: str) -> None:
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(self._gradient_hook(id(tensor), kind, name))  # type: ignore[no-untyped-call]

    def _gradient_hook(self, key: int, kind: str, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if kind == "output":
                self.place.at(phase="backward", module=name)
            bad = self._bad_gradient
            if bad is not None and bad[0] == key:
                bad[1].append((kind, name))
            elif bad is None and not all_finite([gradient]):
                self._bad_gradient = (key, [(kind, name)])

        return look


def tensors_of(values: Any) -> list[Tensor]:
    """All floating point tensors in arguments or results; a batch is looked into as well."""
    found: list[Tensor] = []
    for leaf in _pytree.tree_leaves(values):
        if isinstance(leaf, Batch):
            found += [*(getattr(leaf, name) for name in _FIELDS), *leaf.extra.values()]
        elif isinstance(leaf, Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dataclass_fields__"):
            found += [v for name in leaf.__dataclass_fields__ if isinstance(v := getattr(leaf, name, None), Tensor)]
    return [tensor for tensor in found if tensor.is_floating_point()]


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no value is NaN or infinite."""
    return all(bool(torch.isfinite(local(tensor)).all()) for tensor in tensors)


@torch.no_grad()
def largest(tensors: Iterable[Tensor]) -> float | None:
    """The largest magnitude among finite values."""
    sizes = [float(local(t).abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()) for t in tensors if t.numel()]
    return max(sizes, default=None)


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    from ups.distributed.strategies import local as part

    return part(tensor)
