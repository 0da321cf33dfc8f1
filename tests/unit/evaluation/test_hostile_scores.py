"""scores.json from an untrusted source: `ups compare` names what is wrong, and nothing in it writes to the terminal."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import pytest

from ups.cli.main import run

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\rfake\nerror: fake"
HUGE = 10**400


def scores(error: float = 0.5, task: str = "heat") -> dict[str, Any]:
    result = {
        "task": task, "split": "test", "data_identity": "d", "steady": False, "space": [8], "dt": 0.1,
        "channels": ["u"],
        "protocol": {"num_trajectories": 8, "num_steps": 1, "start_frame": 0, "context_frames": 1},
        "predictors": {"model": predictor(error), "persistence": predictor(0.9)},
    }  # fmt: skip
    return {"results": [result], "identity": {}, "config": ""}


def predictor(error: float) -> dict[str, Any]:
    keys = ("one_step_trmse", "trmse", "nrmse", "vrmse", "nrmse_median", "vrmse_median")
    row = {name: [error] for name in ("trmse", "nrmse", "vrmse", "one_step_trmse")}
    return {
        "summary": dict.fromkeys(keys, error),
        "rows": {str(i): dict(row) for i in range(8)},
        "curves": {"trmse": [[error]]},
    }


def compare(folder: Path, one: Any, two: Any, *options: str) -> int:
    for name, document in (("a", one), ("b", two)):
        (folder / name).mkdir(exist_ok=True)
        text = document if isinstance(document, str) else json.dumps(document)
        (folder / name / "scores.json").write_text(text)
    return run(["compare", str(folder / "a"), str(folder / "b"), *options])


def test_sound_scores_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compare(tmp_path, scores(), scores(0.25)) == 0
    assert "0.25*" in capsys.readouterr().out


def changed(*path: Any, value: Any) -> dict[str, Any]:
    document = copy.deepcopy(scores())
    here: Any = document
    for part in path[:-1]:
        here = here[part]
    here[path[-1]] = value
    return document


MODEL = ("results", 0, "predictors", "model")
ODD = [
    *(changed(*MODEL, "summary", "trmse", value=v) for v in ("x", True, None, [], HUGE, "0.5")),
    *(changed(*MODEL, "rows", value=v) for v in ([], 3, {"x": {"trmse": [1]}}, {"0": {"trmse": []}})),
    changed(*MODEL, "rows", value={"0": {"trmse": ["a"]}}),
    *(changed(*MODEL, "rows", "0", "trmse", value=v) for v in ([HUGE], {"a": 1}, "abc")),
    *(changed(*MODEL, "curves", "trmse", value=v) for v in (3, [[]], [["a"]], [3])),
    *(changed("results", 0, "protocol", value=v) for v in ([], "x", {})),
    changed("results", 0, "protocol", "num_trajectories", value=EVIL),
    changed("results", 0, "task", value=["x"]),
    changed("results", value={"a": 1}),
    changed("results", value=[3]),
    changed("results", 0, "space", value=json.loads("[" * 300 + "]" * 300)),
    '{"results": ' + "[" * 100_000,
    '{"results": ' + "[" * 600 + "]" * 600 + "}",
    '{"results": ' + '{"a":' * 900 + "1" + "}" * 901,
    "[]",
    "",
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
]  # fmt: skip


def test_odd_scores_are_an_error_of_the_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number, document in enumerate(ODD):
        for pair in ((document, scores()), (scores(), document)):
            assert compare(tmp_path, *pair) == 4, (number, capsys.readouterr().err[-500:])
            assert "scores.json" in capsys.readouterr().err


def test_scores_without_a_common_trajectory_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = scores()
    for part in other["results"][0]["predictors"].values():
        part["rows"] = {"99": part["rows"]["0"]}
    assert compare(tmp_path, scores(), other) == 3
    assert "no trajectory" in capsys.readouterr().err


def test_scores_that_are_no_regular_file_are_refused(tmp_path: Path) -> None:
    compare(tmp_path, scores(), scores())
    path = tmp_path / "b" / "scores.json"
    path.unlink()
    path.symlink_to("/dev/zero")
    assert run(["compare", str(tmp_path / "a"), str(path)]) != 0
    path.unlink()
    os.mkfifo(path)
    assert run(["compare", str(tmp_path / "a"), str(path)]) != 0


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_names_in_scores_are_shown_and_not_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    one, two = scores(task=EVIL), scores(0.25, task=EVIL)
    one["config"], two["config"] = "run: {name: a}\n", 'run: {name: "\\e[31mb", "\\e[32m": 3}\n'
    one["results"] += scores(task=f"alone{EVIL}")["results"]
    assert compare(tmp_path, one, two, *options, "--out", str(tmp_path / "page")) == 0
    output = capsys.readouterr()
    for text in (output.out, output.err):
        assert not [c for c in text if not c.isprintable() and c != "\n"]
        assert not [line for line in text.splitlines() if line.startswith("error:")]
    page = (tmp_path / "page" / "index.html").read_text()
    assert "\x1b" not in page
    one["results"][0]["split"] = two["results"][0]["split"] = "\ud800\x1b[31m"
    assert compare(tmp_path, one, two, *options, "--out", str(tmp_path / "page")) == 0
    assert "\x1b" not in (tmp_path / "page" / "index.html").read_text()
    capsys.readouterr()
    two["results"][0]["split"] = EVIL
    assert compare(tmp_path, one, two) == 3
    assert "\x1b" not in capsys.readouterr().err


def test_a_page_holds_no_markup_of_a_stranger(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>' onload='x"
    one, two = scores(task=evil), scores(0.25, task=evil)
    for document in (one, two):
        document["results"][0]["split"] = evil
    assert compare(tmp_path, one, two, "--out", str(tmp_path / "page")) == 0
    page = (tmp_path / "page" / "index.html").read_text()
    assert "<script>alert" not in page
    assert "' onload='" not in page
