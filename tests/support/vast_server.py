"""A server on loopback that answers like Vast's, and misbehaves on demand; its machines are processes of this host.

`faults` maps an operation (`search`, `create`, `show`, `list`, `destroy`, `logs`, `secrets`) to what the next answers
to it do, one word each: `refuse` (400), `fail` (500, nothing was done), `hang` (nothing was done, no answer), `late`
(done, but the answer comes too late), `lose` (done, and the connection is cut), `stale` (an answer
without machines). A word with a star (`hang*`) stays. A machine runs its start script with a home of its own;
destroying it kills all that runs there.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

_MACHINE = re.compile(r"/api/v0/instances/(\d+)/")


@dataclass
class VastServer:
    """folder: below it machines have their homes. key: of the account. secrets: variables of the account.

    programs: what comes first on the PATH of a machine. starts: whether a machine runs its start script at all.
    """

    folder: Path
    key: str
    secrets: dict[str, str] = field(default_factory=dict)
    programs: str = ""
    starts: bool = True
    price: float = 0.4
    status: str = "running"
    variables: dict[str, str] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=dict)
    machines: dict[int, dict[str, Any]] = field(default_factory=dict)
    requests: list[tuple[str, str, str, str]] = field(default_factory=list)
    url: str = ""
    closed: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def home(self, number: int) -> Path:
        return self.folder / f"machine-{number}"

    def key_of(self, number: int) -> str:
        """The key that the machine has for itself."""
        return f"canary-key-of-machine-{number}"

    def fault(self, operation: str) -> str:
        with self.lock:
            words = self.faults.get(operation) or []
            if not words:
                return ""
            return words[0].rstrip("*") if words[0].endswith("*") else words.pop(0)

    def make(self, asked: dict[str, Any]) -> int:
        with self.lock:
            number = 7_000 + len(list(self.folder.glob("machine-*")))
            home = self.home(number)
            home.mkdir(parents=True)
            self.machines[number] = {
                "id": number,
                "label": asked.get("label"),
                "actual_status": self.status,
                "dph_total": self.price,
                "start_date": time.time(),
                "extra_env": [],
            }
        (home / "output").touch()
        (home / "onstart.sh").write_text(asked.get("onstart") or "")
        if self.starts:
            environment = {
                "PATH": f"{self.programs}:{os.environ['PATH']}",
                "HOME": str(home),
                "CONTAINER_ID": str(number),
                "CONTAINER_API_KEY": self.key_of(number),
                "VAST_URL": self.url,
                **self.secrets,
                **self.variables,
            }
            subprocess.Popen(
                ["bash", str(home / "onstart.sh")],
                env=environment,
                cwd=home,
                stdin=subprocess.DEVNULL,
                stdout=(home / "onstart.log").open("wb"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return number

    def destroy(self, number: int) -> bool:
        with self.lock:
            known = self.machines.pop(number, None)
        threading.Timer(0.5, kill_below, [self.home(number)]).start()  # its own request is answered first
        return known is not None

    def log(self, number: int) -> str:
        try:
            return (self.home(number) / "output").read_text(errors="replace")
        except OSError:
            return ""


def processes_below(folder: Path) -> list[int]:
    """Processes whose working directory is there."""
    pids = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                if (entry / "cwd").resolve(strict=False).is_relative_to(folder.resolve()):
                    pids.append(int(entry.name))
    return pids


def kill_below(folder: Path) -> None:
    """What a machine that is gone does: nothing."""
    for _ in range(20):
        pids = processes_below(folder)
        for process in pids:
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        if not pids:
            return
        time.sleep(0.05)


@contextmanager
def serve(folder: Path, key: str, **options: Any) -> Iterator[VastServer]:
    """A server on a free port, until the end of the block; no process of a machine is left after it."""
    state = VastServer(folder, key, **options)

    class Handler(_Handler):
        vast = state

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.closed.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
        kill_below(folder)


class _Handler(BaseHTTPRequestHandler):
    vast: VastServer
    protocol_version = "HTTP/1.0"

    def do_GET(self) -> None:
        self._handle()

    do_POST = do_PUT = do_DELETE = do_GET

    def _handle(self) -> None:
        vast, path = self.vast, self.path.partition("?")[0]
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        who = self.headers.get("Authorization", "").removeprefix("Bearer ")
        vast.requests.append((self.command, self.path, who, body))
        if path.startswith("/log/"):
            self._send(200, vast.log(int(path.rpartition("/")[2])).encode(), "text/plain")
            return
        one = _MACHINE.fullmatch(path)
        number = int(one[1]) if one else 0
        if who != vast.key and not (number and who == vast.key_of(number)):
            self._answer(401, {"msg": "Invalid user key"})
            return
        operation = self._operation(path, number)
        fault = vast.fault(operation)
        if fault == "hang":
            vast.closed.wait(600)
            return
        if fault in ("refuse", "fail"):
            self._answer(400 if fault == "refuse" else 500, {"success": False, "msg": f"{operation} is not possible"})
            return
        nothing: dict[str, Any] = {"instances": [] if operation == "list" else None, "next_token": None}
        answer = self._do(operation, number, body) if fault != "stale" else nothing
        if fault == "lose":
            self.connection.close()
            return
        if fault == "late":
            vast.closed.wait(600)
        self._answer(200, answer)

    def _operation(self, path: str, number: int) -> str:
        if number:
            return "destroy" if self.command == "DELETE" else "show"
        names = {"/api/v0/bundles/": "search", "/api/v1/instances/": "list", "/api/v0/secrets/": "secrets"}
        if path.startswith("/api/v0/asks/"):
            return "create"
        if path.startswith("/api/v0/instances/request_logs/"):
            return "logs"
        return names.get(path, "copy" if path == "/api/v0/commands/rsync/" else "unknown")

    def _do(self, operation: str, number: int, body: str) -> dict[str, Any]:
        vast = self.vast
        asked: dict[str, Any] = json.loads(body) if body.startswith("{") else {}
        if operation == "search":
            return {"offers": [{"id": 11, "dph_total": vast.price}, {"id": 12, "dph_total": vast.price + 0.01}]}
        if operation == "create":
            return {"success": True, "new_contract": vast.make(asked)}
        if operation == "destroy":
            return {"success": vast.destroy(number)}
        if operation == "show":
            return {"instances": vast.machines.get(number)}
        if operation == "list":
            return {"instances": list(vast.machines.values()), "next_token": None}
        if operation == "logs":
            return {"result_url": f"{vast.url}/log/{self.path.rstrip('/').rpartition('/')[2]}"}
        if operation == "secrets":
            return {"secrets": vast.secrets}
        if operation == "copy":
            return {"success": True, "src_addr": "127.0.0.1", "src_port": 22}
        return {"success": False, "msg": "unknown"}

    def _answer(self, status: int, answer: dict[str, Any]) -> None:
        self._send(status, json.dumps(answer).encode(), "application/json")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        with suppress(OSError):
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass
