"""The local record is always whole, and a row keeps its number."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ups.tracking.metrics_file import MetricsWriter, all_rows, new_rows, numbers_of


def rows(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{") and line.endswith("}")]


def test_rows_are_json_lines_and_nan_is_null(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.log({"step": 1, "loss": float("nan"), "rate": 0.5})
    writer.close()
    assert rows(tmp_path / "metrics.jsonl") == [{"step": 1, "loss": None, "rate": 0.5}]


def test_a_half_line_of_a_killed_writer_does_not_spoil_the_next_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    writer = MetricsWriter(path)
    writer.log({"step": 2})
    writer.close()
    assert rows(path) == [{"step": 1}, {"step": 2}]
    assert list(all_rows(path)) == [{"step": 1}, None, {"step": 2}]  # the half line keeps its number


def test_a_full_disk_does_not_stop_training(caplog: pytest.LogCaptureFixture) -> None:
    writer = MetricsWriter(Path("/dev/full"))
    writer.log({"step": 1})
    writer.log({"step": 2})
    assert caplog.text.count("cannot be written") == 1
    writer.close()


def test_a_line_that_is_being_written_is_read_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert new_rows(path, 0) == ([], 0)
    path.write_bytes(b'{"step": 1}\n{"step')
    rows, offset = new_rows(path, 0)
    assert (rows, offset) == ([{"step": 1}], 12)
    with path.open("ab") as file:
        file.write(b'": 2}\n{"step": 3}\n')
    assert new_rows(path, offset) == ([{"step": 2}, {"step": 3}], 36)
    assert new_rows(path, offset, limit=1) == ([{"step": 2}], 24)


def test_the_metrics_of_a_row_are_its_finite_numbers() -> None:
    row = {"step": 3, "time": 1.0, "loss": 0.5, "skipped": 0, "bad": None, "name": "operator", "yes": True}
    assert numbers_of(row) == {"loss": 0.5, "skipped": 0.0}
