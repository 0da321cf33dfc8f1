"""A server of `ups serve` in a process of its own, with limits that tests can reach.

python -m tests.support.serving BUNDLE LIMITS.json [--tokens FILE] [--jobs DIR] [--file-bytes N]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


@dataclass
class Served:
    """A running server."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = {}, timeout: float = 60
    ) -> tuple[int, Mapping[str, str], bytes]:
        """Status, headers and content. A body that is no bytes is sent as JSON."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            standard = {} if body is None else {"Content-Type": "application/json"}
            connection.request(method, path, content, {**standard, **headers})
            response = connection.getresponse()
            return response.status, response.headers, response.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, body: Any = None, headers: Mapping[str, str] = {}) -> Any:
        status, _, content = self.request(method, path, body, headers)
        assert status < 300, content
        return json.loads(content)

    def resident(self) -> int:
        """Bytes."""
        rows = Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        return next(int(row.split()[1]) * 1024 for row in rows if row.startswith("VmRSS"))

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.log.read_text().splitlines()]


@contextmanager
def serving(
    bundle: Path, folder: Path, limits: Mapping[str, Any] = {}, *options: str, command: bool = False
) -> Iterator[Served]:
    """A server; ended at the end. command: by `ups serve`, without limits of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "limits.json").write_text(json.dumps(dict(limits)))
    log = folder / "log"
    program = ["-m", "tests.support.serving", str(bundle), str(folder / "limits.json")]
    program = ["-m", "ups", "serve", str(bundle), "--port", "0"] if command else program
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *program, *options], cwd=ROOT, stdout=stream, stderr=stream,
            env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 100
        while b"listening" not in (text := log.read_bytes()):
            assert process.poll() is None, text.decode()
            assert time.monotonic() < deadline, text.decode()
            time.sleep(0.02)
        first = next(line for line in text.splitlines() if b"listening" in line)
        yield Served(process, json.loads(first)["port"], log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def main() -> None:
    from ups.serve.requests import Limits
    from ups.serve.server import read_tokens, serve

    parser = argparse.ArgumentParser()
    parser.add_argument("bundle", type=Path)
    parser.add_argument("limits", type=Path)
    parser.add_argument("--tokens", type=Path)
    parser.add_argument("--jobs")
    parser.add_argument("--file-bytes", type=int)
    parser.add_argument("--deterministic", action="store_true")
    options = parser.parse_args()
    if options.file_bytes:
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_bytes, options.file_bytes))
    tokens = read_tokens(options.tokens) if options.tokens else {}
    limits = Limits(**json.loads(options.limits.read_text()))
    choices: Any = {"jobs": options.jobs, "deterministic": options.deterministic}
    end = serve([options.bundle], "127.0.0.1", 0, tokens, limits=limits, **choices)
    sys.exit(128 + end)


if __name__ == "__main__":
    main()
