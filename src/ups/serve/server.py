"""The process of a server: connections with deadlines, signals, and the end of it."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import stat
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from ups.errors import ConfigError
from ups.inference.simulator import BundleWarning
from ups.record.files import machine_errors
from ups.serve.app import RETRY_SECONDS, Metrics, log, make_app
from ups.serve.engine import Engine
from ups.serve.requests import Limits
from ups.serve.served import Served, Service

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# A client that sends less in `Limits.body_seconds`, while a request is not complete, is disconnected.
FEWEST_BYTES = 2**18
_FULL = b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: %d\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


def guarded(limits: Limits) -> type[H11Protocol]:
    """The protocol of a connection, which ends when its client sends or reads too slowly. uvicorn waits for ever."""

    class Guarded(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _reading: asyncio.TimerHandle | None = None
        _received = 0

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.write(_FULL % RETRY_SECONDS)
                transport.close()
                return
            self._arm()

        def connection_lost(self, exc: Exception | None) -> None:
            self._disarm()
            self.resume_writing()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            self._received += len(data)
            super().data_received(data)
            waits_for_more = self.conn.their_state in (h11.IDLE, h11.SEND_BODY)
            if not waits_for_more:
                self._disarm()
            elif self._timer is None:
                self._arm()

        def _arm(self) -> None:
            self._received = 0
            self._timer = self.loop.call_later(limits.body_seconds, self._expire)

        def _disarm(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
            self._timer = None

        def _expire(self) -> None:
            if self._received < FEWEST_BYTES:
                self.transport.abort()
            else:
                self._arm()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._reading = self.loop.call_later(limits.body_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            if self._reading is not None:
                self._reading.cancel()
                self._reading = None
            super().resume_writing()

    return Guarded


class Server(uvicorn.Server):
    """uvicorn's server, which on SIGTERM refuses new rollouts and finishes those under way, at most so long."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._deadline: float | None = None
        self.signal = 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal does not wait."""
        if self._deadline is not None:
            self.should_exit = self.force_exit = True
        self.signal, self._service.is_draining = sig, True
        self._deadline = time.monotonic() + self._service.limits.drain_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's would raise the signal again at the end."""
        former = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    async def on_tick(self, counter: int) -> bool:
        if self._deadline is not None and (not self._service.num_waiting or time.monotonic() > self._deadline):
            self.should_exit = True
        return await super().on_tick(counter)


def read_tokens(path: str | Path) -> dict[str, str]:
    """Token -> name of a client, from lines 'NAME TOKEN'. Raises ConfigError."""
    with machine_errors(f"cannot read the tokens in {path}"):
        if stat.S_IMODE(Path(path).stat().st_mode) & 0o077:
            raise ConfigError(f"others can read the tokens in {path}", hint=f"chmod 600 {path}")
        lines = [line.split() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    lines = [line for line in lines if line and not line[0].startswith("#")]
    if not lines or any(len(line) != 2 or len(line[1]) < 16 for line in lines):
        raise ConfigError(f"{path} must have a line 'NAME TOKEN' for each client, with at least 16 characters a token")
    return {token: name for name, token in lines}


def load(paths: Sequence[Path], runtime: str) -> dict[str, Served]:
    """Simulators by the name of their bundle, or of the run that it is in. Raises ConfigError, BundleError."""
    simulators: dict[str, Served] = {}
    for path in paths:
        name = path.resolve().parent.name if path.name == "bundle" else path.resolve().name
        if name in simulators:
            raise ConfigError(f"two bundles are called '{name}'", hint="rename the directory of one")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BundleWarning)  # every reply says it
            simulators[name] = Served.load(path, runtime=runtime)
    return simulators


def serve(
    paths: Sequence[Path],
    host: str,
    port: int,
    tokens: Mapping[str, str],
    *,
    deterministic: bool = False,
    jobs: str | None = None,
    limits: Limits | None = None,
) -> int:
    """Serve bundles until a signal; returns it."""
    limits = limits or Limits()
    if host not in LOOPBACK and not tokens:
        raise ConfigError(f"host {host} can be reached from other machines", hint="give clients tokens: --token-file")
    simulators = load(paths, "eager" if deterministic else "auto")
    metrics = Metrics()
    engine = Engine(limits.samples, deterministic, metrics.on_step)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with machine_errors(f"cannot listen on {host}:{port}"):
        listener = socket.create_server((host, port), family=family, backlog=1024)
    with machine_errors("cannot make a directory for jobs"):
        service = Service(simulators, engine, limits, jobs)
    app: Any = make_app(service, tokens, metrics)
    if not tokens:  # no page of another site, by a name that leads here, may use what is open to this machine
        from starlette.middleware.trustedhost import TrustedHostMiddleware

        app = TrustedHostMiddleware(app, [*LOOPBACK, "[::1]"])
    config = uvicorn.Config(
        app, http=guarded(limits), ws="none", log_config=None, access_log=False, server_header=False,
        timeout_keep_alive=30, timeout_graceful_shutdown=5, lifespan="off",
    )  # fmt: skip
    server = Server(config, service)
    thread = threading.Thread(target=engine.run, name="ups-engine", daemon=True)
    thread.start()
    hashes = {name: simulator.describe()["bundle"] for name, simulator in simulators.items()}
    log(event="listening", host=listener.getsockname()[0], port=listener.getsockname()[1], bundles=hashes)
    try:
        server.run([listener])
    finally:
        service.close()
        thread.join(10)
        log(event="stopped", signal=server.signal)
    return server.signal
