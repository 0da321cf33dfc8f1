"""Both ends of the links between supervisors: the head listens, each follower connects and connects again.

The head lets in who knows the secret, sends orders and keeps what each host reports. State is exchanged, not events:
the head repeats its whole order, a follower its whole report, when it changes and on each new connection. So a
connection may be cut and made again at any moment, and nothing has to be remembered or sent twice. Judging who is lost
is left to `head.py`.

The clock of a host is not trusted. A follower sends a ping every second, which comes back with the head's time; the
fastest exchange of the last minute says by how much the clocks differ, to half of its round trip.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import socketserver
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ups.errors import ConfigError, MachineError, UpsError
from ups.record.text import printable
from ups.supervise.link import LinkClosed, Session, make_secret, read_secret, remove_secret
from ups.supervise.options import HostInfo

_TICK_SECONDS = 0.5
_POLL_SECONDS = 0.1
# If this process itself was not scheduled for this long, do not blame the peer.
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


@contextlib.contextmanager
def head_link(host_info: HostInfo, world: int, version: str, run_dir: Path) -> Iterator[HeadLink]:
    """Listen for the other hosts of a run that is held, with a new secret, which is removed at the end."""
    secret = make_secret(run_dir)
    try:
        with contextlib.closing(HeadLink(host_info, world, version, secret)) as link:
            yield link
    finally:
        remove_secret(run_dir)


class HeadLink(socketserver.ThreadingTCPServer):
    """Listens until it is closed, with a thread for each connection."""

    allow_reuse_address = daemon_threads = True
    block_on_close = False

    def __init__(self, host_info: HostInfo, world: int, version: str, secret: bytes) -> None:
        self._host, self._world, self._version, self._secret = host_info, world, version, secret
        self._notes: deque[str] = deque(maxlen=_MAX_NOTES)
        self._lock = threading.RLock()
        self._order: dict[str, Any] = {}
        self._peers = {number: Peer(str(number)) for number in range(1, host_info.count)}
        self._closing = False
        self._strangers = 0
        self._refusals = 0
        self._ticked = time.monotonic()
        self.request_queue_size = max(128, host_info.count)
        try:
            super().__init__((host_info.address, host_info.port), socketserver.BaseRequestHandler)
        except OSError as error:
            raise MachineError(
                f"host 0 cannot listen at {host_info.address}:{host_info.port}: {error.strerror}",
                hint="--address is an address of host 0 itself, with a free port",
            ) from error
        threading.Thread(target=self.serve_forever, args=(_POLL_SECONDS,), name="ups-link", daemon=True).start()

    def peers(self) -> dict[int, Peer]:
        """All other hosts, by number; each is a copy."""
        with self._lock:
            return {number: replace(peer) for number, peer in self._peers.items()}

    def take_notes(self) -> list[str]:
        """Lines about whoever was refused, and those that other hosts said, since the last call."""
        return [self._notes.popleft() for _ in range(len(self._notes))]

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
        self.shutdown()
        self.server_close()
        for session in sessions:
            session.close()

    def get_request(self) -> tuple[Any, Any]:
        """The next connection; waits before it raises, because `serve_forever` would try again at once."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_TICK_SECONDS)  # no descriptor is left, for instance
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether a new connection is heard: only so many strangers at a time."""
        if self._strangers >= _MAX_STRANGERS:
            return False
        with self._lock:
            self._strangers += 1
        return True

    def service_actions(self) -> None:
        """Several times a second: after a pause of this process no peer is blamed for silence."""
        now = time.monotonic()
        with self._lock:
            if now - self._ticked > FROZEN_SECONDS:
                for peer in self._peers.values():
                    peer.heard = now if peer.heard else 0.0
                    peer.closed = now if peer.closed else 0.0
            self._ticked = now

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Speak with one supervisor until it leaves; the caller closes the connection."""
        session = Session(request)
        try:
            who = session.accept(self._secret)
        except LinkClosed as error:
            self._refuse(client_address[0], str(error))
            return
        finally:
            with self._lock:
                self._strangers -= 1
        problem = self._join(session, who)
        if problem:
            self._refuse(client_address[0], problem)
            _send(session, {"refused": problem})
            return
        self._hear(session, int(who["number"]))

    def _refuse(self, address: str, reason: str) -> None:
        self._refusals += 1
        if self._refusals <= _MAX_REFUSALS_TOLD:
            self._notes.append(f"NOTICE refused a connection from {address}: {reason}")

    def _join(self, session: Session, who: dict[str, Any]) -> str:
        """Take a supervisor in; returns why not, or ''."""
        number, name, incarnation = who.get("number"), who.get("name"), who.get("incarnation")
        expected = {"hosts": self._host.count, "ranks": self._world, "version": self._version}
        for key, value in expected.items():
            if who.get(key) != value:
                return f"it was started with {key} {str(who.get(key))[:40]}, host 0 with {value}"
        if type(number) is not int or number not in self._peers or not isinstance(name, str):
            return f"there is no host {str(number)[:40]} among 1 to {self._host.count - 1}"
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
                    # Without the lock: a peer that does not read its answers delays no other.
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
        if "ping" in message and isinstance(message.get("at"), list):
            peer.position = message["at"]
        if isinstance(message.get("report"), dict):
            peer.report = message["report"]
        if isinstance(message.get("line"), str):
            self._notes.append(printable(message["line"][:2000]))


def _send(session: Session, message: dict[str, Any]) -> None:
    try:
        session.send(message)
    except LinkClosed:
        session.close()  # a part of a frame may be on its way; the other side comes again


_PING_SECONDS = 1.0
_AGAIN_SECONDS = 0.5
_CONNECT_SECONDS = 3.0
# A connection that is silent for so long is made anew: the network may have forgotten it.
_SILENT_SECONDS = 8.0
_EXCHANGES = 60


