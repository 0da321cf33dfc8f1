"""What is compared: scenarios of APEBench, what its protocol fixes, and its own networks of similar size.

Standard library only: `generate.py` and `networks.py` import this in an environment that has neither torch nor ups.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

APEBENCH = "0.1.1"

# What a scenario of APEBench fixes for every network, and so what no network here may change.
TRAIN_TRAJECTORIES, TRAIN_FRAMES = 50, 51
TEST_TRAJECTORIES, TEST_FRAMES = 30, 201
POINTS = 160
UPDATES, BATCH = 10_000, 20
OPTIMIZER = "adam;10_000;warmup_cosine;0.0;1e-3;2_000"
PEAK_RATE, WARMUP_UPDATES = 1e-3, 2_000
# Steps of a rollout that the published score is made of.
SCORED_STEPS = 100
# For choices: drawn as the test set is, by another seed; APEBench itself has none.
VALID_TRAJECTORIES, VALID_FRAMES, VALID_SEED = 10, 101, 1000

# Attributes of a scenario that say which equation it is.
COEFFICIENTS = ("gammas", "deltas", "convection_delta")


@dataclass(frozen=True)
class Scenario:
    """One problem of APEBench in 1D, by its difficulties.

    key, kwargs: what `apebench.scenarios.scenario_dict` is asked for. coefficients: what must come out, so that data of
    another version are noticed. conserved: whether the mean stays as it is. seeds: how many trainings are asked for.
    """

    title: str
    key: str
    equation: str
    coefficients: Mapping[str, Any]
    kwargs: Mapping[str, float] = field(default_factory=dict)
    conserved: bool = True
    seeds: int = 3


SCENARIOS = {
    "ks": Scenario(
        "Kuramoto-Sivashinsky",
        "diff_ks",
        "u_t + (u_x)^2 / 2 + u_xx + u_xxxx = 0, with the mean of (u_x)^2 taken out",
        {"gammas": [0.0, 0.0, -1.2, 0.0, -15.0], "deltas": [0.0, 0.0, -6.0]},
        seeds=10,
    ),
    "kdv": Scenario(
        "Korteweg-de Vries",
        "diff_kdv",
        "u_t + u u_x + u_xxx = -u_xxxx",
        {"gammas": [0.0, 0.0, 0.0, -14.0, -9.0], "deltas": [0.0, -2.0, 0.0]},
        seeds=10,
    ),
    "burgers": Scenario(
        "Burgers",
        "diff_burgers",
        "u_t + u u_x = u_xx",
        {"gammas": [0.0, 0.0, 1.5, 0.0, 0.0], "convection_delta": -1.5},
    ),
    "ks_cons": Scenario(
        "Kuramoto-Sivashinsky, conservative",
        "diff_ks_cons",
        "u_t + u u_x + u_xx + u_xxxx = 0",
        {"gammas": [0.0, 0.0, -2.0, 0.0, -18.0], "convection_delta": -1.0},
    ),
    "fisher": Scenario(
        "Fisher-KPP",
        "diff_fisher",
        "u_t = u_xx + u (1 - u)",
        {"gammas": [0.02, 0.0, 0.2], "deltas": [-0.02, 0.0, 0.0]},
        conserved=False,
    ),
    "disp": Scenario(
        "dispersion (linear)",
        "diff_disp",
        "u_t = u_xxx",
        {"gammas": [0.0, 0.0, 0.0, 4.0, 0.0]},
    ),
}

# Networks of the paper in 1D, as APEBench names them, and their parameters for one channel.
NETWORKS = {
    "Conv": ("Conv;34;10;relu", 31_757),
    "Res": ("Res;26;8;relu", 32_943),
    "UNet": ("UNet;12;2;relu", 27_193),
    "Dil": ("Dil;2;32;2;relu", 31_777),
    "FNO": ("FNO;12;18;4;gelu", 32_527),
}


def same_coefficients(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two scenarios are one equation: the same numbers under the same names."""

    def plain(coefficients: Mapping[str, Any]) -> dict[str, list[float]]:
        return {
            name: [float(v) for v in (value if isinstance(value, list | tuple) else [value])]
            for name, value in coefficients.items()
        }

    return plain(first) == plain(second)
