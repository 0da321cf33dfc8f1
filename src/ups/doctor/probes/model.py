"""Checks `model` and `backward`: the model predicts, and its gradients are finite. `alone` is of the same process."""

from __future__ import annotations

import time

import torch

from ups.config.schema import Recipe
from ups.data.loader import first_batch
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import choose_device
from ups.distributed.strategies import autocast, weight_dtype
from ups.doctor.probes.check import Assignment
from ups.doctor.probes.parity import check_alone as check_alone
from ups.doctor.probes.parts import open_run_data, stage_name
from ups.evaluation.rollout import RolloutPlan, read_inputs
from ups.record.text import size_text
from ups.run.assemble import OpenData, bare_stage
from ups.run.preflight import CheckFailed, Report


def check_model(assignment: Assignment, report: Report) -> None:
    """One prediction for each task, in the arithmetic of the recipe, on this process' device."""
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


_MOST_SHOWN = 8


def check_backward(assignment: Assignment, report: Report) -> None:
    """Every stage of the recipe."""
    with open_run_data(assignment) as opened:
        for index in range(len(assignment.run.stages)):
            check_stage(assignment.run, opened, index, report)


def check_stage(recipe: Recipe, opened: OpenData, index: int, report: Report) -> None:
    """Gradients of one micro-batch of each task, in the arithmetic of the recipe."""
    device = choose_device(recipe.engine.device, RankEnvironment())
    dtype = weight_dtype(recipe.engine.precision)
    _, stage = bare_stage(recipe, opened, index)
    stage.to(device=device, dtype=dtype).train()
    frames = stage.window_frames(recipe.data.context_frames)
    trained = {n: p for n, p in stage.named_parameters() if p.requires_grad}
    if not trained:
        raise CheckFailed(f"{stage_name(recipe, index)} trains no parameter at all")
    for reader in opened.readers_of(recipe, recipe.data_of(index)):
        batch = first_batch(reader, "train", window_frames=frames, batch_size=2)
        stage.zero_grad(set_to_none=True)
        with autocast(recipe.engine.precision, device):
            loss = stage([batch.to(device, dtype)]).total
        where = f"{stage_name(recipe, index)}, task '{reader.task.name}'"
        if not bool(torch.isfinite(loss)):
            raise CheckFailed(f"the first loss is {loss.item()} ({where})", hint="check the data and engine.precision")
        loss.backward()
        unused = [name for name, p in trained.items() if p.grad is None]
        if unused:
            more = f" and {len(unused) - _MOST_SHOWN} more" if len(unused) > _MOST_SHOWN else ""
            raise CheckFailed(
                f"{len(unused)} trained parameters get no gradient ({where}): {', '.join(unused[:_MOST_SHOWN])}{more}",
                means="they are never learned, and ranks that wait for their gradients stop with an error or forever",
                hint="use them in every forward pass, or leave them out of the trained modules of the stage",
            )
        broken = [n for n, p in trained.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        if broken:
            raise CheckFailed(
                f"gradients are not finite ({where}): {', '.join(broken[:_MOST_SHOWN])}",
                hint="try engine.precision=float32, and look at the data with `ups data validate`",
            )
    report.facts[f"stage_{index}"] = {"trained_tensors": len(trained)}
    report.says = f"all {len(trained)} trained tensors get a finite gradient from every task"
