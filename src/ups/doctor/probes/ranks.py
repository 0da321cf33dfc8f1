"""Checks `group`, `collective` and `samples`: ranks find each other, sum correctly, and share the data of a step.

samples: over all ranks, the windows of a step are the global batch of the recipe, each exactly once. Every pass over a
task has its own order, and random draws belong to windows, not to ranks.
"""

from __future__ import annotations

import itertools
import os
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from ups.config.schema import EngineConfig, Recipe
from ups.data.loader import Loader
from ups.data.sampler import Sampler
from ups.distributed.agreement import from_all
from ups.distributed.runtime import Runtime
from ups.doctor.probes.check import TIMEOUT_SECONDS, Assignment
from ups.doctor.probes.parts import open_run_data, quick
from ups.record.text import counted, size_text
from ups.run.assemble import OpenData, bare_stage, stage_loader
from ups.run.preflight import CheckFailed, Report
from ups.spec.batch import RankInfo
from ups.spec.task import TaskSpec
from ups.training import augment

LARGE_BYTES = 64 << 20
# 64 MB in longer than this would make a step of a small model wait for seconds: something is badly set up.
SLOW_SECONDS = 10.0


def check_group(assignment: Assignment, report: Report) -> None:
    """As many ranks as asked for, each with a number of its own. Collective: all ranks."""
    config = assignment.recipe.engine if assignment.recipe else EngineConfig()
    started = time.monotonic()
    config = config.model_copy(update={"timeout_seconds": TIMEOUT_SECONDS})
    runtime = assignment.shared["runtime"] = assignment.stack.enter_context(Runtime.start(config))
    seconds = time.monotonic() - started
    if runtime.control_group is None:
        report.says = "one rank: no process group is needed"
        return
    seen = from_all((runtime.rank, os.getpid(), runtime.device.type), runtime.control_group)
    if sorted(rank for rank, _, _ in seen) != list(range(assignment.ranks)):
        raise CheckFailed(f"asked for {assignment.ranks} ranks, found {sorted(rank for rank, _, _ in seen)}")
    if len({kind for _, _, kind in seen}) > 1:
        raise CheckFailed(f"ranks are on different kinds of devices: {[kind for _, _, kind in seen]}")
    backend = "nccl" if runtime.device.type == "cuda" else "gloo"
    report.facts |= {"backend": backend, "start_seconds": round(seconds, 2), "strategy": runtime.strategy}
    report.says = f"{len(seen)} ranks found each other and joined with {backend}, strategy {runtime.strategy}"


