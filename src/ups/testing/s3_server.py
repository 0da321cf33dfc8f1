"""An S3 server on loopback, in a process of its own: `moto_server` of the package moto, found next to Python or on the
PATH. Whoever has no such program skips the test (`program`).

    with serve_s3() as server:
        subprocess.run(command, env=os.environ | server.environment())
        server.pause()      # it accepts connections and says nothing: a dead disk, a network that loses packets
        server.resume()

It keeps its objects in memory and takes any credentials.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

START_SECONDS = 120.0
KEY_ID = "AKIACANARY0123456789"
SECRET = "canary+secret/0123456789abcdefghijklmnop"


@dataclass
class S3Server:
    """endpoint: its address. process: to be stopped or killed by a test."""

    endpoint: str
    process: subprocess.Popen[bytes]

    def make_bucket(self, name: str) -> str:
        """Make an empty bucket; returns its address."""
        request = urllib.request.Request(f"{self.endpoint}/{name}", method="PUT")
        with urllib.request.urlopen(request, timeout=30):
            return f"s3://{name}"

    def environment(self) -> dict[str, str]:
        """What a client needs to reach it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def pause(self) -> None:
        """Stop the process: connections are accepted by the kernel, and nothing is ever answered."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it: connections are refused from now on."""
        self.process.kill()
        self.process.wait()


def program() -> str | None:
    """The S3 server that is installed, if one is."""
    beside = Path(sys.executable).with_name("moto_server")
    return str(beside) if beside.exists() else shutil.which("moto_server")


@contextlib.contextmanager
def serve_s3() -> Iterator[S3Server]:
    """A server on a free port, until the end of the block."""
    found = program()
    if found is None:
        raise RuntimeError("there is no moto_server: skip the test if program() is None")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    process = subprocess.Popen(
        [found, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        endpoint = f"http://127.0.0.1:{port}"
        _wait(endpoint, process)
        yield S3Server(endpoint, process)
    finally:
        process.kill()
        process.wait()


def _wait(endpoint: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{endpoint}/moto-api/", timeout=5):
            return
        time.sleep(0.2)
    raise RuntimeError(f"moto_server does not answer (exit code {process.poll()})")
