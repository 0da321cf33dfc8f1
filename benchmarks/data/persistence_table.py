"""How much one frame of each benchmark task differs from the next: the error of predicting no change at all.

Run with `python benchmarks/data/persistence_table.py DIRECTORY` on stores made by `ups data generate all --out
DIRECTORY`. The error of a step is the root mean square over space of (next frame - frame), divided by the root mean
square of the trajectory over space and time, per channel; shown is the mean over steps, channels and trajectories of
the test split, and its median over trajectories. A steady task has no persistence: there the mean of the train targets
is scored. The last line is one JSON object; the exit code is 1 if a task is missing, or so slow (below 0.005) or so
wild (above 1.5) that it asks nothing or everything of a model.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from ups.formats.zarr_store import StoreReader
from ups.solvers.tasks import TASKS

LOW, HIGH = 0.005, 1.5


def errors_of(reader: StoreReader, split: str) -> tuple[np.ndarray, list[float]]:
    """(trajectories,) mean error, and the mean of each channel."""
    if reader.task.steady:
        mean = np.mean([reader.read("train", i, 0, 0).target for i in range(reader.splits["train"])], axis=0)
        rows = []
        for i in range(reader.splits[split]):
            target = reader.read(split, i, 0, 0).target.astype(np.float64)
            rows.append(np.sqrt(((target - mean) ** 2).mean(axis=(1, 2)) / (target**2).mean(axis=(1, 2))))
        per_channel = np.array(rows)
        return per_channel.mean(axis=1), per_channel.mean(axis=0).tolist()
    rows = []
    for i in range(reader.splits[split]):
        state = reader.read(split, i, 0, reader.num_frames).state.astype(np.float64)
        space = tuple(range(2, state.ndim))
        step = np.sqrt((np.diff(state, axis=0) ** 2).mean(axis=space)).mean(axis=0)  # (C,)
        rows.append(step / np.sqrt((state**2).mean(axis=(0, *space))))
    per_channel = np.array(rows)
    return per_channel.mean(axis=1), per_channel.mean(axis=0).tolist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--split", default="test")
    arguments = parser.parse_args()
    scores: dict[str, dict[str, object]] = {}
    print("| task | one-step error of persistence | median | by channel |\n|---|---|---|---|")
    passed = True
    for name in TASKS:
        path = arguments.directory / f"{name}.zarr"
        if not path.exists():
            print(f"| {name} | missing | | |")
            passed = False
            continue
        reader = StoreReader(path)
        errors, channels = errors_of(reader, arguments.split)
        by_channel = dict(zip(reader.task.channel_names(reader.task.predicted), channels, strict=True))
        scores[name] = {"mean": float(errors.mean()), "median": float(np.median(errors)), "channels": by_channel}
        passed = passed and bool(LOW <= errors.mean() <= HIGH)
        text = ", ".join(f"{channel} {value:.3f}" for channel, value in by_channel.items())
        print(f"| {name} | {errors.mean():.3f} | {np.median(errors):.3f} | {text} |")
    print(json.dumps({"benchmark": "persistence_table", "split": arguments.split, "passed": passed, "scores": scores}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
