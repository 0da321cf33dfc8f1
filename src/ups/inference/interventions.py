"""What a gated rollout says about itself in its result: where the corrector acted, and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from ups.inference.layout import Added
from ups.models.gate import REASONS, Gated, reason_words

DIMENSION = "intervention"


def said(gated: Gated) -> Added:
    """Variables along `intervention`, none if there was none, and the attributes `interventions` (words) and
    `intervention_rate` (part of the steps of all trajectories)."""
    found, members = gated.interventions, gated.members or 1
    rate = gated.rate(gated.num_rows)
    total = gated.num_rows * gated.num_steps
    why = Counter(reason_words(one.reasons) for one in found)
    words = ", ".join(f"{count} by {reason}" for reason, count in sorted(why.items()))
    text = f"the corrector acted in {len(found)} of {total} steps ({rate:.1%})" + (f": {words}" if words else "")
    attributes = {"interventions": text, "intervention_rate": rate}
    if not found:
        return Added({}, attributes)
    columns = {
        "sample": [one.row // members for one in found],
        "step": [one.step for one in found],
        "reason": [one.reasons for one in found],
    }
    if gated.members is not None:
        columns["member"] = [one.row % members for one in found]
    meaning: dict[str, Any] = {
        "flag_masks": [1 << bit for bit in range(len(REASONS))],
        "flag_meanings": " ".join(REASONS),
    }
    variables: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]] = {
        f"{DIMENSION}_{name}": ((DIMENSION,), np.asarray(values, np.int32), meaning if name == "reason" else {})
        for name, values in columns.items()
    }
    return Added(variables, attributes)
