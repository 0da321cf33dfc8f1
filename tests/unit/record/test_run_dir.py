"""A name means the same to every command that takes a run or a bundle."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups.errors import ConfigError
from ups.record.run_dir import find_bundle, find_model, is_bundle


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with a bundle, and the same bundle alone."""
    for folder in ("runs/one", "runs/one/bundle", "copied"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "config.yaml").touch()
    for folder in ("runs/one/bundle", "copied"):
        (tmp_path / folder / "bundle.json").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["one", "runs/one"])
def test_a_run_is_found_by_name_and_by_path(desk: Path, name: str) -> None:
    assert find_model(name) == Path("runs/one")
    assert find_bundle(name) == Path("runs/one/bundle")
    assert find_model(str(desk / "runs/one")) == desk / "runs/one"


@pytest.mark.parametrize("name", ["copied", "runs/one/bundle"])
def test_a_bundle_is_found_by_path(desk: Path, name: str) -> None:
    assert find_model(name) == find_bundle(name) == Path(name)
    assert is_bundle(Path(name))


def test_a_run_is_no_bundle(desk: Path) -> None:
    assert not is_bundle(Path("runs/one"))


def test_what_is_not_there_is_named(desk: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run or bundle 'two'"):
        find_model("two")
    assert find_bundle("two") == Path("two")  # whoever opens it says what is wrong with it
