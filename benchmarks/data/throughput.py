"""Reading batches of 32 windows: our store compared with a bare numpy memory map and plain h5py, of the same bytes.

    python benchmarks/data/throughput.py [--seconds 2] [--rounds 3]

All three read the same windows in the same random order into one array that is reused, from files that are in the page
cache, in interleaved blocks of the same run (so that another load on the machine meets all of them). Bars, for windows
of 50 kB and of 600 kB: at least 0.6 of the bare map on one process; faster than h5py; two processes at least 1.6 times
one. The last line is one JSON object; exit code 1 below a bar.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

BATCH, FRAMES, WINDOW, CHANNELS = 32, 21, 4, 3
CASES = {"50 kB": (32, 600), "600 kB": (112, 60)}  # points per axis, trajectories
BARS = {"of_memmap": 0.6, "of_h5py": 1.0, "two_processes": 1.6}

Read = Callable[[np.ndarray, np.ndarray], None]


def write(folder: Path, points: int, count: int) -> None:
    """The same numbers as a store, as raw bytes and as HDF5."""
    task = TaskSpec("t", tuple(FieldSpec(f"u{i}") for i in range(CHANNELS)), (AxisSpec("x"), AxisSpec("y")), dt=1.0)
    shape = (FRAMES, CHANNELS, points, points)
    generator = np.random.default_rng(0)
    raw = np.lib.format.open_memmap(folder / "raw.npy", mode="w+", dtype="<f4", shape=(count, *shape))
    with (
        StoreWriter(folder / "s.zarr", task, [np.arange(points)] * 2, FRAMES) as writer,
        h5py.File(folder / "d.h5", "w") as file,
    ):
        dataset = file.create_dataset("state", (count, *shape), "f4")
        for i in range(count):
            state = generator.random(shape, np.float32)
            writer.append("train", state=state)
            dataset[i] = raw[i] = state
    raw.flush()


def order(count: int, seed: int) -> Any:
    """Endless random batches: trajectories (32,), first frames (32,)."""
    generator = np.random.default_rng(seed)
    while True:
        yield generator.integers(0, count, BATCH), generator.integers(0, FRAMES - WINDOW + 1, BATCH)


def readers(folder: Path, points: int) -> dict[str, Read]:
    """name -> a function that reads one batch into an array of its own."""
    store = StoreReader(folder / "s.zarr")
    block = store.read_block("train", [0] * BATCH, [0] * BATCH, WINDOW)
    mapped = np.load(folder / "raw.npy", mmap_mode="r")
    dataset = h5py.File(folder / "d.h5", "r")["state"]
    out = np.empty((BATCH, WINDOW, CHANNELS, points, points), np.float32)

    def from_store(which: np.ndarray, starts: np.ndarray) -> None:
        store.read_block("train", which.tolist(), starts.tolist(), WINDOW, out=block)

    def from_map(which: np.ndarray, starts: np.ndarray) -> None:
        for i, (trajectory, start) in enumerate(zip(which.tolist(), starts.tolist(), strict=True)):
            out[i] = mapped[trajectory, start : start + WINDOW]

    def from_h5py(which: np.ndarray, starts: np.ndarray) -> None:
        for i, (trajectory, start) in enumerate(zip(which.tolist(), starts.tolist(), strict=True)):
            out[i] = dataset[trajectory, start : start + WINDOW]

    for which, starts in (next(order(10, 1)), next(order(10, 2))):
        from_store(which, starts)
        from_map(which, starts)
        if not np.array_equal(block.state, out):
            raise SystemExit("the store and the raw bytes differ")
    return {"store": from_store, "memmap": from_map, "h5py": from_h5py}


def one_process(folder: Path, points: int, count: int, seconds: float) -> dict[str, float]:
    """Windows per second of each way: the median over blocks that take turns."""
    ways = readers(folder, points)
    for read in ways.values():  # into the page cache and into the page tables
        for i in range(count):
            read(np.full(BATCH, i), np.arange(BATCH) % (FRAMES - WINDOW + 1))
    rates: dict[str, list[float]] = {name: [] for name in ways}
    end = time.monotonic() + 3 * seconds
    seed = 0
    while time.monotonic() < end or len(rates["store"]) < 15:
        seed += 1
        for name, read in ways.items():
            batches = order(count, seed)  # the same windows for all three
            plan = [next(batches) for _ in range(20)]
            started = time.perf_counter()
            for which, starts in plan:
                read(which, starts)
            rates[name].append(20 * BATCH / (time.perf_counter() - started))
    ratios = {name: statistics.median(s / o for s, o in zip(rates["store"], rates[name], strict=True)) for name in ways}
    return {
        **{f"{name}_per_second": round(statistics.median(r)) for name, r in rates.items()},
        "of_memmap": round(ratios["memmap"], 3),
        "of_h5py": round(ratios["h5py"], 3),
    }


def _work(folder: Path, points: int, count: int, seconds: float, start: Any, rates: Any) -> None:
    read = readers(folder, points)["store"]
    for i in range(count):
        read(np.full(BATCH, i), np.arange(BATCH) % (FRAMES - WINDOW + 1))
    batches = order(count, 0)
    start.wait()
    done, end, cpu = 0, time.monotonic() + seconds, time.process_time()
    while time.monotonic() < end:
        read(*next(batches))
        done += BATCH
    rates.put((done / seconds, done / (time.process_time() - cpu)))


def several(folder: Path, points: int, count: int, seconds: float, number: int) -> np.ndarray:
    """Windows of `number` processes together, per second and per second of CPU time of each."""
    context = multiprocessing.get_context("spawn")
    start, rates = context.Barrier(number), context.Queue()
    children = [
        context.Process(target=_work, args=(folder, points, count, seconds, start, rates)) for _ in range(number)
    ]
    for child in children:
        child.start()
    total = np.sum([rates.get(timeout=120) for _ in children], axis=0)
    for child in children:
        child.join(30)
    return np.asarray(total)


def main() -> int:
    """Run, print, judge."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="time for each measurement")
    parser.add_argument("--rounds", type=int, default=3, help="turns of one process and two processes")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for name, (points, count) in CASES.items():
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            write(folder, points, count)
            result = one_process(folder, points, count, arguments.seconds)
            turns = [
                [several(folder, points, count, arguments.seconds, n) for n in (1, 2)] for _ in range(arguments.rounds)
            ]
            gain = np.median([two / one for one, two in turns], axis=0)
            result["two_processes"] = round(float(gain[0]), 3)
            # What two free cores would give: distinguishes a busy machine from one whose memory is the limit.
            result["two_processes_by_cpu_time"] = round(float(gain[1]), 3)
            size = WINDOW * CHANNELS * points * points * 4
            result["window_bytes"] = size
            result["store_gigabytes_per_second"] = round(result["store_per_second"] * size / 1e9, 2)
            results[name] = result
            print(name, result, flush=True)
    below = [f"{name} {key}" for name, r in results.items() for key, bar in BARS.items() if r[key] < bar]
    facts = {"benchmark": "data_throughput", "batch": BATCH, "bars": BARS, "load_average": os.getloadavg()[0]}
    print(json.dumps({**facts, "cases": results, "below": below}))
    return 1 if below else 0


if __name__ == "__main__":
    sys.exit(main())
