"""Exported steps of bundles beside eager torch: how far apart rollouts are, and which is faster.

    python benchmarks/model/export.py BUNDLE... [--data DIR] [--blocks 15] [--samples 1 8 32]

Each task of each bundle is exported to ONNX first, into a temporary directory, or is taken from BUNDLE-onnx.
Difference: the largest one of two rollouts of 40 steps (the solution of a steady task), each from its own frames,
relative to the RMS of each channel, from states of the test split of DIR/TASK.zarr, or drawn with the statistics of the
bundle. Next to it what torch differs from itself by where the first state is changed by 1e-7 of its values: chaos
amplifies both.
Speed: CPU time of a step of eager torch and of onnxruntime, as `Simulator.rollout` uses them, in blocks that take turns
on one thread; the ratio is the median over blocks. A task whose export is refused is a row with the reason. Last line:
one JSON object. Exit code 1 below the bars: a difference of 1e-4; for one sample twice as fast in 1D and 1.5 times in
2D, and never slower for 8 and 32.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from in_turns import in_turns

from ups.config.schema import TaskConfig
from ups.data.open import open_task
from ups.errors import UpsError
from ups.inference.bundle import Bundle, load_bundle
from ups.inference.export import (
    STEPS,
    GraphPredictor,
    GraphStep,
    export,
    export_path,
    exported_file,
    onnx_graph,
    typical_batch,
)
from ups.models.stepper import Predictor, rollout
from ups.record.run_dir import find_bundle
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec

MOST_DIFFERENCE = 1e-4
# Times as fast as eager, by dimensions, of one sample; and of more.
BARS, MORE_SAMPLES = {1: 2.0, 2: 1.5, 3: 1.0}, 1.0
TIMED_STEPS = 10


def states(bundle: Bundle, task: TaskSpec, data: Path | None, samples: int) -> Batch:
    """Test states as far as there are, again and again."""
    if data is None or not (data / f"{task.name}.zarr").exists():
        return typical_batch(bundle, task, samples)
    reader = open_task(TaskConfig(name=task.name, path=str(data / f"{task.name}.zarr")))
    frames = 0 if task.steady else bundle.info.context_frames
    windows = [reader.read("test", n % reader.splits["test"], 0, frames) for n in range(samples)]
    rows = {name: torch.stack([torch.from_numpy(getattr(w, name)) for w in windows]) for name in ("state", "static")}
    return Batch.of(
        task,
        state=rows["state"],
        static=rows["static"],
        parameters=torch.stack([torch.from_numpy(w.parameters) for w in windows]),
        dt=task.dt,
        coordinates=bundle.info.coordinates[task.name],
    )


def apart(one: Predictor, other: Predictor, batches: tuple[Batch, Batch], steps: int) -> float:
    """The largest difference of two rollouts, relative to the RMS of each channel."""
    pairs = zip(rollout(one, batches[0], steps), rollout(other, batches[1], steps), strict=True)
    frames, others = (torch.stack(part).movedim(2, 0).flatten(1).double() for part in zip(*pairs, strict=True))
    return float(((frames - others).abs().amax(1) / frames.square().mean(1).sqrt()).max())


@torch.inference_mode()
def measured(bundle: Bundle, task: TaskSpec, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    path = exported_file(export_path(bundle.path, "onnx"), bundle, task.name)
    if path is None:
        with torch.inference_mode(False):
            path = export(bundle, folder / task.name, "onnx", [task.name]) / f"{task.name}.onnx"
    step, graph = GraphStep(bundle, task), onnx_graph(path)
    steps = 1 if task.steady else STEPS
    batch = states(bundle, task, options.data, options.states)
    changed = batch.map_tensors(
        lambda x: x * (1 + 1e-7 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)))
    )
    row = {
        "difference": apart(bundle.stepper, GraphPredictor(graph, step, ["frame"]), (batch, batch), steps),
        "torch changed": apart(bundle.stepper, bundle.stepper, (batch, changed), steps),
    }

    def timed(predictor: Predictor, batch: Batch) -> None:
        for _ in rollout(predictor, batch, TIMED_STEPS):
            pass

    for samples in options.samples:
        batch, exported = states(bundle, task, options.data, samples), GraphPredictor(graph, step, ["frame"])
        candidates = {
            "eager": functools.partial(timed, bundle.stepper, batch),
            "onnxruntime": functools.partial(timed, exported, batch),
        }
        seconds = in_turns(candidates, options.blocks, 1)
        pairs = zip(seconds["eager"], seconds["onnxruntime"], strict=True)
        row[f"ratio {samples}"] = statistics.median(a / b for a, b in pairs)
        row |= {f"ms {name} {samples}": 1e3 * statistics.median(s) / TIMED_STEPS for name, s in seconds.items()}
    return row


def missed(task: TaskSpec, row: dict[str, Any]) -> list[str]:
    below = [] if row["difference"] <= MOST_DIFFERENCE else ["difference"]
    for name, value in row.items():
        if name.startswith("ratio") and value < (BARS[task.num_spatial_dims] if name == "ratio 1" else MORE_SAMPLES):
            below.append(name)
    return below


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("bundles", nargs="+")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--samples", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--states", type=int, default=4, help="Rollouts that are compared.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: dict[str, Any] = {}
    below: dict[str, list[str]] = {}
    for name in options.bundles:
        bundle = load_bundle(find_bundle(name))
        bundle.stepper.fix_weights()
        for task in bundle.info.tasks:
            label = f"{name} {task.name}"
            with tempfile.TemporaryDirectory() as folder:
                try:
                    rows[label] = measured(bundle, task, options, Path(folder))
                except UpsError as error:
                    rows[label] = {"refused": error.message}
                    print(f"{label}: refused: {error.message}", flush=True)
                    continue
            numbers = ", ".join(f"{key} {value:.3g}" for key, value in rows[label].items())
            print(f"{label}: {numbers}", flush=True)
            if names := missed(task, rows[label]):
                below[label] = names
    print(json.dumps({"rows": rows, "missed": below}))
    sys.exit(1 if below else 0)


if __name__ == "__main__":
    main()
