"""Checks `alone`, `parity`, `equal` and `evaluation`: one rank trains, and many ranks are one. All in float64.

alone, in the process of the check `model`: what many ranks are compared with later. parity: weights at the start,
gradient and learning rates are those of one rank with the same global batch. equal: after the steps, parameters and
buffers are the same on all ranks. evaluation: every held-out trajectory is scored once, and the scores are those of one
rank.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence

from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ups.config.schema import Recipe
from ups.distributed.agreement import from_all
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.doctor.probes.check import Assignment
from ups.doctor.probes.parts import (
    FACTS,
    TENSORS,
    Capture,
    compare_gradients,
    exact,
    move_weights,
    open_run_data,
    plain_gradient,
    quick,
    run_steps,
    scored_trajectories,
    stage_name,
    validation_scores,
    weights_of,
)
from ups.record.text import counted
from ups.run.assemble import OpenData, assemble
from ups.run.preflight import CheckFailed, Report
from ups.training.progress import Progress

_SHOWN = 6
_SCORE_TOLERANCE = 1e-6


def check_alone(assignment: Assignment, report: Report) -> None:
    """Two steps of each stage on one rank in float64, kept for the comparison with many ranks."""
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
            compare_gradients(
                capture.gradients, plain, f"the gradient of one rank in {stage_name(recipe, index)}", counts
            )
            for kind, tensors in (("weights", weights), ("gradients", plain)):
                save_file(tensors, assignment.work_dir / TENSORS.format(kind, index))
            facts[f"rates_{index}"] = capture.rates
    (assignment.work_dir / FACTS).write_text(json.dumps(facts))
    report.facts |= facts
    report.says = f"one rank trained {counted(len(recipe.stages), 'stage')} for two steps, with the right gradients"


def check_parity(assignment: Assignment, report: Report) -> None:
    """Two steps of every stage against those of one rank. Collective: all ranks."""
    recipe = exact(assignment.run, assignment.ranks)
    runtime = assignment.shared["runtime"] = assignment.stack.enter_context(Runtime.start(recipe.engine))
    opened = assignment.shared["opened"] = assignment.stack.enter_context(open_run_data(assignment))
    stages = range(len(recipe.stages))
    assignment.shared["trained"] = [train_alike(assignment, recipe, opened, runtime, i, report) for i in stages]


def train_alike(
    assignment: Assignment, recipe: Recipe, opened: OpenData, runtime: Runtime, index: int, report: Report
) -> nn.Module:
    """Two steps of one stage against those of one rank; returns the trained module. Collective: all ranks."""
    paths = [assignment.work_dir / TENSORS.format(kind, index) for kind in ("weights", "gradients")]
    weights, gradients = map(load_file, paths)
    where = stage_name(recipe, index)

    def after_first(reduced: dict[str, Tensor]) -> None:
        # Between two steps all ranks are here, so they may compare; a rank that differs would stop the next step.
        refuse_differences(reduced, runtime, "ranks hold different gradients after the reduction", **_INDEPENDENT)
        counts = {
            "ranks": runtime.world_size,
            "micro-batches of a rank in a step": parts.loader.batches_in_step(0),
            "micro-batches of a rank in a block": len(parts.loader.source.cut.parts((0,))[0]),
            "blocks in a step": recipe.data_of(index).blocks_per_step,
        }
        what = f"the gradient of {counted(runtime.world_size, 'rank')} in {where}"
        report.facts[f"distance_{index}"] = compare_gradients(reduced, gradients, what, counts)

    capture = Capture(after_first)
    at = Progress(stage_index=index)
    with assemble(recipe, opened, runtime, at, hooks=[capture], change=move_weights) as parts:
        check_same_start(weights_of(parts), weights, where)
        run_steps(parts)
    expected = json.loads((assignment.work_dir / FACTS).read_text())[f"rates_{index}"]
    if not same_rates(capture.rates, expected):
        raise CheckFailed(
            f"the learning rates of {counted(runtime.world_size, 'rank')} are {capture.rates}, of one rank {expected} "
            f"({where})",
            means="the learning rate changes with the number of ranks: two world sizes are two experiments",
            hint="the learning rate and the global batch stand in the recipe, and nothing may scale them",
        )
    report.says = (
        f"gradients of {counted(runtime.world_size, 'rank')} are those of one to {max(report.facts.values()):.1e}, "
        "learning rates and weights too"
    )
    if any(stage.optim.type == "muon" for stage in recipe.stages):
        report.says += " (weights as they start: Muon's updates amplify rounding, so later ones are not compared)"
    return parts.stage


def same_rates(rates: Sequence[Sequence[float]], expected: Sequence[Sequence[float]]) -> bool:
    """Whether the learning rates of each step and parameter group agree."""
    pairs = [pair for x, y in zip(rates, expected, strict=True) for pair in zip(x, y, strict=True)]
    return all(abs(a - b) <= 1e-12 * abs(b) for a, b in pairs)


def check_same_start(start: dict[str, Tensor], weights: dict[str, Tensor], where: str) -> None:
    """Every rank begins with the weights of the seed."""
    wrong = [n for n in weights if n not in start or not bool((start[n] == weights[n]).all())]
    if wrong:
        raise CheckFailed(
            f"{len(wrong)} parameters begin with other values than on one rank ({where}): {', '.join(wrong[:_SHOWN])}",
            means="weights depend on the rank or on the world size",
            hint="draw weights under the seed of the recipe only (ups.models.build)",
        )


_INDEPENDENT = {
    "means": "every rank trains a model of its own, of which one is kept",
    "hint": "call the module that the strategy wraps (strategy.module), never the stage itself",
}


def refuse_differences(tensors: Mapping[str, Tensor], runtime: Runtime, what: str, *, means: str, hint: str) -> None:
    """Refuse tensors that are not the same bits on all ranks. Collective: all ranks."""
    different = names_that_differ({name: digest(tensor) for name, tensor in tensors.items()}, runtime)
    if different:
        names = f"{', '.join(different[:_SHOWN])} ({len(different)} of {len(tensors)})"
        raise CheckFailed(f"{what}: {names}", means=means, hint=hint)


def check_equal(assignment: Assignment, report: Report) -> None:
    """Parameters (where they are whole) and buffers of each stage after two steps. Collective: all ranks."""
    runtime: Runtime = assignment.shared["runtime"]
    for module in assignment.shared["trained"]:
        tensors = {n: p for n, p in module.named_parameters() if not isinstance(p, DTensor)}
        refuse_differences(tensors, runtime, "after two steps ranks have different parameters", **_INDEPENDENT)
        buffers = dict(module.named_buffers())
        refuse_differences(
            buffers,
            runtime,
            "after two steps ranks have different buffers",
            means="running statistics (BatchNorm) are of each rank's own samples: the saved model is rank 0's alone",
            hint="use a norm without running statistics (LayerNorm, GroupNorm, RMSNorm), or SyncBatchNorm",
        )
        report.facts |= {"parameters": len(tensors), "buffers": len(buffers)}
        report.says = f"{len(tensors)} parameters and {len(buffers)} buffers are the same bits on all ranks"


def digest(tensor: Tensor) -> str:
    """SHA-256 of the bytes of a tensor."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def names_that_differ(digests: dict[str, str], runtime: Runtime) -> list[str]:
    """Names whose digest is not the same on all ranks, or that not all ranks have. Collective: all ranks."""
    everyone = from_all(digests, runtime.control_group)
    names = sorted({name for one in everyone for name in one})
    return [name for name in names if len({one.get(name) for one in everyone}) > 1]


