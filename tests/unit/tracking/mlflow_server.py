"""A real MLflow server on loopback, with sqlite, from an environment of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The server is large and its packages disturb ours: it lives elsewhere, and this says where its `mlflow` is.
PROGRAM = os.environ.get("UPS_MLFLOW_SERVER") or shutil.which("mlflow-server-for-tests")


class Server:
    """Starts, stops and asks a server; its files stay, so that it can be started again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        store = ["--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db", "--artifacts-destination", "artifacts"]
        options = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        with (self.folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                [str(PROGRAM), "server", *store, *options],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
                # Eight processes for jobs that are never started here.
                env=os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
            )
        deadline = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()
            assert self._process.poll() is None, (self.folder / "server.log").read_text()
            time.sleep(0.2)

    def signal(self, number: int) -> None:
        assert self._process is not None
        os.killpg(self._process.pid, number)

    def stop(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self.signal(signal.SIGCONT)
                self.signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def ask(self, method: str, **body: Any) -> dict[str, Any]:
        """POST with a body, GET without, by the REST API and not by the client that is tested."""
        url = f"{self.uri}/api/2.0/mlflow/{method}"
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            document: dict[str, Any] = json.load(answer)
        return document

    def run(self, experiment: str = "ups") -> dict[str, Any]:
        """The only run of an experiment."""
        known = self.ask(f"experiments/get-by-name?experiment_name={experiment}")["experiment"]["experiment_id"]
        (run,) = self.ask("runs/search", experiment_ids=[known], max_results=10)["runs"]
        return dict(run)

    def tags(self, experiment: str = "ups") -> dict[str, str]:
        return {tag["key"]: tag["value"] for tag in self.run(experiment)["data"]["tags"]}

    def curve(self, name: str, experiment: str = "ups") -> list[tuple[int, float]]:
        run_id = self.run(experiment)["info"]["run_id"]
        history = self.ask(f"metrics/get-history?run_id={run_id}&metric_key={name}")
        return [(int(metric.get("step", 0)), metric["value"]) for metric in history.get("metrics", [])]


@contextlib.contextmanager
def running(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    try:
        server.start()
        yield server
    finally:
        server.stop()
