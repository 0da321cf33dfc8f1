"""`recipes/full_stack.yaml` from its data to one bundle, with fewer trajectories and steps than it has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.environments import ROOT
from ups.run.trained import load_trained

STEPS = {"operator": 500, "corrector": 300, "distill": 150, "steady": 150}


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(1500)
def test_each_stage_lowers_its_figure_and_the_card_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("exponax")
    monkeypatch.chdir(tmp_path)  # the recipe names its data by paths from here

    def ups(*arguments: str) -> None:
        command = [sys.executable, "-m", "ups", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"

    ups("data", "generate", "ks1d", "darcy2d", "--trajectories", "128,16,8")
    # Steps and not seconds: on a busy machine they teach the same.
    settings = [
        word
        for number, steps in enumerate(STEPS.values())
        for word in ("--set", f"stages.{number}.budget_seconds=null", "--set", f"stages.{number}.steps={steps}")
    ]
    ups(
        "train",
        str(ROOT / "recipes" / "full_stack.yaml"),
        "--ranks",
        "2",
        "--set",
        "evaluate.max_trajectories=4",
        *settings,
    )
    trained = load_trained(str(tmp_path / "runs" / "full_stack" / "bundle"))
    rows = {(row["stage"], row["against"]): row for row in trained.stages}
    assert [stage for stage, _ in rows] == ["operator", "corrector (flow)", "distill", "distill", "steady"]
    # A student has one evaluation where its teacher has seven: it need not be better.
    assert not [row for (_, against), row in rows.items() if against != "its teacher" and row["after"] >= row["before"]]
    card = (tmp_path / "runs" / "full_stack" / "bundle" / "card.md").read_text()
    assert "What each stage brought" in card
    assert "When the corrector acts" in card
