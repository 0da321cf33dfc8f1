"""What a rollout costs compared with a bare loop over the same model, and whether memory stays constant over many
steps.

    python benchmarks/model/rollout.py [--blocks 12] [--steps 100] [--long 10000]

Speed: `Simulator.rollout` (checks, frames kept, an xarray.Dataset at the end) and a bare loop that keeps nothing, over
the same model, batch and device, in blocks that take turns in one process on one thread; the ratio of steps per second
is the median over pairs of neighboring blocks, by CPU time. Memory: one rollout of 10,000 steps streamed to Zarr; the
peak of the resident size (VmHWM) after 10,000 steps is compared with that after 1,000, when several chunks have been
written already. The model is the multiscale network of the usual size with random weights (memory: a smaller one, for
time, with smaller steps, so that it does not diverge). Last line: one JSON object. Exit code 1 below the bars: 0.95 of
the steps per second for one sample and for eight, and growth of at most 4 MiB.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ups import Simulator
from ups.config.model import MultiscaleConfig
from ups.inference.bundle import BundleInfo, write_bundle
from ups.models.build import build_model
from ups.models.stepper import rollout
from ups.spec.batch import Batch
from ups.spec.statistics import Statistics
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

BAR = 0.95
MAX_GROWTH_BYTES = 4 * 2**20
POINTS = 128
TASK = TaskSpec(
    "burgers", (FieldSpec("u"),), (AxisSpec("x"),), (ParameterSpec("nu", minimum=0.01, maximum=0.1),), dt=0.05
)


def make_simulator(folder: Path, config: MultiscaleConfig, change: float = 1.0) -> Simulator:
    """A simulator with random weights, whose frames change from step to step as those of a trained one do."""
    one, none = ((0.0,), (1.0,)), ((), ())
    statistics = {
        TASK.name: Statistics(*one, (0.0,), (change,), *none, *none, *one, data_identity="none", num_frames=1)
    }
    stepper = build_model(config, (TASK,), statistics, 1, seed=0)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in stepper.parameters():  # a new model predicts no change at all
            parameter.data += 0.02 * torch.randn(parameter.shape, generator=draw)
    grid = (np.arange(POINTS) + 0.5) / POINTS
    info = BundleInfo(stepper.configs, 1, (TASK,), statistics, {TASK.name: (grid,)})
    write_bundle(folder, stepper, info, config_text="run:\n  name: bench\n", card="# bench\n")
    return Simulator.load(folder, device="cpu")


def states(samples: int) -> Any:
    return np.random.default_rng(0).normal(size=(samples, 1, POINTS)).astype(np.float32)


def bare_loop(simulator: Simulator, samples: int) -> Callable[[int], None]:
    """The loop that one would write by hand around the model."""
    stepper = simulator._stepper
    first = torch.from_numpy(states(samples))[:, None]  # (B, 1, C, X)
    none = torch.zeros(samples, 0, POINTS)
    batch = Batch(
        task=simulator.tasks[TASK.name],
        state=first,
        static=none,
        target=none,
        parameters=torch.full((samples, 1), 0.05),
        dt=torch.full((samples,), TASK.dt),
        coordinates=((torch.arange(POINTS) + 0.5) / POINTS,),
        numbers=torch.arange(samples),
    )

    @torch.inference_mode()
    def run(steps: int) -> None:
        for _ in rollout(stepper, batch, steps):
            pass

    return run


def measure_speed(simulator: Simulator, samples: int, blocks: int, steps: int) -> dict[str, float]:
    """Steps per second of the rollout relative to those of the bare loop."""
    bare, start = bare_loop(simulator, samples), states(samples)

    def ours(count: int) -> None:
        simulator.rollout(start, count, {"nu": 0.05})

    def seconds(run: Callable[[int], None]) -> float:
        began = time.process_time()
        run(steps)
        return time.process_time() - began

    for run in (ours, bare):
        run(5)
    ratios, bare_times = [], []
    for block in range(blocks):
        # the order changes, so that neither is always the one that finds a warm cache
        first, second = (ours, bare) if block % 2 else (bare, ours)
        a, b = seconds(first), seconds(second)
        ours_time, bare_time = (a, b) if first is ours else (b, a)
        ratios.append(bare_time / ours_time)
        bare_times.append(bare_time / steps)
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": statistics.median(ratios),
        "lower_quartile": low,
        "upper_quartile": high,
        "bare_step_milliseconds": 1e3 * statistics.median(bare_times),
    }


def measure_memory(simulator: Simulator, folder: Path, long: int) -> dict[str, int]:
    """Resident and peak size (bytes) after a tenth of the steps and after all of them, of one streamed rollout."""
    samples, early = 64, long // 10  # frames of 32 KiB: a tenth of 10,000 fills several chunks of 8 MiB
    seen: dict[int, dict[str, int]] = {}

    def look(step: int) -> None:
        if step in (early, long):
            seen[step] = memory()

    out = folder / "long.zarr"
    result = simulator.rollout(states(samples), long, {"nu": 0.05}, out=out, progress=look)
    if result.attrs["blew_up"]:
        raise SystemExit(f"the rollout blew up, so its frames say nothing: {result.attrs['blew_up']}")
    written = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    return {
        "steps": long,
        "early_steps": early,
        "growth_bytes": seen[long]["VmHWM"] - seen[early]["VmHWM"],
        "early_resident_bytes": seen[early]["VmRSS"],
        "resident_bytes": seen[long]["VmRSS"],
        "result_bytes": samples * POINTS * 4 * long,
        "written_bytes": written,
    }


def memory() -> dict[str, int]:
    """Resident size and its peak, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    rows = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: int(rows[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=12, help="pairs of blocks for each number of samples")
    parser.add_argument("--steps", type=int, default=100, help="steps of a block")
    parser.add_argument("--long", type=int, default=10_000, help="steps of the streamed rollout")
    options = parser.parse_args()
    torch.set_num_threads(1)
    speed, passed = {}, True
    with tempfile.TemporaryDirectory(prefix="ups-rollout-") as name:
        # Frames stay in the usual range, as those of a trained network do: others are looked at twice.
        simulator = make_simulator(Path(name) / "bundle", MultiscaleConfig(), 0.01)
        for samples in (1, 8):
            found = measure_speed(simulator, samples, options.blocks, options.steps)
            speed[str(samples)] = found
            passed &= found["ratio"] >= BAR
            print(
                f"{samples} samples: {found['ratio']:.3f} of the steps per second of a bare loop (bar {BAR}), "
                f"step {found['bare_step_milliseconds']:.2f} ms"
            )
        config = MultiscaleConfig(widths=[8, 16], blocks=[1, 1], num_heads=1)
        grown = measure_memory(make_simulator(Path(name) / "small", config, 1e-6), Path(name), options.long)
    growth = grown["growth_bytes"]
    passed &= growth <= MAX_GROWTH_BYTES
    print(
        f"{grown['steps']} steps streamed, {grown['result_bytes'] / 2**20:.0f} MiB of frames: memory grew by "
        f"{growth / 2**20:.1f} MiB since step {grown['early_steps']} (bar {MAX_GROWTH_BYTES >> 20})"
    )
    print(json.dumps({"benchmark": "rollout", "bar": BAR, "speed": speed, "memory": grown, "passed": bool(passed)}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
