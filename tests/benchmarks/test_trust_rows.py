"""What `benchmarks/model/trust.py` counts and judges; every bar can be missed."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.model import trust_rows as rows

Document = dict[str, Any]
DETECTORS = (rows.DOUBT, rows.DISTANCE, rows.AS_THEY_ARE, rows.RANGES, rows.NEAREST, rows.SECOND)


def rolled(errors: rows.Float64, stated: rows.Float64, **changes: Any) -> rows.Rolled:
    """Rollouts (N, L, M) of which nothing else is known."""
    count, leads, fields = errors.shape
    nothing = np.zeros(count)
    made = rows.Rolled(
        errors=errors,
        stated=stated,
        band=2 * stated,
        apart=errors,
        apart_stated=stated,
        difference=np.empty((count, leads, 0)),
        outside_at=np.zeros(count, np.int64),
        far_at=np.zeros(count, np.int64),
        distance=np.zeros(count),
        warned=np.zeros(count, np.bool_),
        beyond=nothing,
        numbers=nothing[:, None],
        parameters=nothing[:, None],
        size=np.ones((count, fields)),
        cells=np.ones((count, leads, fields, 5), np.float32),
    )
    return replace(made, **changes)


def drawn(count: int, seed: int, **changes: Any) -> rows.Rolled:
    """Log-normal errors whose scale is known half, and stated so that 90 % are inside."""
    draw = np.random.default_rng(seed)
    scale = np.exp(draw.normal(size=(count, 1, 1)))
    errors = scale * np.exp(0.5 * draw.normal(size=(count, 6, 2)))
    return rolled(errors, np.broadcast_to(scale * np.exp(0.5 * 1.2816), errors.shape), **changes)


def test_the_conformal_quantile_is_the_order_statistic_of_its_level() -> None:
    scores = np.random.default_rng(0).permutation(np.arange(1.0, 257.0))
    assert rows.conformal(scores) == 232  # ceil(257 * 0.9)
    assert rows.conformal(scores[:8, None]).tolist() == [math.inf]  # 8 trajectories cannot state 90 %
    assert np.isfinite(rows.conformal(scores[:9]))


def test_coverage_is_that_of_each_trajectory() -> None:
    errors = np.array([[[1.0, 1.0], [1.0, 3.0]], [[1.0, 1.0], [1.0, 1.0]]])
    held = rows.covered(rolled(errors, np.full_like(errors, 1.4)))
    assert held["each time"].tolist() == held["scalars"].tolist() == [0.75, 1.0]
    assert held["whole trajectory"].tolist() == [0.0, 1.0]  # 3 is beyond the band of 2.8


def test_thirds_are_cut_as_the_parameter_is_drawn_and_an_empty_one_covers_nothing() -> None:
    values = np.array([0.011, 0.02, 0.03, 0.045])
    held = {"each time": np.array([1.0, 0.0, 1.0, 0.5])}
    cut = rows.in_thirds(values, 0.01, 0.1, "log", held)
    assert cut == {"each time": [0.5, 0.75, 0.0]}  # cut at 0.0215 and 0.0464
    assert rows.in_thirds(values, 0.01, 0.1, "linear", held) == {"each time": [pytest.approx(2 / 3), 0.5, 0.0]}


def test_a_band_that_knows_the_scale_is_narrower_at_equal_coverage() -> None:
    usual, test = drawn(256, 0), drawn(256, 1)
    found = rows.width_rows(usual, test, [1, 1])
    assert found[rows.OURS]["equal"] < 0.7
    assert found[rows.OURS]["coverage"] == pytest.approx(0.9, abs=0.02)
    assert found["constant"]["equal"] == found["constant"]["width"] == pytest.approx(1)
    # A band that is only too narrow gains nothing.
    narrow = rows.width_rows(usual, replace(test, stated=test.stated / 5), [1, 1])[rows.OURS]
    assert narrow["width"] == pytest.approx(found[rows.OURS]["width"] / 5)
    assert narrow["equal"] == pytest.approx(found[rows.OURS]["equal"])


def test_a_second_model_that_differs_where_the_first_is_wrong_is_a_scale() -> None:
    usual, test = (drawn(256, seed) for seed in (0, 1))
    assert rows.SECOND not in rows.width_rows(usual, test, [1, 1])
    knows = [replace(one, difference=one.errors * 0.5) for one in (usual, test)]
    assert (
        rows.width_rows(*knows, [1, 1])[rows.SECOND]["equal"] < rows.width_rows(usual, test, [1, 1])[rows.OURS]["equal"]
    )


def test_a_band_for_each_cell_covers_cells_and_not_fields() -> None:
    draw = np.random.default_rng(0)
    usual, test = (
        drawn(256, seed, cells=np.abs(draw.normal(size=(256, 6, 3, 50))).astype(np.float32)) for seed in (0, 1)
    )
    row = rows.width_rows(usual, test, [1, 2])[rows.PER_CELL]  # a scalar and a vector
    assert row["cells"] == pytest.approx(0.9, abs=0.01)
    assert row["whole field"] == 0.0


def test_a_limit_for_other_scores_gives_the_false_alarms_of_the_distance() -> None:
    usual = np.arange(256.0)
    scores = np.array([[253.5, 254.0], [0.0, 254.5], [300.0, 0.0]])
    # p <= 0.01: at most one of 256 goes as far.
    assert rows.first_flag(usual, scores, 0.01).tolist() == [0, 2, 1]
    assert rows.first_flag(usual[:16], np.array([[15.0], [15.5]]), 1 / 17).tolist() == [0, 1]


def test_flags_of_all_detectors() -> None:
    usual = rolled(np.ones((99, 3, 1)), np.ones((99, 3, 1)), beyond=np.linspace(-1, 0, 99))
    usual = replace(usual, numbers=np.linspace(0, 1, 99)[:, None], difference=np.ones((99, 3, 1)))
    shifted = rolled(
        np.ones((2, 5, 1)), np.ones((2, 5, 1)), beyond=np.array([-0.5, 0.5]), numbers=np.array([[0.5], [9]])
    )
    difference = np.ones((2, 5, 1))
    difference[1, 3:] = 7.0  # later than calibrated
    shifted = replace(
        shifted,
        difference=difference,
        outside_at=np.array([0, 2]),
        far_at=np.array([0, 3]),
        warned=np.array([False, True]),
    )
    train = np.linspace(0, 1, 50)[:, None]
    found = {name: at.tolist() for name, at in rows.flags(usual, shifted, train, 0.01).items()}
    ours = {rows.DOUBT: [0, 2], rows.DISTANCE: [0, 3], rows.AS_THEY_ARE: [0, 1]}
    assert found == ours | {rows.RANGES: [0, 1], rows.NEAREST: [0, 1], rows.SECOND: [0, 4]}


def test_harm_is_twice_what_is_stated_and_later_steps_are_held_to_the_last_statement() -> None:
    errors = np.ones((4, 4, 1))
    errors[1, 1], errors[2, 3], errors[3, 2] = 2.5, 2.5, math.inf
    stated = np.ones((4, 4, 1))
    stated[:, 2:] = np.nan
    at, why = rows.harm(rolled(errors, stated), np.zeros(4))
    assert at.tolist() == [0, 2, 4, 3]
    assert why == {"late": 2, "unsure": 0}
    assert (
        rows.harm(rolled(errors, stated), np.full(4, 0.6))[1]["unsure"] == 2
    )  # 2.5 less 0.6 is below 2; infinity is not


def test_counts_of_shifted_trajectories() -> None:
    errors = np.ones((4, 4, 2))
    errors[0, 2:], errors[1, 1:], errors[2, 1, 0] = 9.0, 9.0, 1.5
    flagged = {rows.DOUBT: np.array([3, 3, 0, 1]), rows.RANGES: np.array([0, 1, 1, 0])}
    counts = rows.tally(rolled(errors, np.ones_like(errors)), flagged, np.zeros(4))
    assert counts["samples"] == 4
    assert counts["harmful"] == 2
    assert counts["flagged"] == {rows.DOUBT: 2, rows.RANGES: 1}
    assert counts["in_time"] == {rows.DOUBT: 1, rows.RANGES: 1}  # one is flagged a step too late
    assert counts["flagged_others"] == {rows.DOUBT: 1, rows.RANGES: 1}
    # Two steps each before a doubt, all of the third, none of the last; of two fields one is outside at one step.
    assert counts["steps"] == 16
    assert counts["answered"] == 8
    assert counts["inside"] == 2 + 1 + 3.5


def document(task: str) -> Document:
    """All that is asked, reached."""
    counts = {"samples": 20, "harmful": 10, "late": 0, "unsure": 1, "steps": 100, "answered": 50, "inside": 45.0}
    shift = counts | {
        "flagged": dict.fromkeys(DETECTORS, 9) | dict.fromkeys(DETECTORS[3:], 5),
        "in_time": dict.fromkeys(DETECTORS, 8),
        "flagged_others": dict.fromkeys(DETECTORS, 2),
    }
    width = {"coverage": 0.9, "width": 0.7, "equal": 0.7}
    return {
        "task": task,
        "trajectories": {"calibration": 256, "test": 256},
        "cpu_seconds": {"scale": 3.0, "calibration": 4.0},
        "coverage": dict.fromkeys(rows.STATEMENTS, 0.9),
        "thirds": {"nu": {name: [0.9, 0.85, 0.95] for name in rows.STATEMENTS}},
        "widths": {rows.OURS: width, rows.PER_CELL: width | {"cells": 0.9, "whole field": 0.0}},
        "alarms": dict.fromkeys(DETECTORS, 3),
        "shifts": {"box": shift, "moved (benign)": copy.deepcopy(shift)},
        "steps": {"1 sample": 1.2, "16 samples": 1.1},
        "weights": {"error model": 100, "network": 10000},
    }


def test_what_reaches_all_bars_passes() -> None:
    documents = [document("burgers1d"), document("ks1d")]
    judged = rows.bars(documents, 600.0)
    assert [bar.name for bar in judged if not bar.passed] == []
    text = rows.page(documents, judged)
    assert "**no**" not in text
    lines = [line.count("|") for line in text.splitlines() if line]
    assert min(lines) >= 5  # tables and nothing else
    assert "| moved (benign) | 40 | 20 |" in text
    assert "| all but benign ones | 40 | 20 |" in text


def put(*keys: str, value: Any) -> Callable[[Document], None]:
    def change(one: Document) -> None:
        for key in keys[:-1]:
            one = one[key]
        one[keys[-1]] = value

    return change


MISSED: dict[str, Callable[[Document], None]] = {
    **{f"{s}: coverage, mean": put("coverage", s, value=0.83) for s in rows.STATEMENTS},
    **{f"{s}: coverage, lowest task": put("coverage", s, value=0.81) for s in rows.STATEMENTS},
    **{f"{s}: coverage, highest task": put("coverage", s, value=0.98) for s in rows.STATEMENTS},
    **{f"{s}: thirds with 0.8": put("thirds", "nu", s, value=[0.79, 0.9, 0.9]) for s in rows.STATEMENTS},
    **{f"{s}: lowest third": put("thirds", "nu", s, value=[0.71, 0.9, 0.9]) for s in rows.STATEMENTS},
    "width, at equal coverage": put("widths", rows.OURS, "equal", value=0.95),
    "false alarms, all tasks": put("alarms", rows.DOUBT, value=6),
    "false alarms, worst task": put("alarms", rows.DOUBT, value=7),
    "harmful shifts flagged": put("shifts", "box", "flagged", rows.DOUBT, value=8),
    "flagged in time": put("shifts", "box", "in_time", rows.DOUBT, value=7),
    "coverage before a doubt": put("shifts", "box", "inside", value=39.0),
    **{f"flagged more than by: {n}": put("shifts", "box", "flagged", n, value=13) for n in DETECTORS[3:]},
    "time of a step, worst": put("steps", "1 sample", value=1.31),
    "weights added": put("weights", "error model", value=1000),
    "CPU time of calibration, of training": put("cpu_seconds", "calibration", value=27.0),
}


@pytest.mark.parametrize("name", MISSED)
def test_each_bar_can_be_missed(name: str) -> None:
    documents = [document("burgers1d"), document("ks1d")]
    MISSED[name](documents[1])
    missed = {bar.name for bar in rows.bars(documents, 600.0) if not bar.passed}
    assert name in missed


def test_there_is_no_bar_that_no_test_misses() -> None:
    assert {bar.name for bar in rows.bars([document("burgers1d")], 600.0)} == set(MISSED)


def test_benign_kinds_are_judged_by_nothing_and_no_harm_shows_nothing() -> None:
    one = document("burgers1d")
    one["shifts"]["moved (benign)"]["flagged"] = dict.fromkeys(DETECTORS, 0)
    assert all(bar.passed for bar in rows.bars([one], 600.0))
    one["shifts"]["box"] |= {"harmful": 0, "flagged": dict.fromkeys(DETECTORS, 0)}
    missed = {bar.name for bar in rows.bars([one], 600.0) if not bar.passed}
    assert {"harmful shifts flagged", "flagged in time"} <= missed
