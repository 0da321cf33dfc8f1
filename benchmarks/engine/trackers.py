"""Steps per second of a run whose MLflow server is silent, gone or full, next to the same run without a tracker.

    python benchmarks/engine/trackers.py --steps 400 --pairs 5

Runs are interleaved: none, silent, none, gone, ...; compared are the medians of the rates in metrics.jsonl. The server
is a socket that takes connections and never answers (a stopped process looks like that), a port that nobody has, or one
that answers every request with the code 500, as MLflow does when its disk is full.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support.mixture import mixture_recipe, write_mixture

BAR = 0.97


class Full(BaseHTTPRequestHandler):
    """Answers 500, whatever is asked."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_error(500)

    do_GET = do_PATCH = do_POST

    def log_message(self, *_: object) -> None:
        pass


def rate(folder: Path, name: str, tasks: list[dict[str, Any]], steps: int, uri: str) -> float:
    """Train, and give the median of the rates of all rows but the first."""
    trackers = [{"type": "mlflow", "uri": uri}] if uri else []
    recipe = mixture_recipe(
        folder / name,
        tasks,
        stages=[{"type": "operator", "steps": steps}],
        tracking={"log_interval_steps": 5, "trackers": trackers},
        checkpoint={"interval_steps": steps},
    )
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(recipe))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_STATE_HOME": str(folder / "state")}
    command = [sys.executable, "-m", "ups", "train", str(folder / f"{name}.yaml")]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    return statistics.median([float(row["steps_per_second"]) for row in rows if row.get("steps_per_second")][1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--pairs", type=int, default=5)
    arguments = parser.parse_args()
    found: dict[str, list[float]] = {"silent": [], "gone": [], "full": []}
    full = ThreadingHTTPServer(("127.0.0.1", 0), Full)
    threading.Thread(target=full.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as silent:
        folder = Path(name)
        tasks = write_mixture(folder)
        uris = {
            "silent": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "gone": "http://127.0.0.1:9",
            "full": f"http://127.0.0.1:{full.server_port}",
        }
        for number in range(arguments.pairs):
            for kind, uri in uris.items():
                without = rate(folder, f"none-{kind}-{number}", tasks, arguments.steps, "")
                tracked = rate(folder, f"{kind}-{number}", tasks, arguments.steps, uri)
                found[kind].append(tracked / without)
                print(f"{kind} {number}: {without:.2f} steps/s without, {tracked:.2f} with: {tracked / without:.3f}")
    ratios = {kind: round(statistics.median(values), 4) for kind, values in found.items()}
    print(json.dumps({"ratios": ratios, "pairs": arguments.pairs, "steps": arguments.steps, "bar": BAR}))
    sys.exit(min(ratios.values()) < BAR)


if __name__ == "__main__":
    main()
