"""The rows of docs/benchmark.md, which are in the repository, are of the recipes of today: none is trained again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from benchmarks.protocol.recipes import CPU_SECONDS, MODELS, entries
from benchmarks.protocol.step_cost import with_steps
from benchmarks.protocol.trainings import Bench, costs_key
from tests.support.checkout import ROOT
from ups.solvers.tasks import BENCH_TASKS

STORED = ROOT / "benchmarks" / "results"


def test_every_stored_row_is_used_again() -> None:
    costs = json.loads((STORED / "costs.json").read_text())
    bench = Bench(list(MODELS), list(BENCH_TASKS), Path("data"), STORED, cpu_seconds=CPU_SECONDS, small=False)
    wanted = entries(list(MODELS), list(BENCH_TASKS), "../data")
    assert len(wanted) == len(list(STORED.glob("results/*.json")))
    for entry in wanted:
        stored = json.loads((STORED / "results" / f"{entry.name}.json").read_text())
        stages = costs["costs"][costs_key(entry)]["stages"]
        trained = replace(entry, recipe=with_steps(entry.recipe, stages, costs["yardstick_seconds"]))
        rows = bench.kept_rows(trained, stored["data"])
        assert rows is not None, entry.name
        assert [row["task"] for row in rows] == list(entry.tasks)
