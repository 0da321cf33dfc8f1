"""Charts of a benchmark are PNG files of what is there; what blew up or is missing does not stop them."""

from __future__ import annotations

import math

import pytest

from benchmarks.protocol.page import markdown
from benchmarks.protocol.recipes import KEPT, REFERENCE, row
from ups.solvers.tasks import BENCH_TASKS

pytest.importorskip("matplotlib")

from benchmarks.protocol.charts import cost_chart, cost_chart_by_task, ratio_chart, tasks_and_models

PNG = b"\x89PNG\r\n\x1a\n"


def scored(model, task, value, seed=0, **more):
    trained = {} if model == REFERENCE else {"seed": seed, "rollout_ms": 2.0, "steps": 1, "cpu_seconds": 1.0}
    return row(model, task, dict.fromkeys(KEPT, value), **trained | more)


def full(tasks=BENCH_TASKS):
    rows = [scored(REFERENCE, task, 0.5) for task in tasks]
    for model, value in (("fno", 0.1), ("unet", 0.2), ("fno+", 0.08), ("unet+", 0.1), ("ups-alone", 0.05)):
        rows += [scored(model, task, value) for task in tasks]
    return rows + [scored("ups", t, v, seed) for t in tasks for seed, v in enumerate((0.05, 0.04, 0.07))]


def test_every_chart_is_drawn_for_a_whole_result():
    for chart in (ratio_chart, cost_chart, cost_chart_by_task):
        assert chart(full())[:8] == PNG


def test_what_blew_up_and_what_is_missing_leaves_a_gap():
    rows = [r for r in full(("ks1d", "ns2d")) if (r["model"], r["task"]) != ("unet+", "ks1d")]
    rows += [scored("ups", "ks1d", math.inf, seed) for seed in (3, 4, 5, 6)]
    for chart in (ratio_chart, cost_chart, cost_chart_by_task):
        assert chart(rows)[:8] == PNG


def test_there_is_no_chart_of_nothing():
    alone = [scored("ups", "ks1d", 0.1)]
    assert ratio_chart(alone) is None
    assert cost_chart([scored(REFERENCE, "ks1d", 0.1)]) is None
    assert cost_chart_by_task([scored(REFERENCE, "ks1d", 0.1)]) is None
    assert tasks_and_models(full())[1] == ["fno", "unet", "fno+", "unet+", "ups-alone", "ups"]


def test_the_page_shows_the_pictures_that_it_is_given():
    document = {
        "protocol": "ups-bench v1",
        "command": "ups bench",
        "cpu_seconds_per_task": 240.0,
        "machine": {"cpu": "one"},
        "data": {"ks1d": "0123456789abcdef0123"},
        "failures": [],
        "rows": [scored(REFERENCE, "ks1d", 0.1)],
    }
    assert "![Ratios](pictures/ratios.png)" in markdown(document, {"Ratios": "pictures/ratios.png"})
    assert "![" not in markdown(document)
