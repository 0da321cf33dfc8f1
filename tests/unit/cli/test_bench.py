"""`ups bench` without a recipe says where the protocol of the nine tasks is."""

from __future__ import annotations

import json

import pytest

from ups.cli.main import run


def test_without_a_recipe_it_says_where_the_protocol_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench"]) == 0
    assert "python -m benchmarks.protocol --jobs 2" in capsys.readouterr().out
    assert run(["bench", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"protocol": "python -m benchmarks.protocol"}


def test_options_of_the_protocol_are_answered_with_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "--small", "--model", "fno", "--task", "ks1d", "--jobs", "2", "--out", "mine"]) == 3
    command = "python -m benchmarks.protocol --model fno --task ks1d --jobs 2 --small --out mine"
    assert f"in a checkout of the repository: {command}" in capsys.readouterr().err


def test_a_recipe_takes_none_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "recipe.yaml", "--cpu-seconds", "1"]) == 3
    assert "a RECIPE says tasks, data and budget itself" in capsys.readouterr().err
