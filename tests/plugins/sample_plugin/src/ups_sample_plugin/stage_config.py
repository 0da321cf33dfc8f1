"""The settings of the stage `outliers`. Imported whenever a recipe is read, so it imports no torch."""

from __future__ import annotations

from typing import Literal

from ups.config.setting import setting
from ups.config.stage import OperatorStageConfig


class OutlierStageConfig(OperatorStageConfig):
    """The operator stage, with the worst samples counted more."""

    type: Literal["outliers"] = setting("outliers", "Which stage this is.")
    power: float = setting(2.0, "Power of a sample's error in the loss; 1 is the plain mean.", ge=1, le=8)