class FollowerLink:
    """Keeps one connection to the head until it is closed. `order` is what the head said last, {} before that."""

    def __init__(self, host_info: HostInfo, world: int, version: str, run_dir: Path) -> None:
        self._host, self._run_dir = host_info, run_dir
        self._who = {
            "number": host_info.number,
            "name": host_info.name,
            "hosts": host_info.count,
            "ranks": world,
            "version": version,
            "incarnation": secrets.token_hex(8),
        }
        self._lock = threading.Lock()
        self._session: Session | None = None
        self._order: dict[str, Any] = {}
        self._report: dict[str, Any] = {}
        self._position: list[Any] = []
        self._heard = self._ticked = time.monotonic()
        self.joined = False  # whether the head has ever been reached
        self.problem = ""  # why the last connection could not be made or was lost
        self._refused: UpsError | None = None
        # (round trip, head's clock minus ours), in nanoseconds
        self._exchanges: deque[tuple[int, int]] = deque(maxlen=_EXCHANGES)
        self._closing = False
        self._thread = threading.Thread(target=self._keep, name="ups-link", daemon=True)
        self._thread.start()
        # A thread of its own: who waits for an answer of the head is not frozen, however long that takes.
        threading.Thread(target=self._notice_pauses, name="ups-link-clock", daemon=True).start()

    @property
    def order(self) -> dict[str, Any]:
        """What the head said last. Raises what makes it impossible to follow."""
        if self._refused is not None:
            raise self._refused
        with self._lock:
            return self._order

    @property
    def silent_seconds(self) -> float:
        """How long ago the head was heard; before the first time, how long it has been looked for."""
        now = time.monotonic()
        # A process that did not run heard no peer, and blames none.
        return 0.0 if now - self._ticked > FROZEN_SECONDS else now - self._heard

    def report(self, report: dict[str, Any], wait_seconds: float = 0.0) -> None:
        """Tell the head where this host is; it is repeated on each new connection."""
        with self._lock:
            self._report = report
        self._send({"report": report})
        if wait_seconds:
            time.sleep(wait_seconds)  # before the process ends: a reset would overtake what was sent last

    def say(self, line: str) -> None:
        """A line that the head shows and keeps; lost if there is no connection."""
        self._send({"line": line})

    def stand_at(self, position: list[Any]) -> None:
        """[rank, step, phase] of the rank that is furthest behind: what is known if this host is lost."""
        self._position = position

    def head_time_ns(self, own_ns: int) -> int:
        """A time of this host's clock on the head's clock."""
        exchanges = list(self._exchanges)
        return own_ns + (min(exchanges)[1] if exchanges else 0)

    def close(self) -> None:
        """Let go of the connection."""
        self._closing = True
        if self._session is not None:
            self._session.close()
        self._thread.join(2.0)

    def _keep(self) -> None:
        while not self._closing and self._refused is None:
            session = self._connect()
            if session is None:
                time.sleep(_AGAIN_SECONDS)
                continue
            try:
                self._talk(session)
            except LinkClosed as error:
                self.problem = str(error)
            finally:
                with self._lock:
                    self._session = None
                session.close()

    def _notice_pauses(self) -> None:
        """After a pause in which this process stood still, the head has all its time again."""
        while not self._closing:
            now = time.monotonic()
            if now - self._ticked > FROZEN_SECONDS:
                self._heard = now
            self._ticked = now
            time.sleep(_TICK_SECONDS)

    def _connect(self) -> Session | None:
        host_info = self._host
        try:
            secret = read_secret(self._run_dir)  # again each time: a new start of the head makes a new one
            if secret is None:
                self.problem = f"host 0 has not left its secret in {self._run_dir} yet"
                return None
            connection = socket.create_connection((host_info.address, host_info.port), _CONNECT_SECONDS)
        except UpsError as error:
            self._refused = error
            return None
        except OSError as error:
            self.problem = f"{host_info.address}:{host_info.port}: {error.strerror or error}"
            return None
        session = Session(connection)
        try:
            session.introduce(secret, self._who)
        except LinkClosed as error:
            self.problem = str(error)
            session.close()
            return None
        return session

    def _talk(self, session: Session) -> None:
        with self._lock:
            self._session = session
            self._heard = time.monotonic()
            report = self._report
        if report:
            self._send({"report": report})
        self.joined, self.problem = True, ""
        next_ping = 0.0
        while not self._closing:
            now = time.monotonic()
            if now >= next_ping:
                next_ping = now + _PING_SECONDS
                session.send({"ping": time.monotonic_ns(), "at": self._position})
            if now - self._heard > _SILENT_SECONDS:
                raise LinkClosed(f"nothing was heard for {_SILENT_SECONDS:.0f} s")
            message = session.receive(min(0.2, max(0.01, next_ping - now)))
            if message is not None:
                self._take(message, time.monotonic_ns())

    def _take(self, message: dict[str, Any], now_ns: int) -> None:
        self._heard = now_ns / 1e9
        if type(message.get("pong")) is int and type(message.get("now")) is int:
            there_and_back = now_ns - message["pong"]
            self._exchanges.append((there_and_back, message["now"] - (message["pong"] + now_ns) // 2))
        if isinstance(message.get("order"), dict):
            with self._lock:
                self._order = message["order"]
        if isinstance(message.get("refused"), str):
            self._refused = ConfigError(
                f"host 0 refuses this host: {message['refused']}", hint="start all hosts with the same options"
            )

    def _send(self, message: dict[str, Any]) -> None:
        session = self._session
        if session is not None:
            with contextlib.suppress(LinkClosed):  # the thread of the connection notices as well
                session.send(message)
