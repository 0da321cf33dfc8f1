"""How near `ups plan` comes: memory and step time of drawn cases, predicted and then measured on real ranks.

    OMP_NUM_THREADS=1 python benchmarks/engine/plan_accuracy.py --cases 10 --seed 2026

A case is a network, its size, a grid, an optimizer, one or two ranks, a strategy, recomputation or not. Compared, of
the first rank: the predicted memory, and how much the resident memory of the process grew at most (VmHWM over VmRSS
before the stage was built), with a malloc that gives back what is freed: glibc usually keeps freed blocks. Time is CPU
time of a step with the usual malloc, against rates that a yardstick finds in the same process just before.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from ups.config.schema import Recipe
from ups.formats.store_writer import StoreWriter
from ups.plan.devices import Device
from ups.plan.rehearsal import Rehearsal
from ups.run.assemble import open_data
from ups.run.planning import kinds_of, pass_seconds, rehearse_stage
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec
from ups.testing.ranks import launch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support.measured_steps import measured_on_rank

# What a first step adds to a process besides tensors, on a CPU: compiled kernels, pages of code, nodes of the graph.
BESIDES_TENSORS = 18 << 20
MIB = 2**20
FRAMES, BLOCK = 4, 8


def draw(source: random.Random) -> dict[str, Any]:
    """One case; sizes from some tens to several hundreds of MiB."""
    kind = source.choice(["latent_operator", "multiscale", "unet"])
    grid = source.choice([32, 48])
    model: dict[str, Any] = {"type": kind}
    if kind == "latent_operator":
        model |= {"width": source.choice([384, 512]), "depth": source.choice([4, 6]), "patch_size": 4}
        model["attention"] = source.choice(["global", "alternating"])
    elif kind == "multiscale":
        width = source.choice([64, 96])
        model |= {"widths": [width, 2 * width, 4 * width], "blocks": source.choice([[1, 1, 2], [2, 2, 2]])}
    else:
        model |= {"width": source.choice([64, 96]), "blocks": source.choice([1, 2])}
    ranks, strategy = source.choice([(1, "single"), (2, "ddp"), (2, "fsdp"), (2, "fsdp")])
    return {
        "grid": grid,
        "model": model,
        "ranks": ranks,
        "strategy": strategy,
        "recompute": source.random() < 0.4,
        "optimizer": source.choice(["adamw", "muon"]),
    }


def recipe_of(case: dict[str, Any], folder: Path, steps: int) -> dict[str, Any]:
    """The recipe of a case; writes its data."""
    path = folder / f"flow{case['grid']}.zarr"
    if not path.exists():
        task = TaskSpec("flow2d", (FieldSpec("p"), FieldSpec("q")), (AxisSpec("x"), AxisSpec("y")), dt=0.1)
        x, values = np.arange(case["grid"]) / case["grid"], np.random.default_rng(0)
        with StoreWriter(path, task, [x, x], FRAMES) as writer:
            for split, count in {"train": 8, "valid": 1, "test": 1}.items():
                for _ in range(count):
                    writer.append(split, state=values.normal(size=(FRAMES, 2, case["grid"], case["grid"])))
    return {
        "version": 1,
        "run": {"name": "plan", "dir": str(folder / "run")},
        "data": {"tasks": [{"name": "flow2d", "path": str(path)}], "batch_size": BLOCK},
        "model": case["model"],
        "stages": [{"type": "operator", "steps": steps, "optim": {"type": case["optimizer"]}}],
        "engine": {
            "device": "cpu",
            "threads": 1,
            "strategy": case["strategy"],
            "activation_checkpointing": case["recompute"],
        },
    }


def predict(recipe: dict[str, Any], ranks: int) -> tuple[Rehearsal, Any]:
    """The rehearsal, and a function from a device to seconds of a step."""
    checked = Recipe.model_validate(recipe)
    with open_data(checked) as opened:
        kinds = kinds_of(checked, opened, 0, ranks)
        found = rehearse_stage(checked, opened, 0, ranks, kinds)
    return found, lambda device: sum(pass_seconds(found, kinds, device)) + device.seconds(found.update)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of the drawn cases to run; default all")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    source = random.Random(arguments.seed)
    num_run = near_memory = near_time = 0
    with tempfile.TemporaryDirectory(prefix="ups-plan-") as name:
        for number in range(arguments.cases):
            case = draw(source)
            if arguments.only is not None and number not in arguments.only:
                continue
            started = time.monotonic()
            recipe = recipe_of(case, Path(name), arguments.steps)
            found, seconds_on = predict(recipe, case["ranks"])
            predicted = found.needed_bytes + BESIDES_TENSORS
            measured = launch(
                measured_on_rank,
                case["ranks"],
                deadline=1500,
                arguments={"recipe": recipe, "steps": arguments.steps},
            )[0]
            row = {
                **case,
                "predicted_mib": round(predicted / MIB, 1),
                "held_mib": round(measured["held_bytes"] / MIB, 1),
            }
            row["memory_ratio"] = round(predicted / measured["held_bytes"], 3)
            rates = measured["device"]
            device = Device(name="cpu", memory_bytes=0, link_bandwidth=1.0, source="", queues=False, **rates)
            row["predicted_seconds"] = round(seconds_on(device), 3)
            row["step_seconds"] = round(measured["step_seconds"], 3)
            row["time_ratio"] = round(row["predicted_seconds"] / row["step_seconds"], 3)
            num_run += 1
            near_memory += abs(row["memory_ratio"] - 1) <= 0.1
            near_time += abs(row["time_ratio"] - 1) <= 0.25
            row["took"] = round(time.monotonic() - started)
            print(json.dumps({"case": number, **row}), flush=True)
    ok = num_run > 0 and near_memory >= 0.8 * num_run
    print(json.dumps({"ok": ok, "cases": num_run, "memory_within_10": near_memory, "time_within_25": near_time}))
    sys.exit(0 if ok else 1)


if __name__ == "__main__":
    main()