def check_collective(assignment: Assignment, report: Report) -> None:
    """A small and a large sum, checked for value and speed. Collective: all ranks."""
    runtime: Runtime = assignment.shared["runtime"]
    if runtime.control_group is None:
        report.says = "one rank: nothing to reduce"
        return
    world, rank = runtime.world_size, runtime.rank
    small = torch.full((8,), float(rank + 1), device=runtime.device)
    dist.all_reduce(small)
    expected = world * (world + 1) / 2
    if not bool((small == expected).all()):
        raise CheckFailed(f"the sum of 1 to {world} over all ranks is {small[0].item()}, not {expected}")
    large = torch.ones(LARGE_BYTES // 4, device=runtime.device) * (rank + 1)
    dist.all_reduce(torch.ones(LARGE_BYTES // 4, device=runtime.device))  # the first one opens connections
    started = time.monotonic()
    dist.all_reduce(large)
    if runtime.device.type == "cuda":
        torch.cuda.synchronize()
    seconds = time.monotonic() - started
    wrong = int((large != expected).sum())
    if wrong:
        raise CheckFailed(
            f"an all-reduce of {size_text(LARGE_BYTES)} gave {wrong} wrong numbers",
            means="the transport between ranks corrupts data",
            hint="try another interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME), or NCCL_P2P_DISABLE=1",
        )
    rate = LARGE_BYTES / seconds
    report.facts |= {"bytes": LARGE_BYTES, "seconds": round(seconds, 4), "bytes_per_second": round(rate)}
    if seconds > SLOW_SECONDS:
        report.warnings.append(f"64 MB took {seconds:.1f} s to reduce: each step waits for that")
    report.says = f"sums are right; 64 MB in {seconds * 1000:.0f} ms ({size_text(rate)} a second)"


NUM_STEPS = 4
# Ranks whose draws agree in so many bits agree not by chance.
_SURE_BITS = 30
_BITS_OF_A_DRAW = 9

# (step, slot) of a rank -> task, window numbers, draws
Seen = dict[tuple[int, int], tuple[int, list[int], list[int]]]


def check_samples(assignment: Assignment, report: Report) -> None:
    """What every rank would read in each stage. Collective: all ranks."""
    recipe = quick(assignment.run)
    with Runtime.start(recipe.engine) as runtime, open_run_data(assignment) as opened:
        for index in range(len(recipe.stages)):
            check_samples_of(recipe, opened, runtime, index, report)


def check_samples_of(recipe: Recipe, opened: OpenData, runtime: Runtime, index: int, report: Report) -> None:
    """One stage. Collective: all ranks."""
    _, stage = bare_stage(recipe, opened, index, device="meta")
    with stage_loader(recipe, opened, runtime.place, index, stage) as loader:
        mine = planned(loader, stage.seed)
        delivered = next(loader)[0].numbers.tolist()
    with stage_loader(recipe, opened, RankInfo(0, 1), index, stage) as alone:
        reference = planned(alone, stage.seed)
        sizes = [len(window_index) for window_index in alone.source.indexes]
        names = [reader.task.name for reader in alone.source.readers]
        sampler = alone.source.sampler
    if delivered != loader.source.plan(0).numbers.tolist():
        raise CheckFailed(
            f"rank {runtime.rank} was to read windows {loader.source.plan(0).numbers}, and read {delivered}"
        )
    everyone: list[Seen] = from_all(mine, runtime.control_group)
    check_batch(recipe.data_of(index).batch_sizes, everyone, reference)
    check_draws(everyone, reference)
    check_order(sampler, names, sizes)
    total = sum(sampler.batch_sizes[task] for task in sampler.tasks_of_step(0))
    report.facts[f"stage_{index}"] = {"windows": sizes, "global_batch": total, "fingerprint": sampler.fingerprint}
    report.says = (
        f"{counted(runtime.world_size, 'rank')} read {total} windows a step without overlap; order and draws are "
        "as they must be"
    )


def planned(loader: Loader, seed: int) -> Seen:
    """What this loader delivers in the first steps, and the draws of its windows, micro-batch by micro-batch."""
    seen: Seen = {}
    for number in itertools.takewhile(lambda n: n < loader.source.first(NUM_STEPS), loader.source.numbers(0)):
        plan = loader.source.plan(number)
        task = loader.source.readers[plan.task].task
        _, numbers, drawn = seen.setdefault((plan.step, plan.slot), (plan.task, [], []))
        if plan.weight:
            numbers.extend(plan.numbers.tolist())
            drawn.extend(draws(task, plan.numbers, plan.step, seed))
    return seen


def check_batch(batch_sizes: Sequence[int], everyone: Sequence[Seen], reference: Seen) -> None:
    """Same task on all ranks, no overlap, and together exactly the block that one rank alone would read."""
    world = len(everyone)
    for (step, slot), (task, expected, _) in reference.items():
        size = batch_sizes[task]
        parts = [seen.get((step, slot), (task, [], [])) for seen in everyone]
        if any(part[0] != task for part in parts):
            raise CheckFailed(f"ranks have different tasks at step {step}, slot {slot}: {[part[0] for part in parts]}")
        lengths = [len(part[1]) for part in parts]
        if sum(lengths) != size or len(expected) != size:
            raise CheckFailed(
                f"a block of step {step} has {sum(lengths)} windows over {world} ranks and {len(expected)} on one, and "
                f"the recipe says batch_size is {size}",
                means="the batch changes with the number of ranks, so results of two world sizes cannot be compared",
                hint="the global batch stands in the recipe; ranks only cut it",
            )
        union, once = Counter(n for part in parts for n in part[1]), Counter(expected)
        if union != once and all(part[1] == parts[0][1] for part in parts):
            raise CheckFailed(
                f"all {world} ranks read the same windows at step {step}: {parts[0][1][:6]} ...",
                means=f"{world} ranks would do the work of one: each sample is learned {world} times, the rest never",
                hint="give every loader the RankInfo of its own rank (ups.distributed.runtime makes it)",
            )
        if union != once:
            twice, missing = sorted((union - once).elements()), sorted((once - union).elements())
            raise CheckFailed(
                f"the windows of step {step} over all ranks are not the block of one rank: {twice[:6]} too often, "
                f"{missing[:6]} missing",
                means="some samples are learned more often than others",
            )


def check_draws(everyone: Sequence[Seen], reference: Seen) -> None:
    """A draw belongs to a window: other windows on other ranks draw otherwise, and the cut changes nothing."""
    for rank, seen in enumerate(everyone):
        for other in range(rank):
            pairs = [(seen[at], everyone[other][at]) for at in seen.keys() & everyone[other].keys()]
            differ = [(a[2], b[2]) for a, b in pairs if a[1] != b[1]]
            bits = _BITS_OF_A_DRAW * sum(len(a) for a, _ in differ)
            if bits >= _SURE_BITS and all(a == b for a, b in differ):
                raise CheckFailed(
                    f"ranks {other} and {rank} draw the same random numbers for different windows",
                    means="noise and augmentation would be copies of each other: a smaller batch than it seems",
                    hint="key every draw by seed, step and window number (ups.spec.keyed), never by a cloned generator",
                )
    for rank, seen in enumerate(everyone):
        for (step, slot), (_, numbers, drawn) in seen.items():
            known = dict(zip(reference[step, slot][1], reference[step, slot][2], strict=True))
            wrong = [n for n, d in zip(numbers, drawn, strict=True) if known.get(n) != d]
            if wrong:
                raise CheckFailed(
                    f"window {wrong[0]} of step {step} has another random draw on rank {rank} than in a world of one",
                    means="results would depend on the number of ranks and on the micro-batch",
                    hint="key every draw by seed, step and window number (ups.spec.keyed)",
                )


def check_order(sampler: Sampler, names: Sequence[str], sizes: Sequence[int]) -> None:
    """The order of windows differs from pass to pass."""
    for task, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if same_in_every_pass(sampler, task, size):
            raise CheckFailed(
                f"task '{name}' comes in the same order in every pass",
                means="batches repeat their composition from pass to pass, which costs accuracy and shows nowhere",
                hint="the number of the pass must be part of the key of the order (ups.data.permutation)",
            )


# A draw is read as one of so many numbers: about ten of its bits.
POINTS = 1009


def same_in_every_pass(sampler: Sampler, task: int, size: int, passes: int = 3, count: int = 64) -> bool:
    """Whether the first windows of several passes come in the same order; never for so few that chance could do it."""
    count = min(count, size)
    starts = [number * size for number in range(passes)]
    orders = [sampler.windows(task, start, start + count).tolist() for start in starts]
    return count >= 5 and all(order == orders[0] for order in orders)


def draws(task: TaskSpec, numbers: np.ndarray[tuple[int], np.dtype[np.int64]], step: int, seed: int) -> list[int]:
    """The first draw of the augmentation for each window (B,), as training makes it, in about ten bits."""
    values = augment.draws_of(task, numbers, step, seed)
    return [int(v) for v in np.floor(values[:, 0] * POINTS)]
