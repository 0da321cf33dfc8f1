"""What the constraints that a task declares cost, and whether they hold: models trained with and without them.

    python benchmarks/model/constraints.py --data DIR --out DIR [--cpu-seconds 120] [--jobs 2] [--score 64]

DIR holds the stores of ns2d, swe2d and euler1d. Each is copied twice, with and without what its description says of
its fields, and the recipe `ups-alone` of ups-bench is trained on both copies for the same CPU time:

    flow2d      the velocity of ns2d, from its vorticity: free of divergence, mean velocity conserved
    swe2d       height positive and conserved
    euler1d     density and pressure positive

Measured in whole rollouts of the test split: the error relative to the trajectory; the largest relative drift of a
conserved integral; the divergence, its RMS relative to that of the velocity's gradient; and rollouts with a negative
value of a positive field. Asked of the models with constraints: errors at most 2 % above those without; drift and
divergence below 1e-6; no negative value. What is finished is not repeated. Last line: one JSON object. Exit code 1 if
something that is asked is not reached.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from in_process import Job, Recipe, run_jobs
from store_copy import copy_store

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

WITH, WITHOUT = "with", "without"
# name -> (store it comes from, declarations)
CASES: dict[str, tuple[str, dict[str, tuple[str, ...]]]] = {
    "flow2d": ("ns2d", {"conserved": ("velocity",), "divergence_free": ("velocity",)}),
    "swe2d": ("swe2d", {"conserved": ("height",), "positive": ("height",)}),
    "euler1d": ("euler1d", {"positive": ("density", "pressure")}),
}
MOST_ERROR, MOST_DRIFT, MOST_DIVERGENCE = 1.02, 1e-6, 1e-6


def velocity_of(vorticity: np.ndarray) -> np.ndarray:
    """(T, 1, X, Y) -> (T, 2, X, Y): v = (psi_y, -psi_x) with lap psi = -w, periodic as ns2d, 2 pi wide."""
    kx, ky = np.meshgrid(*[np.fft.fftfreq(n, 1 / n) for n in vorticity.shape[2:]], indexing="ij")
    square = kx**2 + ky**2
    square[0, 0] = 1.0
    stream = np.fft.fft2(vorticity[:, 0].astype(np.float64)) / square
    # The shortest wave of an even grid has no derivative on it.
    for axis, n in enumerate(vorticity.shape[2:]):
        if n % 2 == 0:
            stream[(slice(None), *[n // 2 if a == axis else slice(None) for a in range(2)])] = 0
    return np.stack([np.fft.ifft2(1j * ky * stream).real, np.fft.ifft2(-1j * kx * stream).real], axis=1)


def write_copy(case: str, which: str, data: Path, target: Path) -> None:
    """The store of a case, with or without its declarations."""
    from ups.spec.task import FieldSpec

    source, declared = CASES[case]
    nothing: dict[str, Any] = {"conserved": (), "positive": (), "divergence_free": ()}
    said = nothing | (declared if which == WITH else {})
    if case != "flow2d":
        copy_store(data / f"{source}.zarr", target, describe=lambda task: replace(task, name=case, **said))
        return
    velocity = FieldSpec("velocity", tensor_rank=1)
    copy_store(
        data / f"{source}.zarr",
        target,
        describe=lambda task: replace(task, name=case, fields=(velocity, *task.fields[1:]), **said),
        state=velocity_of,
    )


def job_of(options: argparse.Namespace, case: str, which: str) -> Job:
    from benchmarks.protocol.recipes import entries

    source, _ = CASES[case]
    recipe: Recipe = copy.deepcopy(entries(["ups-alone"], [source], "", options.cpu_seconds)[0].recipe)
    recipe["data"]["tasks"][0] |= {"name": case, "path": str(store_of(options, case, which))}
    place = options.out / f"{case}_{which}"
    # One cost for both copies, so that they have equal numbers of steps.
    return Job(f"{case}, {which}", place / "result.json", recipe, 8, options.out / "costs", case, keep=place / "bundle")


def store_of(options: argparse.Namespace, case: str, which: str) -> Path:
    return Path(options.out / f"{case}_{which}.zarr")


def measure(options: argparse.Namespace, case: str, which: str) -> dict[str, float]:
    """What rollouts of a trained model do."""
    import torch

    from ups.data.open import open_paths
    from ups.evaluation.rollout import RolloutPlan, read_inputs, score_task
    from ups.inference.bundle import load_bundle
    from ups.models.stepper import rollout
    from ups.spec.batch import RankInfo

    torch.set_num_threads(1)
    stepper = load_bundle(job_of(options, case, which).keep).stepper  # type: ignore[arg-type]
    stepper.fix_weights()
    _, declared = CASES[case]
    with contextlib.closing(open_paths(store_of(options, case, which))) as reader:
        task = reader.task
        plan = RolloutPlan.whole(reader, 1, split="test")
        limits: dict[str, Any] = {"max_trajectories": options.score}
        found = {
            "one_step": score_task({"m": stepper}, reader, RankInfo(0, 1), plan, kind="one_step", **limits)["m"],
            "rollout": score_task({"m": stepper}, reader, RankInfo(0, 1), plan, **limits)["m"],
        }
        errors = {name: float(score.summary()["trmse"]) for name, score in found.items()}
        count = min(options.score, reader.splits["test"])
        batch, _ = read_inputs(reader, "test", range(count), plan, torch.device("cpu"), torch.float32)
    fields = [field.name for field in task.fields_of("state") for _ in range(field.num_channels(task.num_spatial_dims))]
    channels = {name: [i for i, field in enumerate(fields) if field == name] for name in fields}
    space = tuple(range(2, 2 + task.num_spatial_dims))
    first = batch.state[:, -1].double()
    drift = divergence = 0.0
    negative = torch.zeros(count, dtype=torch.bool)
    with torch.inference_mode():
        for frame in rollout(stepper, batch, plan.num_steps):
            now = frame.double()
            for name in declared.get("conserved", ()):
                part = channels[name]
                moved = (now[:, part].mean(space) - first[:, part].mean(space)).abs()
                drift = max(drift, float((moved / first[:, part].abs().mean(space)).max()))
            for name in declared.get("positive", ()):
                negative |= (now[:, channels[name]] < 0).flatten(1).any(1)
            for name in declared.get("divergence_free", ()):
                divergence = max(divergence, relative_divergence(now[:, channels[name]], task))
    return errors | {"drift": drift, "divergence": divergence, "negative": int(negative.sum())}


def relative_divergence(velocity: Any, task: Any) -> float:
    """Of (B, 2, X, Y): largest over samples of the RMS divergence relative to the RMS of the gradient."""
    import torch

    from tests.support.small_model import divergence

    def mean_square(x: Any) -> Any:
        return x.square().flatten(1).mean(1)

    def slope(component: int, axis: int) -> Any:
        alone = torch.zeros_like(velocity)
        alone[:, axis] = velocity[:, component]
        return divergence(alone, task)

    gradient = sum(mean_square(slope(component, axis)) for component in range(2) for axis in range(2))
    return float((mean_square(divergence(velocity, task)) / gradient).sqrt().max())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="directory of the stores")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cpu-seconds", type=float, default=120.0, help="for each model")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--score", type=int, default=64, help="test trajectories")
    options = parser.parse_args()
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    pairs = [(case, which) for case in CASES for which in (WITH, WITHOUT)]
    for case, which in pairs:
        write_copy(case, which, options.data, store_of(options, case, which))
    run_jobs([job_of(options, *pair) for pair in pairs], options.jobs)
    found = {case: {which: measure(options, case, which) for which in (WITH, WITHOUT)} for case in CASES}
    print("| task | declared | one step: with / without | rollout: with / without | drift | divergence | negative |")
    print("|---|---|---|---|---|---|---|")
    good = True
    for case, each in found.items():
        ours, other = each[WITH], each[WITHOUT]
        ratios = {key: ours[key] / other[key] for key in ("one_step", "rollout")}
        cells = [f"{ours[k]:.4g} / {other[k]:.4g} = {ratios[k]:.3f}" for k in ratios]
        cells += [f"{ours[k]:.1e} / {other[k]:.1e}" if ours[k] or other[k] else "-" for k in ("drift", "divergence")]
        words = ", ".join(f"{kind}: {' '.join(names)}" for kind, names in CASES[case][1].items())
        print(
            f"| {case} | {words} | {' | '.join(cells)} | {ours['negative']} / {other['negative']} of {options.score} |"
        )
        good &= max(ratios.values()) <= MOST_ERROR and ours["drift"] < MOST_DRIFT
        good &= ours["divergence"] < MOST_DIVERGENCE and not ours["negative"]
    print(json.dumps({"cpu_seconds": options.cpu_seconds, "cases": found, "passed": bool(good)}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
