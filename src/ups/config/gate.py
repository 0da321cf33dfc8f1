"""The gate of a recipe: what the scores of a run must reach before it counts as good. Judged by `ups.run.gate`."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import field_validator, model_validator

from ups.config.setting import REQUIRED, Section, setting
from ups.registry import METRICS

MEANS = ("rmse", "nrmse", "vrmse", "trmse")
COST = "step_milliseconds"
DRIFT = "drift"
# What a summary of scores has without the registered metrics (`ups.evaluation.accumulate`, `ups.evaluation.results`).
SCORES = (
    *MEANS,
    *(f"{name}_median" for name in MEANS),
    "one_step_trmse",
    "one_step_nrmse",
    "one_step_vrmse",
    "crmse",
    "frmse_low",
    "frmse_mid",
    "frmse_high",
    "max_error",
    "correlation_time",
    "num_blown_up",
    "num_diverged",
)
BEST = "best"


def known_metrics() -> tuple[str, ...]:
    """Every name that a condition may have: scores, registered metrics, drift of what is conserved, cost."""
    return tuple(dict.fromkeys((*SCORES, *METRICS.names(), DRIFT, COST)))


class GateCondition(Section):
    """One condition: a metric of the model on held-out data, and its limit."""

    metric: str = setting(
        REQUIRED,
        "Score of the model on the test split, such as one_step_trmse; drift: of conserved integrals, at its worst "
        "step; step_milliseconds: CPU time of a rollout step of one trajectory.",
    )
    at_most: float | None = setting(None, "The condition holds up to this value.")
    at_least: float | None = setting(None, "The condition holds from this value on.")
    relative_to: Literal["persistence", "training mean", "linear extrapolation", "best"] | None = setting(
        None, "Limits count times the same score of this reference; best: of those that learned nothing."
    )
    tasks: list[str] | None = setting(
        None, "Tasks that it holds for; default every task that has such a score.", min_length=1, max_length=1000
    )

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, value: str) -> str:
        if value not in known_metrics():
            raise ValueError(f"there is no metric of this name; known here: {', '.join(known_metrics())}")
        return value

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("a condition has one limit: at_most or at_least")
        if self.relative_to is not None and self.metric in (DRIFT, COST):
            raise ValueError(f"{self.metric} is not compared with references: leave relative_to out")
        return self

    def words(self) -> str:
        """The condition as a person says it: 'one_step_trmse at most 0.5 times persistence'."""
        limit = f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"
        other = {None: "", BEST: " times the best reference"}.get(self.relative_to, f" times {self.relative_to}")
        return f"{self.metric} {limit}{other}"
