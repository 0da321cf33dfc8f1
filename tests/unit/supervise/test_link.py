"""The link between supervisors: who is let in, what a frame is, and how far clocks are apart."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ups.errors import ConfigError, MachineError
from ups.record.run_dir import RunDir
from ups.supervise.link import (
    SECRET_VARIABLE,
    LinkClosed,
    Session,
    make_secret,
    read_secret,
)
from ups.supervise.link_endpoints import FollowerLink, HeadLink, head_link
from ups.supervise.options import HostInfo

SECRET = b"0123456789abcdef0123456789abcdef"


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)


def pair() -> tuple[Session, Session, socket.socket]:
    one, other = socket.socketpair()
    # TCP options do not exist on a pair of local sockets, so real ones are used.
    one.close(), other.close()
    server = socket.create_server(("127.0.0.1", 0))
    client = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    server.close()
    return Session(accepted), Session(client), client


def shaken(head_secret: bytes = SECRET, follower_secret: bytes = SECRET) -> tuple[Session, Session, list[str]]:
    """Both sides of a connection after their handshake, and what each of them complained about."""
    head, follower, _ = pair()
    problems: list[str] = []

    def accept() -> None:
        try:
            head.accept(head_secret)
        except LinkClosed as error:
            problems.append(f"head: {error}")
            head.close()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        follower.introduce(follower_secret, {"number": 1})
    except LinkClosed as error:
        problems.append(f"follower: {error}")
    thread.join(10)
    return head, follower, problems


def test_both_sides_talk_after_they_proved_the_secret() -> None:
    head, follower, problems = shaken()
    assert problems == []
    head.send({"order": 1})
    follower.send({"report": [2]})
    assert follower.receive(5) == {"order": 1}
    assert head.receive(5) == {"report": [2]}
    assert head.receive(0.05) is None


def test_who_does_not_know_the_secret_is_refused_and_learns_nothing_of_it() -> None:
    _, _, problems = shaken(follower_secret=b"another secret of that length...")
    assert "head: it does not know the secret of the run" in problems


def test_a_follower_does_not_talk_to_a_head_without_the_secret() -> None:
    head, follower, client = pair()

    def pretend() -> None:
        head._write({"protocol": "ups-link-1", "challenge": "ab" * 32})
        head._read(time.monotonic() + 5)
        head._write({"proof": "00" * 32})

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(LinkClosed, match="does not know the secret"):
        follower.introduce(SECRET, {"number": 1})
    thread.join(10)
    client.close()


@pytest.mark.parametrize("change", ["text", "repeat", "no_code"])
def test_a_frame_that_the_other_side_did_not_send_closes_the_link(change: str) -> None:
    head, follower, _ = shaken()
    sent: list[bytes] = []

    class Tap:
        """Keeps what would go over the wire."""

        def sendall(self, line: bytes) -> None:
            sent.append(line)

    wire, follower._socket = follower._socket, Tap()  # type: ignore[assignment]
    follower.send({"report": {"state": "running"}})
    line = {
        "text": sent[0].replace(b"running", b"stopped"),
        "repeat": sent[0] + sent[0],
        "no_code": b'{"report":{"state":"failed"}}\n',
    }[change]
    wire.sendall(line)
    if change == "repeat":
        assert head.receive(5) == {"report": {"state": "running"}}
    with pytest.raises(LinkClosed, match="not sent by the other supervisor"):
        head.receive(5)


def test_a_stranger_cannot_fill_the_memory_or_keep_a_thread() -> None:
    head, _, client = pair()
    client.sendall(b"x" * 100_000)
    began = time.monotonic()
    with pytest.raises(LinkClosed, match="longer than 2048 bytes"):
        head.accept(SECRET)
    assert time.monotonic() - began < 4


def test_the_secret_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    secret = make_secret(tmp_path)
    path = RunDir(tmp_path).link_secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(tmp_path) == secret
    assert make_secret(tmp_path) != secret
    path.chmod(0o640)
    with pytest.raises(MachineError, match="you alone can read"):
        read_secret(tmp_path)
    path.unlink()
    assert read_secret(tmp_path) is None
    (tmp_path / "elsewhere").write_text("a" * 64)
    path.symlink_to(tmp_path / "elsewhere")
    assert read_secret(tmp_path) is None


def test_a_secret_from_the_environment_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_VARIABLE, "a-secret-of-the-scheduler")
    assert make_secret(tmp_path) == read_secret(tmp_path) == b"a-secret-of-the-scheduler"
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(SECRET_VARIABLE, "short")
    with pytest.raises(MachineError, match="can be guessed"):
        make_secret(tmp_path)


@contextlib.contextmanager
def linked(run_dir: Path) -> Iterator[tuple[HeadLink, HostInfo]]:
    host = HostInfo(0, 2, "n0", "127.0.0.1", free_port(), "lo")
    with head_link(host, 2, "1.0", run_dir) as link:
        yield link, host


def follower_of(head_info: HostInfo, run_dir: Path, version: str = "1.0", ranks: int = 2) -> FollowerLink:
    return FollowerLink(HostInfo(1, 2, "n1", head_info.address, head_info.port, "lo"), ranks, version, run_dir)


def test_orders_and_reports_arrive_also_after_the_connection_was_cut(tmp_path: Path) -> None:
    with linked(tmp_path) as (head, host), contextlib.closing(follower_of(host, tmp_path)) as follower:
        head.tell({"what": "begin", "attempt": 0})
        follower.report({"state": "running", "attempt": 0})
        wait_for(lambda: head.peers()[1].report.get("attempt") == 0 and follower.order.get("attempt") == 0)
        session = head.peers()[1].session
        assert session is not None
        session.close()  # as a router that forgets a connection does
        head.tell({"what": "end", "attempt": 0})
        wait_for(lambda: follower.order.get("what") == "end" and head.peers()[1].session not in (None, session))
        assert head.peers()[1].report == {"state": "running", "attempt": 0}
        assert follower.silent_seconds < 5
        assert head.take_notes() == []
    assert not RunDir(tmp_path).link_secret.exists()


def test_clocks_that_differ_are_compared_over_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's clock is half a day ahead, as that of a host that was started earlier."""
    ahead_ns = 12 * 3600 * 10**9
    answer = HeadLink._answer

    def shifted(self: HeadLink, session: Session, message: dict[str, Any], now_ns: int) -> None:
        answer(self, session, message, now_ns + ahead_ns)

    monkeypatch.setattr(HeadLink, "_answer", shifted)
    with linked(tmp_path) as (_, host), contextlib.closing(follower_of(host, tmp_path)) as follower:
        wait_for(lambda: len(follower._exchanges) >= 3)
        assert abs(follower.head_time_ns(5) - 5 - ahead_ns) < 0.5e9


