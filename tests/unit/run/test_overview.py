"""The page about all runs: complete, bounded, and nothing in it but text, whatever a run is called."""

import json
import math
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.unit.run.made_runs import made_run
from ups.cli.main import run
from ups.run.many_runs import promote
from ups.run.overview import MAX_POINTS, cards, loss_of, overview_page, scores_of
from ups.supervise.run_file import note_gate

HOSTILE = "<script>alert(1)<!-- \"'><img src=x onerror=alert(1)>&amp;"


class Elements(HTMLParser):
    """Tags and attributes of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.words = ""
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.words += data


def page_of(directory: Path) -> str:
    return overview_page(cards(directory, directory), f"Runs in {directory}", 0.0)


def test_a_page_has_verdict_scores_gate_tags_and_loss(tmp_path: Path) -> None:
    promote(str(made_run(tmp_path, "good", bundle=True)), "production")
    judged = made_run(tmp_path, "judged")
    note_gate(judged, [{"task": "waves", "condition": "c", "holds": False, "says": "is 3", "value": 3}], "waves: c")
    made_run(tmp_path, "lost", "failed", "signal(SIGSEGV)")
    page = Elements(page_of(tmp_path))
    for words in ("good", "completed", "production", "gate failed", "is 3", "signal(SIGSEGV)", "persistence", "∞"):
        assert words in page.words
    assert page.names >= {"svg", "polyline", "table"}
    assert "3 runs" in page.words


def test_a_page_leads_to_runs_and_reports_and_says_what_is_not_better(tmp_path: Path) -> None:
    runs, folder = tmp_path / "runs", tmp_path / "pages"
    named = made_run(runs, "javascript:alert(1) 50%")
    (named / "report").mkdir()
    (named / "report/index.html").write_text("<html>")
    errors = {"model": 2.0, "training mean": 1.0, "persistence": 3.0}
    predictors = {name: {"summary": {"trmse": error, "one_step_trmse": 0.1 + error}} for name, error in errors.items()}
    headline = [{"score": "rollout", "verdict": "worse than the training mean"}]
    report = {"results": [{"task": "waves", "predictors": predictors, "headline": headline}]}
    (named / "report/scores.json").write_text(json.dumps(report))
    page = overview_page(cards(runs, folder), "Runs", 0.0)
    addresses = re.findall(r'href="([^"]*)"', page)
    assert addresses == ["./../runs/javascript%3Aalert%281%29%2050%25", addresses[0] + "/report/index.html"]
    assert os.path.normpath(folder / unquote(addresses[1])) == str(named / "report/index.html")
    elements = Elements(page)
    assert "worse than the training mean" in elements.words
    assert "not better than the best reference" in elements.words  # of a score without a verdict in the file
    made_run(tmp_path / "other", "plain")
    assert "report/index.html" not in page_of(tmp_path / "other")


def test_no_name_of_a_run_is_more_than_text(tmp_path: Path) -> None:
    plain = made_run(tmp_path / "a", "name")
    names = Elements(page_of(tmp_path / "a"))
    path = made_run(tmp_path / "b", HOSTILE.replace("/", ""), "failed", HOSTILE)
    report = {"results": [{"task": HOSTILE, "predictors": {"model": {"summary": {"trmse": 1.0}}, HOSTILE: {}}}]}
    for one in (plain, path):
        (one / "report").mkdir()
        (one / "report/scores.json").write_text(json.dumps(report))
    page = page_of(tmp_path / "b")
    elements = Elements(page)
    assert elements.names - names.names == {"table", "tr", "th", "td"}
    assert elements.attributes - names.attributes == {"data-head"}
    assert HOSTILE in elements.words
    assert "default-src 'none'" in page


def test_files_of_a_run_that_are_not_what_they_should_be_are_left_out(tmp_path: Path) -> None:
    path = made_run(tmp_path, "a")
    (path / "metrics.jsonl").write_bytes(
        b'\xff\xfe\n{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1e999}\n[1]\n{"step": true, "loss": 1}\n'
        b'{"step": 3, "loss": 0.5}\n{"step": 3, "loss": 0.25}\n{"step": 4, "loss": -1'
    )
    assert loss_of(path) == [(3.0, 0.25)]
    (path / "report").mkdir()
    for content in ("[]", '{"results": 3}', '{"results": [3, {"task": 1, "predictors": []}]}', "{"):
        (path / "report/scores.json").write_text(content)
        assert scores_of(path) == []
    (path / "metrics.jsonl").unlink()
    (path / "metrics.jsonl").symlink_to("/dev/zero")
    assert loss_of(path) == []
    assert "no loss curve" in page_of(tmp_path)


def test_a_long_run_gives_a_short_curve(tmp_path: Path) -> None:
    path = made_run(tmp_path, "a")
    rows = (json.dumps({"step": step, "loss": math.exp(-step / 1e4)}) for step in range(50_000))
    (path / "metrics.jsonl").write_text("\n".join(rows))
    points = loss_of(path)
    assert len(points) == MAX_POINTS
    assert (points[0][0], points[-1][0]) == (0.0, 49_999.0)
    page = page_of(tmp_path)
    assert len(page) < 20_000
    drawn = re.search(r'points="([^"]*)"', page)
    assert drawn is not None
    assert len(drawn[1].split()) == MAX_POINTS


def test_a_curve_is_that_of_the_last_stage(tmp_path: Path) -> None:
    path = made_run(tmp_path, "a")
    rows = [{"step": n, "loss": 10.0 / n, "stage": 0 if n < 5 else 1} for n in range(1, 9)]
    (path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert loss_of(path) == [(n, 10.0 / n) for n in range(5, 9)]
    assert "loss from 2 to 1.25, steps 5 to 8" in page_of(tmp_path)


def test_the_command_writes_the_page_next_to_the_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["runs", "page", str(tmp_path)]) == 3
    made_run(tmp_path, "a")
    assert run(["runs", "page", str(tmp_path)]) == 0
    assert str(tmp_path / "index.html") in capsys.readouterr().out
    assert "<article>" in (tmp_path / "index.html").read_text()
