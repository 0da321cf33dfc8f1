"""What a save costs the loop: an asynchronous save of 100 MB against a synchronous one with hash and fsync.

    python benchmarks/engine/checkpoint_async.py [--megabytes 100] [--repeats 5]

Steps of a fixed amount of work run alone, then with an asynchronous save started before them; the excess over 20 steps
is compared with the time of a synchronous save of the same state. Interleaved, medians. Last line: one JSON object.
Exit code 1 if the excess is more than half of the synchronous save.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from ups.config.schema import EngineConfig
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.training.checkpoint import Checkpointer
from ups.training.progress import Progress

STEPS = 20
BAR = 0.5


def work(model: torch.nn.Module, x: torch.Tensor) -> float:
    """Seconds of 20 training steps of about 50 ms each."""
    started = time.perf_counter()
    for _ in range(STEPS):
        model.zero_grad()
        model(x).square().mean().backward()
    return time.perf_counter() - started


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = options.megabytes * 2**20 // 4 // 50 // 1024
    state = {f"model/w{i}": torch.randn(rows, 1024) for i in range(50)}
    model = torch.nn.Sequential(*(layer for _ in range(4) for layer in (torch.nn.Linear(512, 512), torch.nn.GELU())))
    x = torch.randn(512, 512)
    while True:  # about 50 ms a step on whatever machine this is
        work(model, x)
        seconds = work(model, x) / STEPS
        if seconds > 0.04:
            break
        x = torch.cat([x, x])
    plain, synchronous, asynchronous, copies = [], [], [], []
    engine = EngineConfig(device="cpu", threads=1)
    with tempfile.TemporaryDirectory(prefix="ups-save-") as name, Runtime.start(engine, RankEnvironment()) as runtime:
        slow = Checkpointer(runtime, Path(name) / "sync", keep=1, asynchronous=False)
        quick = Checkpointer(runtime, Path(name) / "async", keep=1, asynchronous=True)
        for number in range(options.repeats + 1):
            started = time.perf_counter()
            slow.save(state, Progress(step=number + 1))
            sync_seconds = time.perf_counter() - started
            plain_seconds = work(model, x)
            started = time.perf_counter()
            quick.save(state, Progress(step=number + 1))
            copy_seconds = time.perf_counter() - started
            async_seconds = copy_seconds + work(model, x)
            quick.wait()
            if quick.last is None or quick.last.error or slow.last is None or slow.last.error:
                raise SystemExit("a save failed")
            if number:  # the first round allocates buffers and warms the disk cache up
                synchronous.append(sync_seconds)
                plain.append(plain_seconds)
                asynchronous.append(async_seconds)
                copies.append(copy_seconds)
    excess = [a - p for a, p in zip(asynchronous, plain, strict=True)]
    ratio = statistics.median(excess) / statistics.median(synchronous)
    result = {
        "benchmark": "checkpoint_async",
        "megabytes": options.megabytes,
        "step_seconds": round(statistics.median(plain) / STEPS, 4),
        "synchronous_save_seconds": round(statistics.median(synchronous), 3),
        "copy_seconds": round(statistics.median(copies), 3),
        "excess_seconds_over_20_steps": round(statistics.median(excess), 3),
        "excess_over_synchronous": round(ratio, 3),
        "bar": BAR,
        "passed": ratio <= BAR,
    }
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