@pytest.mark.parametrize(("options", "words"), [({"version": "2.0"}, "version 2.0"), ({"ranks": 8}, "ranks 8")])
def test_a_host_that_was_started_differently_is_told_so(tmp_path: Path, options: Any, words: str) -> None:
    with (
        linked(tmp_path) as (head, host),
        contextlib.closing(follower_of(host, tmp_path, **options)) as follower,
    ):
        wait_for(lambda: follower._refused is not None)
        with pytest.raises(ConfigError, match=words):
            _ = follower.order
        assert head.peers()[1].session is None
        assert words in head.take_notes()[0]


def test_a_stranger_is_refused_and_noted_while_the_host_stays(tmp_path: Path) -> None:
    with linked(tmp_path) as (head, host), contextlib.closing(follower_of(host, tmp_path)):
        wait_for(lambda: head.peers()[1].session)
        with socket.create_connection((host.address, host.port)) as stranger:
            stranger.recv(2048)
            answer = {"challenge": "a" * 64, "who": {"number": 1}, "proof": "0" * 64}
            stranger.sendall((json.dumps(answer) + "\n").encode())
            assert stranger.recv(2048) == b""
        # A second supervisor for the same host, with the secret.
        with contextlib.closing(follower_of(host, tmp_path)) as second:
            wait_for(lambda: second._refused is not None)
        assert head.peers()[1].session is not None
        notes = head.take_notes()
    assert notes[0] == "NOTICE refused a connection from 127.0.0.1: it does not know the secret of the run"
    assert "host 1 is here already" in notes[1]


