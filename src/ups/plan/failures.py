"""Checkpoints and failures: how often to save, and what part of the time is then left for training.

Young (1974): save every sqrt(2 d M) seconds, for saves that cost d and failures every M seconds. Daly (2006): the
expected time of a run that saves so often and loses what came after the last save, with exponential failures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of one GPU: 419 unexpected interruptions of 16,384 H100 in 54 days ("The Llama 3 Herd of Models", 2024).
HOURS_BETWEEN_FAILURES = 16_384 * 54 * 24 / 419


@dataclass(frozen=True)
class Outlook:
    """interval_seconds of work between saves; effective: part of the time that is training that lasts."""

    failure_seconds: float
    interval_seconds: float
    effective: float


def outlook(
    num_devices: int, hours_between_failures: float, save_seconds: float, restart_seconds: float, interval: float = 0.0
) -> Outlook:
    """hours_between_failures: of one device. interval: seconds of work between saves; 0 takes Young's."""
    between = hours_between_failures * 3600 / num_devices
    interval = interval or young_interval(save_seconds, between)
    return Outlook(between, interval, effective_part(interval, save_seconds, restart_seconds, between))


def young_interval(save_seconds: float, failure_seconds: float) -> float:
    """Seconds of work between two saves that lose the least time."""
    return math.sqrt(2 * save_seconds * failure_seconds)


def effective_part(interval: float, save_seconds: float, restart_seconds: float, failure_seconds: float) -> float:
    """Part of the time that is work that lasts, by Daly's complete model."""
    exponent = (interval + save_seconds) / failure_seconds
    if exponent > 500:
        return 0.0
    expected = failure_seconds * math.exp(restart_seconds / failure_seconds) * math.expm1(exponent)
    return interval / expected
