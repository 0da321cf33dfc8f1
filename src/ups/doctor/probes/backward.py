"""Checks `backward` and `alone`: every trained parameter gets a finite gradient; one rank trains two exact steps.

What `alone` computes, in a process without other ranks, is what many ranks are compared with later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ups.doctor.probes.check import Assignment, CheckFailed, Report, counted

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.run.assemble import OpenData

_SHOWN = 8


def check(assignment: Assignment, report: Report) -> None:
    """Every stage of the recipe."""
    from ups.doctor.probes.parts import open_run_data

    with open_run_data(assignment) as opened:
        for index in range(len(assignment.run.stages)):
            check_stage(assignment.run, opened, index, report)


def check_stage(recipe: Recipe, opened: OpenData, index: int, report: Report) -> None:
    """Gradients of one micro-batch of each task, in the arithmetic of the recipe."""
    import torch

    from ups.data.loader import evaluation_batches
    from ups.distributed.environment import RankEnvironment
    from ups.distributed.runtime import choose_device
    from ups.distributed.strategies import autocast, weight_dtype
    from ups.doctor.probes.parts import stage_name
    from ups.run.assemble import bare_stage
    from ups.spec.batch import RankInfo

    device = choose_device(recipe.engine.device, RankEnvironment())
    dtype = weight_dtype(recipe.engine.precision)
    _, stage = bare_stage(recipe, opened, index)
    stage.to(device=device, dtype=dtype).train()
    frames = stage.window_frames(recipe.data.context_frames)
    trained = {n: p for n, p in stage.named_parameters() if p.requires_grad}
    if not trained:
        raise CheckFailed(f"{stage_name(recipe, index)} trains no parameter at all")
    for reader in opened.readers_of(recipe, recipe.data_of(index)):
        batch, _ = next(evaluation_batches(reader, "train", RankInfo(0, 1), window_frames=frames, batch_size=2))
        stage.zero_grad(set_to_none=True)
        with autocast(recipe.engine.precision, device):
            loss = stage([batch.to(device, dtype)]).total
        where = f"{stage_name(recipe, index)}, task '{reader.task.name}'"
        if not bool(torch.isfinite(loss)):
            raise CheckFailed(f"the first loss is {loss.item()} ({where})", hint="check the data and engine.precision")
        loss.backward()
        unused = [name for name, p in trained.items() if p.grad is None]
        if unused:
            more = f" and {len(unused) - _SHOWN} more" if len(unused) > _SHOWN else ""
            raise CheckFailed(
                f"{len(unused)} trained parameters get no gradient ({where}): {', '.join(unused[:_SHOWN])}{more}",
                means="they are never learned, and ranks that wait for their gradients stop with an error or forever",
                hint="use them in every forward pass, or leave them out of the trained modules of the stage",
            )
        broken = [n for n, p in trained.items() if p.grad is not None and not bool(torch.isfinite(p.grad).all())]
        if broken:
            raise CheckFailed(
                f"gradients are not finite ({where}): {', '.join(broken[:_SHOWN])}",
                hint="try engine.precision=float32, and look at the data with `ups data validate`",
            )
    report.facts[f"stage_{index}"] = {"trained_tensors": len(trained)}
    report.says = f"all {len(trained)} trained tensors get a finite gradient from every task"


def train_alone(assignment: Assignment, report: Report) -> None:
    """Two steps of each stage on one rank in float64, kept for the comparison with many ranks."""
    from ups.distributed.environment import RankEnvironment
    from ups.distributed.runtime import Runtime
    from ups.doctor.probes.capture import Capture, keep_alone, keep_facts, plain_gradient, weights_of
    from ups.doctor.probes.compare import check_equal
    from ups.doctor.probes.parts import exact, move_weights, open_run_data, quick, run_steps, stage_name
    from ups.doctor.probes.scores import validation_scores
    from ups.run.assemble import assemble
    from ups.training.progress import Progress

    recipe = quick(exact(assignment.run, assignment.ranks), strategy="single", device="cpu", micro_batch_size=None)
    facts: dict[str, object] = {}
    with Runtime.start(recipe.engine, RankEnvironment()) as runtime, open_run_data(assignment) as opened:
        for index in range(len(recipe.stages)):
            capture = Capture()
            at = Progress(stage_index=index)
            with assemble(recipe, opened, runtime, at, hooks=[capture], change=move_weights) as parts:
                weights = weights_of(parts)
                parts.engine.begin()
                plain = plain_gradient(parts)
                if index == len(recipe.stages) - 1:
                    facts["scores"] = validation_scores(recipe, opened, parts)
                run_steps(parts)
            counts = {"blocks in a step": recipe.data_of(index).blocks_per_step}
            check_equal(capture.gradients, plain, f"the gradient of one rank in {stage_name(recipe, index)}", counts)
            keep_alone(assignment.work_dir, index, weights, plain)
            facts[f"rates_{index}"] = capture.rates
    keep_facts(assignment.work_dir, facts)
    report.facts |= facts
    report.says = f"one rank trained {counted(len(recipe.stages), 'stage')} for two steps, with the right gradients"
