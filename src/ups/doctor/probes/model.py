"""Checks `model`, `backward` and `alone`: builds the model of the recipe and predicts one step of each task."""

from __future__ import annotations

import sys
import time

from ups.doctor.probes import backward
from ups.doctor.probes.check import Assignment, CheckFailed, Report, begin_check, start
from ups.record.text import size_text


def main() -> None:
    """Build and predict, then backward for each stage and task, then two steps of each stage."""
    assignment = start(sys.argv[1:])
    with begin_check("model") as report:
        check(assignment, report)
    with begin_check("backward") as report:
        backward.check(assignment, report)
    with begin_check("alone") as report:
        backward.train_alone(assignment, report)


def check(assignment: Assignment, report: Report) -> None:
    """One prediction for each task, in the arithmetic of the recipe, on this process' device."""
    import torch

    from ups.distributed.environment import RankEnvironment
    from ups.distributed.runtime import choose_device
    from ups.distributed.strategies import autocast, weight_dtype
    from ups.doctor.probes.parts import open_run_data
    from ups.evaluation.rollout import RolloutPlan, read_inputs
    from ups.run.assemble import bare_stage

    recipe = assignment.run
    device = choose_device(recipe.engine.device, RankEnvironment())
    dtype = weight_dtype(recipe.engine.precision)
    with open_run_data(assignment) as opened:
        started = time.monotonic()
        stepper, _ = bare_stage(recipe, opened, 0)
        stepper.to(device=device, dtype=dtype).eval()
        count = sum(p.numel() for p in stepper.parameters())
        for reader in opened.readers:
            task, context = reader.task, stepper.context_frames
            plan = RolloutPlan(context, 0 if task.steady else context - 1, 1)
            trajectories = range(min(2, reader.splits["train"]))
            batch, truth = read_inputs(reader, "train", trajectories, plan, device, dtype)
            with torch.no_grad(), autocast(recipe.engine.precision, device):
                prediction = stepper(batch)
            if prediction.shape != truth[:, 0].shape:
                raise CheckFailed(
                    f"the model predicts {tuple(prediction.shape)} for task '{task.name}', whose truth has "
                    f"{tuple(truth[:, 0].shape)}"
                )
            if not bool(torch.isfinite(prediction).all()):
                raise CheckFailed(
                    f"the untrained model predicts values that are not finite for task '{task.name}'",
                    means="the first loss would be NaN",
                    hint="check units and statistics of the task with `ups data inspect`, and engine.precision",
                )
    report.facts |= {"parameters": count, "seconds": round(time.monotonic() - started, 2)}
    report.says = (
        f"{recipe.model.type} with {count:,} parameters ({size_text(4 * count)} in float32), finite for every task"
    )


if __name__ == "__main__":
    main()
