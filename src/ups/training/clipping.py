"""How long a gradient may be: an absolute limit, and one relative to the norms of the updates before.

A relative limit cuts outliers alone, whatever the size of the gradients of a stage is.
"""

from __future__ import annotations

from ups.config.stage import OptimConfig
from ups.training.progress import Progress

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
