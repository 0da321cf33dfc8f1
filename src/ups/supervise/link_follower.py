"""A follower's side of the link: comes to the head, comes again after a cut, and measures the head's clock.

The clock of a host is not trusted. A ping goes out every second and comes back with the head's time; the exchange with
the shortest way of the last minute says by how much the clocks differ, to half of what that way took.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from ups.errors import ConfigError, UpsError
from ups.supervise.host_place import HostPlace
from ups.supervise.link import LinkClosed, Session, read_secret
from ups.supervise.link_head import FROZEN_SECONDS

_PING_SECONDS = 1.0
_AGAIN_SECONDS = 0.5
_TICK_SECONDS = 0.5
_CONNECT_SECONDS = 3.0
# A connection that is silent for so long is made anew: the network may have forgotten it.
_SILENT_SECONDS = 8.0
_EXCHANGES = 60


class FollowerLink:
    """Keeps one connection to the head until it is closed. `order` is what the head said last, {} before that."""

    def __init__(self, place: HostPlace, world: int, version: str, run_dir: Path) -> None:
        self._place, self._run_dir = place, run_dir
        self._who = {
            "number": place.number,
            "name": place.name,
            "hosts": place.count,
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
        self._joined = False
        self._problem = ""
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
    def joined(self) -> bool:
        """Whether the head has ever been reached."""
        return self._joined

    @property
    def silent_seconds(self) -> float:
        """How long ago the head was heard; before the first time, how long it has been looked for."""
        now = time.monotonic()
        # Who did not run itself has heard nobody, and accuses nobody.
        return 0.0 if now - self._ticked > FROZEN_SECONDS else now - self._heard

    @property
    def problem(self) -> str:
        """Why the last connection could not be made or was lost."""
        return self._problem

    def report(self, report: dict[str, Any], wait_seconds: float = 0.0) -> None:
        """Tell the head where this host is; it is repeated on each new connection."""
        with self._lock:
            self._report = report
            session = self._session
        if session is not None:
            self._send(session, {"report": report})
        if wait_seconds:
            time.sleep(wait_seconds)  # before the process ends: a reset would overtake what was sent last

    def say(self, line: str) -> None:
        """A line that the head shows and keeps; lost if there is no connection."""
        session = self._session
        if session is not None:
            self._send(session, {"line": line})

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
                self._problem = str(error)
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
        place = self._place
        try:
            secret = read_secret(self._run_dir)  # again each time: a new start of the head makes a new one
            if secret is None:
                self._problem = f"host 0 has not left its secret in {self._run_dir} yet"
                return None
            connection = socket.create_connection((place.address, place.port), _CONNECT_SECONDS)
        except UpsError as error:
            self._refused = error
            return None
        except OSError as error:
            self._problem = f"{place.address}:{place.port}: {error.strerror or error}"
            return None
        session = Session(connection)
        try:
            session.introduce(secret, self._who)
        except LinkClosed as error:
            self._problem = str(error)
            session.close()
            return None
        return session

    def _talk(self, session: Session) -> None:
        with self._lock:
            self._session = session
            self._heard = time.monotonic()
            report = self._report
        if report:
            self._send(session, {"report": report})
        self._joined, self._problem = True, ""
        next_ping = 0.0
        while not self._closing:
            now = time.monotonic()
            if now >= next_ping:
                next_ping = now + _PING_SECONDS
                error = min(self._exchanges)[0] / 2e9 if self._exchanges else 0.0
                session.send({"ping": time.monotonic_ns(), "at": self._position, "clock_error": error})
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

    def _send(self, session: Session, message: dict[str, Any]) -> None:
        with contextlib.suppress(LinkClosed):  # the thread of the connection notices as well
            session.send(message)