def test_a_head_that_answers_nothing_is_silent_although_its_port_takes_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a host that is stopped as a whole: its kernel still lets everybody in."""
    monkeypatch.setattr("ups.supervise.link.HANDSHAKE_SECONDS", 1.0)
    make_secret(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as server:
        host = HostInfo(1, 2, "b", "127.0.0.1", int(server.getsockname()[1]), "lo")
        with contextlib.closing(follower_of(host, tmp_path)) as follower:
            # Longer than one handshake: waiting for an answer is not standing still.
            wait_for(lambda: follower.silent_seconds > 3.0, seconds=40)


def test_half_a_surrogate_pair_of_a_stranger_harms_neither_side(tmp_path: Path) -> None:
    """It is text in JSON, and in no encoding."""
    half = "\ud800" * 40
    with linked(tmp_path) as (head, host):
        for answer in (
            {"challenge": half, "who": {}, "proof": half},
            {"challenge": "a" * 64, "who": {}, "proof": half},
        ):
            with socket.create_connection((host.address, host.port), 5) as stranger:
                stranger.sendall((json.dumps(answer) + "\n").encode())
                while stranger.recv(4096):
                    pass
        wait_for(lambda: len(head.take_notes()) >= 1)
        with contextlib.closing(follower_of(host, tmp_path)) as follower:
            wait_for(lambda: follower.joined)
    # A follower that met such a head once continues to look for the true one.
    port = free_port()
    make_secret(tmp_path)
    with socket.create_server(("127.0.0.1", port)) as server:
        host = HostInfo(0, 2, "n0", "127.0.0.1", port, "lo")
        follower = follower_of(host, tmp_path)
        false_head, _ = server.accept()
        false_head.sendall((json.dumps({"protocol": "ups-link-1", "challenge": half}) + "\n").encode())
        false_head.recv(4096)
        false_head.sendall((json.dumps({"proof": half}) + "\n").encode())
        wait_for(lambda: follower.problem)
        false_head.close()
    with contextlib.closing(follower), head_link(host, 2, "1.0", tmp_path):
        wait_for(lambda: follower.joined)


def test_a_frame_that_is_too_long_is_not_counted() -> None:
    head, follower, problems = shaken()
    with pytest.raises(LinkClosed, match="more than the other side reads"):
        follower.send({"report": "x" * 2**20})
    follower.send({"report": "short"})
    assert head.receive(5) == {"report": "short"}
    assert problems == []


def test_a_host_that_reads_nothing_does_not_hold_up_the_head(tmp_path: Path) -> None:
    with linked(tmp_path) as (head, host):
        deaf = Session(socket.create_connection((host.address, host.port), 5))
        who = {"number": 1, "name": "n1", "hosts": 2, "ranks": 2, "version": "1.0", "incarnation": "deaf"}
        secret = read_secret(tmp_path)
        assert secret is not None
        deaf.introduce(secret, who)

        def flood() -> None:
            with contextlib.suppress(LinkClosed):
                for _ in range(2000):
                    deaf.send({"ping": "x" * 20_000})

        thread = threading.Thread(target=flood)
        thread.start()
        longest = 0.0
        while thread.is_alive():
            began = time.monotonic()
            head.peers()
            longest = max(longest, time.monotonic() - began)
        thread.join()
        deaf.close()
    assert longest < 2.0


def test_an_address_that_is_taken_leaves_no_secret(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        host = HostInfo(0, 2, "n0", "127.0.0.1", int(listener.getsockname()[1]), "lo")
        with pytest.raises(MachineError, match="cannot listen"), head_link(host, 2, "1.0", tmp_path):
            pass
    assert not RunDir(tmp_path).link_secret.exists()
    for _ in range(2):  # and an address is free again at once
        with head_link(host, 2, "1.0", tmp_path):
            pass
