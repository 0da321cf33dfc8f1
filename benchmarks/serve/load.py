"""What a server of simulators costs: steps per second, latency, and whether every answer is right.

    python benchmarks/serve/load.py BUNDLE [--task burgers1d] [--rounds 6] [--seconds 10] [--clients 8]

The server has one core, and its clients another one. Rounds take turns, so that a slow moment of the machine meets all:

1. one request at a time, by one client;
2. CLIENTS clients that each send the next request after the last answer; rollouts have 10 to 200 steps;
3. the bare loop over the same model with as many samples, in this process, on the core of the server: it compares
   nothing and keeps nothing. With a calibrated bundle a second bare loop computes what error bars are made from.

Steps are those of samples, counted by the server while all clients are at work. Afterwards requests arrive at random at
80 % of the steps per second of 2, for the latency. Every answer is compared with the rollout in this process.
Bars: 2 is at least twice 1, and at least 0.8 of 3; p99 at most 3 times p50; first answer 5 s after the start; no
answer off by more than TOLERANCE of the largest value. Last line: one JSON object. Exit code 1 below the bars.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ups import Simulator
from ups.models.error_model import Watched
from ups.models.stepper import rollout
from ups.serve.requests import NPZ
from ups.serve.results import write_npz

TOLERANCE = 1e-4
SHORTEST, LONGEST = 10, 200
STATES = 16
SERVER_CORE = {0}


class Server:
    """`ups serve` in a process of its own, with a token for each client."""

    def __init__(self, bundle: str, clients: int, core: set[int]) -> None:
        self.began = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix="ups-load-"))
        self.tokens = [f"token-of-client-{number:04}" for number in range(clients)]
        (folder / "tokens").write_text("".join(f"c{n} {token}\n" for n, token in enumerate(self.tokens)))
        (folder / "tokens").chmod(0o600)
        self.log = (folder / "log").open("w+")
        command = [sys.executable, "-m", "ups", "serve", bundle, "--port", "0", "--token-file", str(folder / "tokens")]
        self.process = subprocess.Popen(
            command,
            stderr=self.log,
            preexec_fn=lambda: os.sched_setaffinity(0, core),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        while "listening" not in (text := Path(self.log.name).read_text()):
            if self.process.poll() is not None:
                raise SystemExit(text)
            time.sleep(0.02)
        self.port = json.loads(text.splitlines()[0])["port"]

    def metric(self, name: str) -> float:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("GET", "/metrics", headers={"Authorization": f"Bearer {self.tokens[0]}"})
        text = connection.getresponse().read().decode()
        found = re.search(rf"^{name} (\S+)", text, re.M)
        return float(found[1]) if found else 0.0

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class Work:
    """Requests, and what the answers have to be: frames of each state, computed here."""

    def __init__(self, simulator: Simulator, task: str | None) -> None:
        self.spec = simulator.task(task)
        grid = simulator._bundle.info.coordinates[self.spec.name]
        draw = np.random.default_rng(0)
        statistics_of = simulator._bundle.info.statistics[self.spec.name]
        channels = self.spec.num_channels("state")
        fields = []
        for mean, deviation in zip(statistics_of.state_mean, statistics_of.state_std, strict=True):
            total: Any = 0.0
            for axis, (values, along) in enumerate(zip(grid, self.spec.axes, strict=True)):
                phase = draw.uniform(0, 2 * np.pi, (STATES, 3))
                place = 2 * np.pi * (values - values[0]) / along.extent
                waves = sum(np.sin((n + 1) * place + phase[:, n, None]) / (n + 1) for n in range(3))
                total = total + waves.reshape(STATES, *(-1 if i == axis else 1 for i in range(len(grid))))
            fields.append(mean + deviation * total)
        self.states = np.stack(fields, axis=1).astype(np.float32)
        assert self.states.shape[1] == channels
        self.parameters = {
            p.name: draw.uniform(p.minimum, p.maximum, STATES).astype(np.float32) for p in self.spec.parameters
        }
        self.truth = simulator.rollout(self.states, LONGEST, self.parameters, task=self.spec.name)
        self.largest = {f.name: float(abs(self.truth[f.name]).max()) for f in self.spec.fields_of("state")}

    def body(self, state: int, steps: int) -> bytes:
        values = {f"parameters.{name}": column[state] for name, column in self.parameters.items()}
        return write_npz({"task": np.array(self.spec.name), "state": self.states[state], "steps": steps, **values})

    def error(self, content: bytes, state: int, steps: int) -> float:
        """The largest difference, relative to the largest value of the field."""
        answer = np.load(io.BytesIO(content))
        return max(
            float(np.abs(answer[name] - self.truth[name].values[state, :steps]).max()) / size
            for name, size in self.largest.items()
        )


class Clients:
    """What clients send and get, with the time of each answer."""

    def __init__(self, server: Server, work: Work) -> None:
        self.server, self.work = server, work
        self.errors: list[float] = []
        self.failures: list[str] = []
        self._local = threading.local()

    def send(self, client: int, state: int, steps: int) -> float:
        """Seconds until the answer is there."""
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=120)
        token = self.server.tokens[client % len(self.server.tokens)]
        headers = {"Content-Type": NPZ, "Accept": NPZ, "Authorization": f"Bearer {token}"}
        body = self.work.body(state, steps)
        began = time.perf_counter()
        connection.request("POST", "/rollout", body, headers)
        response = connection.getresponse()
        content = response.read()
        seconds = time.perf_counter() - began
        if response.status == 200:
            self.errors.append(self.work.error(content, state, steps))
        else:
            self.failures.append(content.decode()[:200])
        return seconds

    def closed(self, count: int, seconds: float) -> float:
        """Steps per second with so many clients at work all the time."""
        end, marks = threading.Event(), []

        def work(client: int) -> None:
            draw = random.Random(client)
            while not end.is_set():
                self.send(client, draw.randrange(STATES), draw.randint(SHORTEST, LONGEST))

        threads = [threading.Thread(target=work, args=(client,)) for client in range(count)]
        for thread in threads:
            thread.start()
        time.sleep(1)
        for _ in range(2):
            marks.append((time.perf_counter(), self.server.metric("ups_sample_steps_total")))
            time.sleep(seconds if len(marks) == 1 else 0)
        end.set()
        for thread in threads:
            thread.join()
        return float((marks[1][1] - marks[0][1]) / (marks[1][0] - marks[0][0]))

    def open(self, steps_per_second: float, seconds: float) -> list[float]:
        """Latencies of requests that arrive at random."""
        draw, threads, latencies = random.Random(0), [], []
        rate = steps_per_second / ((SHORTEST + LONGEST) / 2)
        end = time.perf_counter() + seconds
        number = 0
        while time.perf_counter() < end:
            time.sleep(draw.expovariate(rate))
            arguments = (number, draw.randrange(STATES), draw.randint(SHORTEST, LONGEST))
            thread = threading.Thread(target=lambda a=arguments: latencies.append(self.send(*a)))
            thread.start()
            threads.append(thread)
            number += 1
        for thread in threads:
            thread.join()
        return latencies


@torch.inference_mode()
def bare(simulator: Simulator, work: Work, samples: int, seconds: float, watched: bool) -> float:
    """Steps of samples per second of the loop that one would write by hand."""
    from ups.inference.inputs import read_start

    grid = simulator._bundle.info.coordinates[work.spec.name]
    chosen = [n % STATES for n in range(samples)]
    values = {name: column[chosen] for name, column in work.parameters.items()}
    batch = read_start(work.spec, 1, work.states[chosen], None, values, grid).batch
    predictor = Watched(simulator._stepper) if watched else simulator._stepper
    for _ in rollout(predictor, batch, 10):
        pass
    began, steps = time.perf_counter(), 0
    while time.perf_counter() - began < seconds:
        for _ in rollout(predictor, batch, 50):
            steps += 1
    return steps * samples / (time.perf_counter() - began)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle")
    parser.add_argument("--task")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    everywhere = os.sched_getaffinity(0)
    core = SERVER_CORE & everywhere or {min(everywhere)}
    clients_core = everywhere - core or everywhere
    warnings.simplefilter("ignore")
    simulator = Simulator.load(options.bundle, device="cpu")
    work = Work(simulator, options.task)
    calibrated = work.spec.name in simulator._bundle.calibrations
    os.sched_setaffinity(0, clients_core)
    server = Server(options.bundle, options.clients, core)
    try:
        clients = Clients(server, work)
        clients.send(0, 0, 1)
        cold = time.perf_counter() - server.began
        rates: dict[str, list[float]] = {}
        for number in range(options.rounds + 1):  # the first one warms up
            turn = {
                "one": clients.closed(1, options.seconds),
                "many": clients.closed(options.clients, options.seconds),
            }
            os.sched_setaffinity(0, core)
            turn["bare"] = bare(simulator, work, options.clients, options.seconds, False)
            if calibrated:
                turn["bare_watched"] = bare(simulator, work, options.clients, options.seconds, True)
            os.sched_setaffinity(0, clients_core)
            if number:
                for name, rate in turn.items():
                    rates.setdefault(name, []).append(rate)
        medians = {name: statistics.median(values) for name, values in rates.items()}
        latencies = sorted(clients.open(0.8 * medians["many"], 3 * options.seconds))
    finally:
        server.close()
    p50, p99 = (float(np.quantile(latencies, q)) for q in (0.5, 0.99))
    against_one = statistics.median(a / b for a, b in zip(rates["many"], rates["one"], strict=True))
    against_bare = statistics.median(a / b for a, b in zip(rates["many"], rates["bare"], strict=True))
    worst = max(clients.errors)
    bars = {
        "against_one": against_one >= 2,
        "against_bare": against_bare >= 0.8,
        "latency": p99 <= 3 * p50,
        "cold_start": cold < 5,
        "answers": worst <= TOLERANCE and not clients.failures,
    }
    print(f"steps per second: {', '.join(f'{name} {rate:.0f}' for name, rate in medians.items())}")
    print(
        f"{options.clients} clients: {against_one:.2f} of one at a time (bar 2), {against_bare:.2f} of bare (bar 0.8)"
    )
    print(f"{len(latencies)} requests at 80 % load: p50 {p50:.3f} s, p99 {p99:.3f} s, ratio {p99 / p50:.2f} (bar 3)")
    print(f"first answer after {cold:.1f} s (bar 5)")
    print(
        f"{len(clients.errors)} answers, off by at most {worst:.1e} of the largest value; {len(clients.failures)} bad"
    )
    figures = {
        "against_one": against_one,
        "against_bare": against_bare,
        "rates": rates,
        "p50": p50,
        "p99": p99,
        "cold": cold,
        "worst": worst,
        "failures": clients.failures[:3],
    }
    print(json.dumps({"benchmark": "serve", "bars": bars, **figures, "passed": all(bars.values())}))
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
