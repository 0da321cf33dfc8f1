"""The scorer of the fault benchmark judges recorded logs by its rules; planted wrong verdicts are caught."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.stacks import page, score
from benchmarks.stacks.stacks import STACKS
from tests.support.checkout import ROOT

EXPECTED = json.loads((ROOT / "benchmarks/stacks/expected.json").read_text())
FREE = "a" * 64
# Of recorded runs, cut to what is judged.
TORCHRUN = (
    "E1119 4 elastic/multiprocessing/api.py:1002] failed (exitcode: {code}) local_rank: {rank} (pid: 31) of python"
)
UPS = (
    "FAILED rank={rank}/2 step=18 phase=forward host=n1 cause={cause} at=- ckpt=15 lost=2 action=restart 1/3 log=a.err"
)


def cell(
    folder: Path,
    stack: str,
    fault: str,
    output: list[str],
    *,
    code: int | None = 0,
    restarts: int = 1,
    steps: int = 40,
    weights: str = FREE,
    finite: bool = True,
    left: tuple[str, ...] = (),
    frozen: float = 0.0,
    started: float = 50.0,
    again: int | None = None,
) -> dict[str, Any]:
    """Write what a cell leaves, and score it. The fault was at time 100; `output` came a second later."""
    folder.mkdir(exist_ok=True)
    facts = {
        "fault": fault,
        "name": f"{stack}.{fault}.0",
        "timeout": 60.0,
        "load": [1.0],
        "load_end": [1.0],
        "exit_code": code,
        "started": started,
        "ended": 150.0,
        "acted": 100.0,
        "frozen": frozen,
        "left_over": None if code is None else [{"pid": 9, "state": "S", "command": name} for name in left],
    } | ({} if again is None else {"again_exit_code": again})
    (folder / "cell.json").write_text(json.dumps(facts))
    (folder / "output.log").write_text("".join(f"101.0 {line}\n" for line in output))
    for rank in (0, 1):
        notes = [{"time": 90.0 + n / 10, "pid": 31 + rank, "samples": 8} for n in range(17)]
        notes += [
            {"time": 120.0 + n / 10, "pid": 41 + rank if restarts else 31 + rank, "samples": 8}
            for n in range(steps - 15)
        ]
        (folder / f"progress_{rank}.jsonl").write_text("".join(json.dumps(note) + "\n" for note in notes))
    if code == 0 or again == 0:
        (folder / "final.jsonl").write_text(json.dumps({"time": 149.0, "sha256": weights, "finite": finite}) + "\n")
    return score.score(folder, STACKS[stack], EXPECTED, FREE)


def test_a_death_that_is_named_and_survived_is_right(tmp_path: Path) -> None:
    row = cell(tmp_path, "torchrun", "kill", [TORCHRUN.format(code=-9, rank=1)])
    assert (row["right"], row["rank"], row["cause"], row["lost_steps"]) == (True, "right", True, 2)
    assert row["detected_seconds"] == 1.0
    row = cell(tmp_path, "ups", "stop", [UPS.format(rank=1, cause="stopped(SIGSTOP)")])
    assert row["right"]


@pytest.mark.parametrize(
    ("fault", "output", "options", "wrong"),
    [
        ("kill", [TORCHRUN.format(code=1, rank=0), TORCHRUN.format(code=-9, rank=1)], {}, {"rank": "wrong"}),
        ("kill", ["[default1]:Traceback of rank 1, SIGKILL"], {}, {"rank": "none", "cause": False}),
        ("stop", [TORCHRUN.format(code=-9, rank=1)], {}, {"cause": False}),
        ("kill", [TORCHRUN.format(code=-9, rank=1)], {"weights": "b" * 64}, {"false_success": True}),
        ("early_exit", [TORCHRUN.format(code=0, rank=1)], {"steps": 22}, {"false_success": True, "continues": False}),
        (
            "kill",
            [TORCHRUN.format(code=-9, rank=1)],
            {"left": ("python train.py",)},
            {"left_behind": ["python train.py"]},
        ),
        ("nan", [], {"restarts": 0, "finite": False}, {"false_success": True, "rank": "none"}),
        ("full_disk", ["OSError: No space left on device"], {}, {"false_success": True, "cause": True}),
        ("deadlock", [], {"code": None}, {"does_not_end": True, "ending": False}),
        ("launcher", [], {"code": -9, "again": 1}, {"continues": False, "ending": False}),
        ("slow", ["SLOW rank 1"], {"restarts": 1}, {"ending": False}),
    ],
)
def test_what_is_wrong_is_caught(
    tmp_path: Path, fault: str, output: list[str], options: dict[str, Any], wrong: dict[str, Any]
) -> None:
    row = cell(tmp_path, "torchrun", fault, output, **options)
    assert not row["right"]
    assert {name: row[name] for name in wrong} == wrong


def test_an_error_that_lists_both_ranks_names_none_first(tmp_path: Path) -> None:
    error = ["[Rank 0 Error Snippet]:", "RuntimeError: Connection closed by peer", "[Rank 1 Error Snippet]:", "planted"]
    assert cell(tmp_path, "ray", "raise", error)["rank"] == "listed"
    assert cell(tmp_path, "ray", "raise", error[2:])["rank"] == "right"


def test_a_cell_on_a_machine_without_time_for_it_is_played_again(tmp_path: Path) -> None:
    assert "too busy" in cell(tmp_path, "ups", "kill", [], started=-10.0)["not_scored"]
    assert not score.is_finished(tmp_path)
    assert cell(tmp_path, "ups", "kill", [], frozen=30.0)["not_scored"] == "frozen for 30.0 s"


def test_every_fault_and_every_cell_is_on_the_page(tmp_path: Path) -> None:
    good = cell(tmp_path, "ups", "kill", [UPS.format(rank=1, cause="killed(SIGKILL)")])
    bad = cell(tmp_path, "ups", "nan", [], restarts=0, finite=False)
    stack = {"stack": "ups", "title": "ups", "settings": "", "variables": {}, "cells": [good, bad]}
    prose = {"head": [], "marks": [], "tail": [], "stacks": {"ups": "words"}}
    text = page.lines([stack], EXPECTED["faults"], prose)
    assert "| rank killed (SIGKILL) | right |" in text
    assert "| NaN on one rank | **false success**, wrong rank |" not in text
    assert "| NaN on one rank | **false success** |" in text
    assert "| **right, of those played** | 1 of 2 |" in text
    assert sum("| not played" in line for line in text) == len(EXPECTED["faults"]) - 2
