"""The head's side of the links: listens, lets in who knows the secret, tells orders and keeps what each host reports.

What is exchanged is state, not events: the head repeats its whole order, a follower its whole report, when it changes
and on each new connection. So a connection may be cut and made again at any moment, and nothing has to be remembered
or sent twice. Judging who is lost is left to `head.py`.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ups.errors import MachineError
from ups.record.untrusted_files import printable
from ups.supervise.host_place import HostPlace
from ups.supervise.link import LinkClosed, Session, make_secret, remove_secret

_TICK_SECONDS = 0.5
# Who was not scheduled for so long was frozen itself: nobody is accused of that silence.
FROZEN_SECONDS = 5.0
_MAX_STRANGERS = 32
_MAX_REFUSALS_TOLD = 20
_MAX_NOTES = 100


@dataclass(slots=True)
class Peer:
    """What is known of another host. `heard` is the last time by a clock that never jumps, 0.0 before the first."""

    label: str
    session: Session | None = None
    # A random name of the process: another one under the same number is another supervisor.
    incarnation: str = ""
    heard: float = 0.0
    # When its connection was closed by the other side; 0.0 while it is open or merely silent.
    closed: float = 0.0
    report: dict[str, Any] = field(default_factory=dict)
    # [rank, step, phase] of its rank that is furthest behind.
    position: list[Any] = field(default_factory=list)
    clock_error_seconds: float = 0.0


@contextlib.contextmanager
def head_link(place: HostPlace, world: int, version: str, run_dir: Path) -> Iterator[HeadLink]:
    """Listen for the other hosts of a run that is held, with a new secret, which is removed at the end."""
    secret = make_secret(run_dir)
    try:
        link = HeadLink(place, world, version, secret)
        try:
            yield link
        finally:
            link.close()
    finally:
        remove_secret(run_dir)


class HeadLink:
    """Listens until it is closed."""

    def __init__(self, place: HostPlace, world: int, version: str, secret: bytes) -> None:
        self._place, self._world, self._version, self._secret = place, world, version, secret
        self._notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self._lock = threading.RLock()
        self._order: dict[str, Any] = {}
        self._peers = {number: Peer(str(number)) for number in range(1, place.count)}
        self._closing = False
        self._strangers = 0
        self._refusals = 0
        self._ticked = time.monotonic()
        try:
            self._listening = socket.create_server((place.address, place.port), backlog=max(128, place.count))
        except OSError as error:
            raise MachineError(
                f"host 0 cannot listen at {place.address}:{place.port}: {error.strerror}",
                hint="--address is an address of host 0 itself, with a free port",
            ) from error
        self._listening.settimeout(_TICK_SECONDS)
        threading.Thread(target=self._serve, name="ups-link", daemon=True).start()

    def peers(self) -> dict[int, Peer]:
        """All other hosts, by number; each is a copy."""
        with self._lock:
            return {number: replace(peer) for number, peer in self._peers.items()}

    def take_notes(self) -> list[str]:
        """Lines about whoever was refused, and those that other hosts said, since the last call."""
        found = []
        while self._notes:
            found.append(self._notes.popleft())
        return found

    def tell(self, order: dict[str, Any]) -> None:
        """Give all hosts a new order; those that are away get it when they come back."""
        with self._lock:
            if order == self._order:
                return
            self._order = order
            sessions = [peer.session for peer in self._peers.values() if peer.session is not None]
        for session in sessions:
            _send(session, {"order": order})

    def close(self) -> None:
        """Stop listening and let go of all connections."""
        with self._lock:
            self._closing = True
            sessions = [peer.session for peer in self._peers.values() if peer.session is not None]
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes who waits there: the address is free at once
        self._listening.close()
        for session in sessions:
            session.close()

    def _serve(self) -> None:
        while not self._closing:
            try:
                connection, address = self._listening.accept()
            except TimeoutError:
                connection = None
            except OSError:
                if self._closing:
                    return
                time.sleep(_TICK_SECONDS)  # no descriptor left, for instance
                connection = None
            self._notice_freeze()
            if connection is None:
                continue
            if self._strangers >= _MAX_STRANGERS:
                connection.close()
                continue
            with self._lock:
                self._strangers += 1
            threading.Thread(
                target=self._meet, args=(connection, address[0]), name="ups-link-peer", daemon=True
            ).start()

    def _notice_freeze(self) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._ticked > FROZEN_SECONDS:
                for peer in self._peers.values():
                    peer.heard = now if peer.heard else 0.0
                    peer.closed = now if peer.closed else 0.0
            self._ticked = now

    def _meet(self, connection: socket.socket, address: str) -> None:
        session = Session(connection)
        try:
            who = session.accept(self._secret)
        except LinkClosed as error:
            self._refuse(address, str(error))
            session.close()
            return
        finally:
            with self._lock:
                self._strangers -= 1
        problem = self._join(session, who)
        if problem:
            self._refuse(address, problem)
            _send(session, {"refused": problem})
            session.close()
            return
        self._hear(session, int(who["number"]))

    def _refuse(self, address: str, reason: str) -> None:
        self._refusals += 1
        if self._refusals <= _MAX_REFUSALS_TOLD:
            self._notes.append(f"NOTICE refused a connection from {address}: {reason}")

    def _join(self, session: Session, who: dict[str, Any]) -> str:
        """Take a supervisor in; returns why not, or ''."""
        number, name, incarnation = who.get("number"), who.get("name"), who.get("incarnation")
        expected = {"hosts": self._place.count, "ranks": self._world, "version": self._version}
        for key, value in expected.items():
            if who.get(key) != value:
                return f"it was started with {key} {str(who.get(key))[:40]}, host 0 with {value}"
        if type(number) is not int or number not in self._peers or not isinstance(name, str):
            return f"there is no host {str(number)[:40]} among 1 to {self._place.count - 1}"
        with self._lock:
            peer, now = self._peers[number], time.monotonic()
            if peer.incarnation != incarnation and peer.session is not None and now - peer.heard < FROZEN_SECONDS:
                return f"host {number} is here already, as {peer.label}"
            if peer.session is not None:
                peer.session.close()
            if peer.incarnation != incarnation:
                peer.report, peer.position = {}, []
            peer.label, peer.incarnation = f"{number}:{printable(name[:64])}", str(incarnation)[:64]
            peer.session, peer.heard, peer.closed = session, now, 0.0
            order = self._order
        _send(session, {"order": order})
        return ""

    def _hear(self, session: Session, number: int) -> None:
        peer = self._peers[number]
        try:
            while not self._closing:
                message = session.receive(_TICK_SECONDS)
                if message is not None:
                    now_ns = time.monotonic_ns()
                    with self._lock:
                        peer.heard = now_ns / 1e9
                        self._take(peer, message)
                    # Without the lock: who does not read its answers holds up nobody else.
                    self._answer(session, message, now_ns)
        except LinkClosed:
            pass
        finally:
            session.close()
            with self._lock:
                if peer.session is session:
                    peer.session, peer.closed = None, time.monotonic()

    def _answer(self, session: Session, message: dict[str, Any], now_ns: int) -> None:
        if "ping" in message:
            session.send({"pong": message["ping"], "now": now_ns})

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        if "ping" in message:
            if isinstance(message.get("at"), list):
                peer.position = message["at"]
            if isinstance(message.get("clock_error"), float):
                peer.clock_error_seconds = message["clock_error"]
        if isinstance(message.get("report"), dict):
            peer.report = message["report"]
        if isinstance(message.get("line"), str):
            self._notes.append(printable(message["line"][:2000]))


def _send(session: Session, message: dict[str, Any]) -> None:
    try:
        session.send(message)
    except LinkClosed:
        session.close()  # a part of a frame may be on its way; the other side comes again
