"""The network edge of a run: nothing listens beyond loopback, no store takes a pickle, no port is needed to start."""

from __future__ import annotations

import base64
import contextlib
import datetime
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.support.faults.small_run import rank_is_at_step, write_recipe
from tests.support.faults.supervised import MARK, Started, start
from tests.support.listening import Listening, listening_sockets
from tests.support.mixture import write_mixture
from ups.record import processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    return write_recipe(folder, write_mixture(folder), steps=100_000)


@pytest.fixture
def running(tmp_path: Path, endless: Path) -> Iterator[Callable[..., Started]]:
    """Starts a run that ends when it is asked to, or with the test."""
    all_started: list[Started] = []

    def begin(**options: Any) -> Started:
        started = start(tmp_path / "run", recipe=endless, **options)
        all_started.append(started)
        started.wait_for(lambda: rank_is_at_step(started.run_dir, 3))
        return started

    yield begin
    for started in all_started:
        started.process.kill()


def sockets_of(started: Started) -> list[Listening]:
    """What the supervisor, its ranks and all that they started listen on."""
    ranks = [process.pid for process in processes.carriers(MARK, started.mark)]
    assert len(ranks) >= 6  # two wrappers, two ranks, their loader workers
    return listening_sockets([started.process.pid, *ranks])


class Planted:
    """A pickle that runs a command where it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch '{self.path}'",)


def took(port: int, text: bytes) -> bool:
    """Whether what listens there is a store that lets us write under the key from which torchrun unpickles."""
    written = threading.Event()

    def write() -> None:
        with contextlib.suppress(RuntimeError):
            soon = datetime.timedelta(seconds=2)
            store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=soon)
            store.set("torch.rendezvous.none", text)
            written.set()

    # gloo says nothing to an unknown client, for which torch's client waits forever.
    threading.Thread(target=write, daemon=True).start()
    return written.wait(2.0)


def test_a_run_listens_on_loopback_only_and_a_pickle_finds_no_store(
    tmp_path: Path, running: Callable[..., Started], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What a cluster's profile may say, for other software: a run on one host does not follow it.
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    started = running()
    sockets = sockets_of(started)
    assert [one for one in sockets if one.beyond_loopback] == []
    owned = tmp_path / "owned"
    text = base64.b64encode(pickle.dumps(Planted(owned)))
    assert [one for one in sockets if took(one.port, text)] == []
    time.sleep(1.0)
    assert not owned.exists()
    for one in sockets:  # another user of this host who sends garbage to gloo's ports
        with socket.create_connection(("127.0.0.1", one.port), timeout=2) as stranger:
            stranger.sendall(b"\xff" * 64)
    environment = Path(f"/proc/{started.rank_pid(0)}/environ").read_bytes().decode().split("\0")
    (address,) = (text.partition("=file://")[2] for text in environment if text.startswith("UPS_RENDEZVOUS="))
    folder = Path(address).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder.parent.parent.stat().st_mode & 0o777 == 0o700
    started.process.send_signal(signal.SIGTERM)
    result = started.finish(200)
    assert result.code == 143, result.output
    assert result.failed_lines == []
    assert not folder.exists()


def test_a_store_over_tcp_listens_on_its_own_address_only(running: Callable[..., Started]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = running(rendezvous={"address": "127.0.0.1", "port": port})
    sockets = sockets_of(started)
    assert port in [one.port for one in sockets]
    assert [one for one in sockets if one.beyond_loopback] == []
    started.process.send_signal(signal.SIGTERM)
    result = started.finish(200)
    assert result.code == 143, result.output
