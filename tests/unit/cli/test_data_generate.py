"""`ups data generate`: what it asks for, what it refuses before any work, what it reports."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ups.cli.data import _requests, app
from ups.errors import ConfigError, UpsError


def run(*arguments):
    return CliRunner().invoke(app, ["generate", *map(str, arguments)])


def refusal(*arguments):
    result = run(*arguments)
    assert isinstance(result.exception, UpsError), result.output
    return result.exception


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["burgers"], "burgers1d"),
        (["ks1d", "--trajectories", "10,2"], "512,64,64"),
        (["ks1d", "--trajectories", "10,2,2", "--small"], "one of them"),
        (["ks1d", "--trajectories", "0,2,2"], "train"),
        (["burgers1d", "--parameter", "nu"], "nu=0.01"),
        (["burgers1d", "--parameter", "mu=1"], "nu"),
        (["burgers1d", "--parameter", "nu=7"], "0.01 to 0.1"),
        (["ns2d", "--resolution", "7"], "even"),
        (["ns2d", "--frames", "1"], "2 to"),
        (["ns2d", "--seed", "-1"], "0 to"),
        (["heat2d", "--resolution", "64"], "--resolution"),
    ],
)
def test_a_mistake_is_answered_with_what_to_do_and_nothing_is_written(tmp_path, arguments, said):
    error = refusal(*arguments, "--out", tmp_path / "data")
    assert isinstance(error, ConfigError)
    assert said in error.hint
    assert not (tmp_path / "data").exists()


def test_all_means_the_nine_tasks_and_a_task_named_twice_is_made_once():
    def requests(*tasks):
        return [r.task for r in _requests(list(tasks), (1, 1, 1), None, None, 0, [], [])]

    assert len(requests("all")) == 9
    assert requests("ks1d", "darcy2d", "ks1d") == ["ks1d", "darcy2d"]


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_the_report_as_text_and_as_json(tmp_path):
    common = ("advection1d", "--trajectories", "2,1,1", "--resolution", 32, "--frames", 3, "--out", tmp_path)
    first = run(*common, "--processes", 1)
    assert first.exit_code == 0, first.output
    assert "2+1+1" in first.output
    (entry,) = json.loads(run(*common, "--json").stdout)
    assert entry["kept"] is True
    assert entry["path"] == str(tmp_path / "advection1d.zarr")
    assert entry["request"]["num_frames"] == 3
    assert entry["summary"]["train"]["parameters"]["beta"]["minimum"] >= 0.1
