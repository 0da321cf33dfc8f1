"""`ups train` over several hosts: options that do not fit together, and what a start that fails leaves behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.launch.test_job import machine
from ups.cli import main as front


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("WANDB_API_KEY", "canary")
    (tmp_path / "waves.yaml").write_text(machine().recipe)
    return tmp_path


@pytest.mark.parametrize("words", [["--host", "0"], ["--host", "1"], ["--address", "10.0.0.1:29500"]])
def test_the_number_of_a_host_without_the_number_of_hosts_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert front.run(["train", "waves.yaml", *words]) == 3
    assert "give --hosts as well" in capsys.readouterr().err


def test_a_run_that_cannot_start_leaves_nothing_though_its_address_is_not_of_this_host(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--ranks", "2", "--hosts", "2", "--host", "0", "--address", "192.0.2.1:29500", "--interface", "lo"]
    assert front.run(["train", "waves.yaml", *words]) == 4
    assert "data/advection1d.zarr" in capsys.readouterr().err
    assert not list((folder / "runs").iterdir())
