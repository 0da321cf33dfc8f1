"""Arithmetic of a run by name: weights' type, batch type, and the autocast region of a forward pass."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

_WEIGHTS = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


def weight_dtype(precision: str) -> torch.dtype:
    """Type of weights, optimizer state and batches: bfloat16 runs keep float32 weights."""
    return _WEIGHTS[precision]


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The region in which a forward pass runs: bfloat16 for products, float32 where range matters."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
