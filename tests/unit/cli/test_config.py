"""`ups config`: what a run would really use, whether it is sound, and how two recipes differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ups.cli.main import run
from ups.config.recipe import resolve

TINY = str(Path(__file__).parents[3] / "recipes/tiny.yaml")


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def shown(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert run(["config", *arguments]) == code
    return capsys.readouterr().out


def test_show_prints_what_resolves_to_itself(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    text = shown(capsys, "show", TINY, "--set", "run.seed=7")
    (tmp_path / "config.yaml").write_text(text)
    assert "seed: 7" in text
    assert shown(capsys, "show", str(tmp_path)) == text
    document = json.loads(shown(capsys, "show", str(tmp_path), "--json"))
    assert document["hash"] == resolve(TINY, ["run.seed=7"]).hash
    assert document["recipe"]["run"]["seed"] == 7


def test_check_says_ok_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = shown(capsys, "check", TINY)
    digest = resolve(TINY).hash
    assert line.startswith(f"ok tiny (hash {digest[:12]}): 2 tasks (")
    assert len(line.splitlines()) == 1
    document = json.loads(shown(capsys, "check", TINY, "--json"))
    assert (document["ok"], document["name"], document["hash"]) == (True, "tiny", digest)


def test_check_tells_every_mistake_on_a_line_and_leaves_with_3(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "check", TINY, "--set", "model.widht=3", "--set", "run.seed=x"]) == 3
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        'error: config: --set run.seed = "x": expected a whole number -> Key of every random draw: weights, order of '
        "windows, noise.",
        "error: config: --set model.widht = 3: no such field in model -> did you mean 'widths'?",
    ]


def test_a_missing_recipe_is_reported_as_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(shown(capsys, "check", "/no/such.yaml", "--json", code=3))
    assert document["error"]["message"] == "/no/such.yaml: no such file"


def test_schema_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(shown(capsys, "schema"))
    assert {"include", "run", "data", "stages"} <= set(document["properties"])
    assert document["$defs"]["EngineConfig"]["properties"]["timeout_seconds"]["unit"] == "seconds"


def test_diff_shows_changed_fields_only(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(
        f"include: {TINY}\nrun: {{name: other}}\nengine: {{precision: bfloat16}}\n"
        "stages: [{type: operator, steps: 40, optim: {learning_rate: 2e-3}}, {type: operator, steps: 1}]\n"
    )
    lines = shown(capsys, "diff", TINY, str(other)).splitlines()
    assert lines[0] == "run.name: tiny -> other"
    assert lines[1].startswith("stages.1: (absent) -> {type: operator, ")
    assert lines[2:] == ["engine.precision: float32 -> bfloat16"]
    document = json.loads(shown(capsys, "diff", TINY, str(other), "--json"))
    assert [change["field"] for change in document["changes"]] == ["run.name", "stages.1", "engine.precision"]
    assert "a" not in document["changes"][1]


def test_diff_of_equals_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "diff", TINY, TINY) == f"no difference (hash {resolve(TINY).hash[:12]})\n"