def check_evaluation(assignment: Assignment, report: Report) -> None:
    """Every trajectory counts once, and scores are those of one rank. Collective: all ranks."""
    recipe, opened = exact(assignment.run, assignment.ranks), assignment.shared["opened"]
    runtime: Runtime = assignment.shared["runtime"]
    limit, few = (one.evaluate.max_trajectories for one in (assignment.run, recipe))
    total = compared = 0
    for reader in opened.readers:
        count = reader.splits.get("valid", 0)
        if not count:
            continue
        mine = scored_trajectories(reader, runtime.place, recipe.data.context_frames, limit)
        check_once(reader.task.name, from_all(list(mine), runtime.control_group), min(limit, count))
        total += min(limit, count)
        compared += min(few, count)
    last = Progress(stage_index=len(recipe.stages) - 1)
    with assemble(recipe, opened, runtime, last, change=move_weights) as parts:
        scores = validation_scores(recipe, opened, parts)
    alone = json.loads((assignment.work_dir / FACTS).read_text())["scores"]
    check_scores(from_all(scores, runtime.control_group), alone)
    report.facts["scores"] = scores
    which = "with the scores of one rank" if compared == total else f"{compared} of them with the scores of one rank"
    report.says = f"{total} held-out trajectories are scored once each, {which}"


def check_once(task: str, by_rank: Sequence[Sequence[int]], expected: int) -> None:
    """Refuse a trajectory that is scored twice or never."""
    counts = Counter(t for mine in by_rank for t in mine)
    twice = sorted(t for t, n in counts.items() if n > 1)
    missing = sorted(set(range(expected)) - set(counts))
    if twice or missing or len(counts) != expected:
        raise CheckFailed(
            f"task '{task}' has {expected} trajectories to score, and {sum(counts.values())} were: "
            f"{twice[:_SHOWN]} twice, {missing[:_SHOWN]} never",
            means="metrics would depend on the number of ranks: padded samples count twice",
            hint="give rank r the trajectories r, r + ranks, ... without padding, and divide by what was counted",
        )


def check_scores(by_rank: Sequence[dict[str, float]], alone: dict[str, float]) -> None:
    """Every rank reports the scores that one rank alone finds."""
    for rank, scores in enumerate(by_rank):
        if scores.keys() != alone.keys():
            raise CheckFailed(f"rank {rank} reports {sorted(scores)}, one rank alone {sorted(alone)}")
        for name, value in alone.items():
            both = (scores[name], value)
            if not math.isclose(*both, rel_tol=_SCORE_TOLERANCE, abs_tol=1e-18) and not all(map(math.isnan, both)):
                raise CheckFailed(
                    f"{name} is {scores[name]:.8g} on rank {rank} of {len(by_rank)}, and {value:.8g} on one rank",
                    means="validation is not reduced over ranks, or weighs samples by who scored them",
                    hint="reduce sums and counts over all ranks, then divide",
                )
