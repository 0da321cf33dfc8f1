"""A secret of a tracker is in no file of the run, no command line and no message, also when the tracker fails."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tracked_run import lead, make_run
from ups.supervise.tracker_feed import without_secrets
from ups.supervise.trackers import notes_of, sync

CANARIES = {"API_KEY": "canary0" * 6, "PASSWORD": "canary pass/1#word", "TOKEN": "canary-token-77"}


def test_a_secret_is_taken_out_of_a_text_also_from_a_url() -> None:
    text = "no http://me:canary%20pass%2F1%23word@host, 'canary pass/1#word'"
    assert "canary" not in without_secrets(text, list(CANARIES.values()))
    assert without_secrets("no route to http://me:p@ss@host:80/x", []) == "no route to http://host:80/x"


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_secrets_of_trackers_reach_no_file_list_or_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="needs the client of MLflow (extra: mlflow)")
    pytest.importorskip("wandb", reason="needs the client of Weights & Biases (extra: wandb)")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in CANARIES.items():
        monkeypatch.setenv(f"CANARY_{name}", value)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        trackers = [
            {"type": "mlflow", "uri": "http://127.0.0.1:9", "username": "me", "password": "${env:CANARY_PASSWORD}"},
            {"type": "mlflow", "uri": uri, "token": "${env:CANARY_TOKEN}"},
            {"type": "wandb", "mode": "offline", "api_key": "${env:CANARY_API_KEY}"},
            {"type": "wandb", "base_url": "http://127.0.0.1:9", "api_key": "${env:CANARY_API_KEY}"},
        ]
        run_dir = make_run(tmp_path / "small", trackers)
        with _command_lines() as seen:
            said = lead(run_dir, range(1, 5), "failed", close_seconds=5.0).stderr
            problems = sync(run_dir, ["mlflow", "mlflow-1", "wandb", "wandb-1"], 25)
    assert {name for name, problem in problems.items() if not problem} == {"wandb"}
    assert "tracker 'mlflow' is not complete" in said
    assert notes_of(run_dir)["mlflow"].problem
    said += "".join(problems.values())
    assert any(b"tracker_feed" in command for command in seen)
    for value in CANARIES.values():
        assert value not in said
        assert not [command for command in seen if value.encode() in command]
        for folder in (run_dir, tmp_path / "state", tmp_path / "home"):
            for path in folder.rglob("*"):
                assert not path.is_file() or value.encode() not in path.read_bytes(), path


@contextlib.contextmanager
def _command_lines() -> Iterator[set[bytes]]:
    """Every command line on this host that can be seen inside the block."""
    seen: set[bytes] = set()
    ended = threading.Event()

    def look() -> None:
        while not ended.wait(0.2):
            for pid in filter(str.isdigit, os.listdir("/proc")):
                with contextlib.suppress(OSError):
                    seen.add(Path(f"/proc/{pid}/cmdline").read_bytes())

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()
