"""States that a burgers1d simulator was not trained for: how wrong its rollouts are, and how many carry a warning.

    python benchmarks/model/shifts.py BUNDLE data/burgers1d.zarr [--samples 24] [--ordinary 256] [--again]
                                      [--others DIR]

BUNDLE is a run or bundle of the quickstart, trained on the data next to it. 21 kinds of initial states and viscosities
are simulated and compared with the solver. The usual error is the median of rollouts of the valid and test splits. A
sample is harmful if its error is more than 5 times the usual one. Ordinary samples are new trajectories of the same
generator with another seed: a warning of one is a false alarm. --again: measure statistics from the data first and use
these instead of those of the bundle, which may be older than the descriptors. --others: for each store in DIR, also
count the valid and test trajectories that have a frame outside the ranges of its train split. Last line: one JSON
object. Exit code 1 if fewer than 70 % of the harmful samples carry a warning, or more than 6 of 256 ordinary ones do.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

import ups
from ups.config.schema import TaskConfig
from ups.data.normalize import compute_statistics
from ups.data.open import open_task
from ups.formats.base import Reader
from ups.inference.bundle import load_bundle
from ups.record.run_dir import find_bundle
from ups.solvers import spectral
from ups.solvers.problem import average_periodic_1d
from ups.solvers.request import make_request
from ups.spec.descriptors import describe

Float64 = npt.NDArray[np.float64]
TASK = "burgers1d"
FINE, SUBSTEPS = 512, 80  # of the solver, which then keeps |u| k dt below 2.8 for |u| <= 4
HARMFUL, LEAST_WARNED, MOST_FALSE_ALARMS = 5.0, 0.7, 6 / 256
ORDINARY_SEED = 1


def waves(draw: np.random.Generator, count: int, first: int, last: int, number: int = 2, size: float = 1.0) -> Float64:
    """Sums of sines of wave numbers first to last, amplitudes of 0.3 to 1 times `size`."""
    modes = draw.integers(first, last + 1, (count, number, 1))
    amplitudes = size * draw.uniform(0.3, 1.0, (count, number, 1))
    phases = draw.uniform(0.0, 1.0, (count, number, 1))
    return np.asarray((amplitudes * np.sin(2 * np.pi * (modes * grid() + phases))).sum(axis=1))


def noise(draw: np.random.Generator, count: int, last: int, slope: float) -> Float64:
    """Gaussian waves 1 to `last` whose amplitudes go as k^slope, with an RMS of 0.5."""
    modes = np.zeros((count, FINE // 2 + 1), np.complex128)
    wave_numbers = np.arange(1, last + 1)
    modes[:, 1 : last + 1] = (draw.normal(size=(count, last, 2)) @ [1, 1j]) * wave_numbers**slope
    values = np.fft.irfft(modes, FINE)
    return np.asarray(0.5 * values / np.sqrt(np.square(values).mean(axis=1, keepdims=True)))


def grid() -> Float64:
    return np.arange(FINE) / FINE


def kinds(draw: np.random.Generator, count: int) -> dict[str, tuple[Float64, Float64]]:
    """Name -> initial states (count, FINE) and viscosities (count,)."""
    usual_nu = np.exp(draw.uniform(np.log(0.03), np.log(0.1), count))
    usual = waves(draw, count, 1, 8)
    behind = (grid() - draw.uniform(size=(count, 1))) % 1.0  # distance behind a random point
    away = np.minimum(behind, 1 - behind)
    box = (behind < 0.3).astype(np.float64)
    states = {
        "waves 9 to 16": waves(draw, count, 9, 16),
        "waves 20 to 30": waves(draw, count, 20, 30),
        "waves 6 to 9, 1.5 times as large": waves(draw, count, 6, 9, size=1.5),
        "eight waves of 1 to 8": waves(draw, count, 1, 8, number=8, size=0.5),
        "noise 1/k, waves 1 to 20": noise(draw, count, 20, -1.0),
        "white noise, waves 1 to 40": noise(draw, count, 40, 0.0),
        "amplitude x 2": 2 * usual,
        "amplitude x 0.01": 0.01 * usual,
        "mean + 0.25": usual + 0.25,
        "mean + 1": usual + 1,
        "constant 0.3": np.full_like(usual, 0.3),
        "box, mean 0": box - box.mean(axis=1, keepdims=True),
        "box, 0 to 1": box,
        "sawtooth": 2 * behind - 1,
        "narrow bump": np.exp(-0.5 * (away / 0.02) ** 2) - 0.05,
        "plateau": 1 / (1 + np.exp((away - 0.2) / 0.02)),
    }
    parameters = {"none": usual_nu} | {f"nu {nu}": np.full(count, nu) for nu in (0.03, 0.0999, 0.2, 0.5)}
    return {name: (usual, nu) for name, nu in parameters.items()} | {k: (u, usual_nu) for k, u in states.items()}


def error_of(predicted: Float64, truth: Float64) -> Float64:
    """(B,): RMSE of frames (B, T, X), relative to the RMS of the trajectory with its given frame."""
    return np.asarray(np.sqrt(np.square(predicted - truth[:, 1:]).mean((1, 2)) / np.square(truth).mean((1, 2))))


def held_out(reader: Reader) -> tuple[Float64, Float64]:
    """Frames (B, T, X) and viscosities of the valid and test splits."""
    blocks = []
    for split in ("valid", "test"):
        count = reader.splits[split]
        blocks.append(reader.read_block(split, range(count), [0] * count, reader.num_frames))
    return np.concatenate([b.state[:, :, 0] for b in blocks]), np.concatenate([b.parameters[:, 0] for b in blocks])


def ordinary(reader: Reader, count: int) -> tuple[Float64, Float64]:
    """New trajectories of the generator, as `held_out` gives them."""
    request = make_request(
        TASK,
        trajectories=(1, 0, count),
        resolution=reader.space[0],
        num_frames=reader.num_frames,
        seed=ORDINARY_SEED,
    )
    solved = [request.solve(chunk) for chunk in request.chunks() if chunk.split == "test"]
    return np.concatenate([s.state[:, :, 0] for s in solved]), np.concatenate([s.parameters[:, 0] for s in solved])


def simulator_of(model: str, reader: Reader, again: bool) -> ups.Simulator:
    bundle = load_bundle(find_bundle(model))
    if again:
        bundle = replace(bundle, info=replace(bundle.info, statistics={TASK: compute_statistics(reader)}))
    return ups.Simulator(bundle, torch.device("cpu"))


def held_out_alarms(path: Path) -> tuple[int, int]:
    """Trajectories of the valid and test splits outside the ranges of the train split of a store, and all of them."""
    alarms = total = 0
    with contextlib.closing(open_task(TaskConfig(name=path.stem, path=str(path)))) as reader:
        ranges = compute_statistics(reader).ranges
        for split in ("valid", "test"):
            count = reader.splits[split]
            block = reader.read_block(split, range(count), [0] * count, reader.num_frames)
            outside = np.zeros(count, bool)
            for role, limits in ranges.items():
                frames = block.state if role == "state" else getattr(block, role)[:, None]
                least, most = np.moveaxis(np.array(limits), -1, 0)[2:]  # (C, D)
                values = describe(frames.reshape(-1, *frames.shape[2:]), reader.task.axes)
                outside |= ((values < least) | (values > most)).reshape(count, -1).any(axis=1)
            alarms, total = alarms + int(outside.sum()), total + count
    return alarms, total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="run or bundle")
    parser.add_argument("data", help="the store that it was trained on")
    parser.add_argument("--samples", type=int, default=24, help="of each kind")
    parser.add_argument("--ordinary", type=int, default=256, help="new trajectories of the generator")
    parser.add_argument("--again", action="store_true", help="measure the statistics of the data first")
    parser.add_argument("--others", type=Path, help="directory of stores of other tasks")
    options = parser.parse_args()
    torch.set_num_threads(1)
    reader = open_task(TaskConfig(name=TASK, path=options.data))
    simulator = simulator_of(options.model, reader, options.again)

    def rolled(truth: Float64, nu: Float64) -> tuple[Float64, npt.NDArray[np.bool_]]:
        """Errors, and whether there is a warning or a divergence."""
        result = simulator.rollout(truth[:, :1].astype(np.float32), truth.shape[1] - 1, {"nu": nu}, task=TASK)
        return error_of(result.u.values, truth), (result["warnings"].values != 0) | result["blew_up"].values

    errors, _ = rolled(*held_out(reader))
    usual = float(np.median(errors))
    rows, harmful, flagged = [], [], []
    for name, (start, nu) in kinds(np.random.default_rng(0), options.samples).items():
        fine = spectral.burgers(start, nu / np.pi, reader.task.dt, reader.num_frames, SUBSTEPS)
        errors, warned = rolled(average_periodic_1d(fine, FINE, reader.space[0]), nu)
        harmful.append(errors > HARMFUL * usual)
        rows.append((name, float(np.median(errors)) / usual, int(harmful[-1].sum()), float(warned.mean())))
        flagged.append(warned)
    errors, alarms = rolled(*ordinary(reader, options.ordinary))
    print("| kind of shift | error / usual error | harmful | warned |\n|---|---|---|---|")
    for name, ratio, count, share in rows:
        print(f"| {name} | {ratio:.1f} | {count} of {options.samples} | {share:.0%} |")
    bad, warned = np.concatenate(harmful), np.concatenate(flagged)
    share = float(warned[bad].mean()) if bad.any() else 1.0
    good = share >= LEAST_WARNED and alarms.mean() <= MOST_FALSE_ALARMS
    print(f"usual error {usual:.4f}; harmful, above {HARMFUL:g} times that: {bad.sum()} of {len(bad)} shifted samples")
    print(f"warned: {share:.0%} of the harmful ones, {warned[~bad].mean():.0%} of the other shifted samples")
    print(f"false alarms: {alarms.sum()} of {len(alarms)} ordinary samples")
    stores = sorted(options.others.glob("*.zarr")) if options.others else []
    others = {path.stem: held_out_alarms(path) for path in stores}
    for name, (outside, total) in others.items():
        print(f"{name}: {outside} of {total} held-out trajectories are outside the ranges of train")
    facts: dict[str, Any] = {
        "usual_error": usual,
        "harmful": int(bad.sum()),
        "shifted": len(bad),
        "share_warned": share,
        "false_alarms": int(alarms.sum()),
        "ordinary": len(alarms),
        "others": others,
        "passed": bool(good),
    }
    print(json.dumps(facts))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
