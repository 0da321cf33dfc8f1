"""Scores that others have published for these scenarios, with the coefficients that they are of.

A figure is shown next to ours only if its coefficients are those of the data here (`comparable`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.apebench.scenarios import SCENARIOS, same_coefficients

SOURCE = "per-seed rows published with arXiv 2411.00180, task `predict`, training `one`"
# Of the defaults that these rows were made with: in the history of github.com/tum-pbs/apebench.
EVIDENCE = (
    "the configuration of the study, read in a public copy, names none, so they are APEBench's defaults. Those of "
    "these scenarios are the same from its commit 2372b98 (May 2024, before the paper) to 0.1.1."
)


@dataclass(frozen=True)
class Published:
    """Scores of one scenario by network: geometric mean of the mean nRMSE over the first 100 steps."""

    coefficients: Mapping[str, Any]
    scores: Mapping[str, float]


PUBLISHED = {
    "ks": Published(
        {"gammas": [0.0, 0.0, -1.2, 0.0, -15.0], "deltas": [0.0, 0.0, -6.0]},
        {"Conv": 0.313, "Res": 0.229, "UNet": 0.421, "Dil": 0.279, "FNO": 1.03},
    ),
    "kdv": Published(
        {"gammas": [0.0, 0.0, 0.0, -14.0, -9.0], "deltas": [0.0, -2.0, 0.0]},
        {"Conv": 0.140, "Res": 0.884, "UNet": 0.084, "Dil": 0.066, "FNO": 0.227},
    ),
    # Of the paper's version: 0.1.1 generates hyper-diffusion -18, so that a figure of those data may not be shown here.
    "ks_cons": Published({"gammas": [0.0, 0.0, -2.0, 0.0, -15.0], "convection_delta": -1.0}, {}),
}


def comparable(scenario: str, coefficients: Mapping[str, Any] | None = None) -> Mapping[str, float]:
    """The published scores of a scenario; none if they are of another equation. coefficients: of the data at hand."""
    found = PUBLISHED.get(scenario)
    given = SCENARIOS[scenario].coefficients if coefficients is None else coefficients
    return found.scores if found is not None and same_coefficients(found.coefficients, given) else {}
