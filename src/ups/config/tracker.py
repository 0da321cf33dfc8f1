"""The settings of a tracker. None comes with this package: metrics.jsonl is always written, and needs no setting."""

from __future__ import annotations

from ups.config.part import PartSection
from ups.config.setting import REQUIRED, setting
from ups.registry import TRACKERS


class TrackerConfig(PartSection):
    """Base of the settings of a tracker."""

    registry = TRACKERS

    type: str = setting(REQUIRED, "Which tracker this is.")
