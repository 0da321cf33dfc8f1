"""The settings of the model `ring`. Imported whenever a recipe is read, so it imports no torch."""

from __future__ import annotations

from typing import Literal

from ups.config.model import ModelConfig
from ups.config.setting import setting


class RingConfig(ModelConfig):
    """Convolutions around a periodic line, for one task."""

    can_conserve = True
    dims = frozenset({1})

    type: Literal["ring"] = setting("ring", "Which model to build.")
    width: int = setting(16, "Hidden channels.", unit="channels", ge=1, le=1024)
    depth: int = setting(2, "Convolutions.", unit="layers", ge=1, le=64)
    conserve: bool = setting(True, "Keep the integral of conserved fields exactly as it is, step by step.")
