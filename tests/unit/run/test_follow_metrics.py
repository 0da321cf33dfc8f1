"""The live line shows stage, step, loss, rate and time left, from the outside."""

from __future__ import annotations

import io
import json
import os
import time
from pathlib import Path

import pytest

from ups.run.progress_line import MetricsFollower, ProgressLine, describe, read_rows

ROW = {"stage": 1, "stage_step": 30, "stage_steps": 90, "loss": 0.12345, "steps_per_second": 2.0, "skipped": 0}


def test_a_row_becomes_a_line_for_a_person() -> None:
    assert describe(ROW, ["autoencode", "operator"]) == (
        "stage 2/2 operator  step 30/90  loss 0.1235  2 steps/s  left 30 s"
    )
    early = ROW | {"stage_steps": 0, "steps_per_second": 0.0, "loss": None, "skipped": 3}
    assert describe(early, ["a", "operator"]) == "stage 2/2 operator  step 30/?  0 steps/s  skipped 3"


def test_validation_is_shown_and_other_rows_are_not() -> None:
    assert describe({"step": 9, "valid/a/nrmse": 0.0123}, ["x"]) == "valid step 9  a/nrmse 0.0123"
    assert describe({"step": 9, "time": 1.0}, ["x"]) == ""


@pytest.mark.parametrize(
    ("ours", "better_on", "words"),
    [
        (0.2, 8, ""),
        (0.2, 6, ", better on 6 of 8 trajectories, not significant"),
        (0.2, 4, ", better on 4 of 8 trajectories, not significant"),
        (1.2, 1, ", not better"),
    ],
)
def test_validation_stands_next_to_its_best_reference(ours: float, better_on: int, words: str) -> None:
    row = {"one_step": ours, "persistence": 1.5, "training_mean": 1.0, "better_on": better_on, "trajectories": 8}
    line = describe({"step": 9, **{f"valid/a/{name}": value for name, value in row.items()}}, ["x"])
    assert line == f"valid step 9  a one_step {ours} (training mean 1{words})"


def test_the_score_of_an_ensemble_is_no_reference() -> None:
    row = {"one_step": 0.2, "crps": 0.1, "persistence": 1.5, "better_on": 8, "trajectories": 8}
    line = describe({"step": 9, **{f"valid/a/{name}": value for name, value in row.items()}}, ["x"])
    assert line == "valid step 9  a one_step 0.2 (persistence 1.5), crps 0.1"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def wait_for(stream: io.StringIO, text: str) -> None:
    deadline = time.monotonic() + 10
    while text not in stream.getvalue():
        assert time.monotonic() < deadline, stream.getvalue()
        time.sleep(0.02)


def test_new_rows_are_followed_and_old_ones_left_alone(tmp_path: Path) -> None:
    path, stream = tmp_path / "metrics.jsonl", io.StringIO()
    path.write_text(json.dumps(ROW | {"stage_step": 10}) + "\n")
    with ProgressLine(stream) as line, MetricsFollower(path, ["a", "b"], line), path.open("a") as file:
        file.write(json.dumps(ROW | {"stage_step": 20})[:20])
        file.flush()
        time.sleep(0.4)
        file.write(json.dumps(ROW | {"stage_step": 20})[20:] + "\nhalf a line\n")
        file.flush()
        wait_for(stream, "step 20/90")
    assert "step 10/90" not in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_a_terminal_gets_one_line_that_is_rewritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, stream = tmp_path / "metrics.jsonl", Terminal()
    with ProgressLine(stream) as line, MetricsFollower(path, ["a", "b"], line) as rows:
        for step in (20, 30):
            with path.open("a") as file:
                file.write(json.dumps(ROW | {"stage_step": step}) + "\n")
            wait_for(stream, f"step {step}/90")
        with path.open("a") as file:
            file.write(json.dumps({"step": 30, "valid/a/nrmse": 0.5}) + "\n")
        rows.say("VERDICT")
        assert "valid step 30  a/nrmse 0.5\n" in stream.getvalue(), "what was written before is shown before"
    assert capsys.readouterr().out == "VERDICT\n"
    assert stream.getvalue().count("\r\x1b[K") == 3


def test_lines_that_are_no_rows_hide_no_others(tmp_path: Path) -> None:
    lines = ["[" * 100_000, '{"a":' * 100_000, "9" * 10_000, '{"half', "[1]", json.dumps(ROW)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert read_rows(tmp_path) == [ROW]


def test_a_pipe_in_place_of_the_metrics_is_no_row_and_no_wait(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    assert read_rows(tmp_path) == []
