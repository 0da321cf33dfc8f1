"""Check `samples`: over all ranks, the windows of a step are the global batch of the recipe, each exactly once.

Also: every pass over a task has its own order, and random draws belong to windows, not to ranks.
"""

from __future__ import annotations

import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ups.doctor.probes.check import CheckFailed, Report, begin_check, counted, start

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.data.loader import Loader
    from ups.distributed.runtime import Runtime
    from ups.run.assemble import OpenData

NUM_STEPS = 4
# Ranks whose draws agree in so many bits agree not by chance.
_SURE_BITS = 30
_BITS_OF_A_DRAW = 9

# (step, slot) of a rank -> task, window numbers, draws
Seen = dict[tuple[int, int], tuple[int, list[int], list[int]]]


def main() -> None:
    """Gather what every rank would read."""
    assignment = start(sys.argv[1:])
    with begin_check("samples") as report:
        from ups.distributed.runtime import Runtime
        from ups.doctor.probes.parts import open_run_data, quick

        recipe = quick(assignment.run)
        with Runtime.start(recipe.engine) as runtime, open_run_data(assignment) as opened:
            for index in range(len(recipe.stages)):
                check(recipe, opened, runtime, index, report)


def check(recipe: Recipe, opened: OpenData, runtime: Runtime, index: int, report: Report) -> None:
    """One stage. Collective: all ranks."""
    from ups.distributed.agreement import from_all
    from ups.run.assemble import bare_stage, stage_loader
    from ups.spec.batch import RankInfo

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
    from ups.doctor.probes.orders import draws

    found: Seen = {}
    for number in itertools.takewhile(lambda n: n < loader.source.first(NUM_STEPS), loader.source.numbers(0)):
        plan = loader.source.plan(number)
        task = loader.source.readers[plan.task].task
        _, numbers, drawn = found.setdefault((plan.step, plan.slot), (plan.task, [], []))
        numbers.extend(plan.numbers.tolist())
        drawn.extend(draws(task, plan.numbers, plan.step, seed))
    return found


def check_batch(batch_sizes: Sequence[int], everyone: Sequence[Seen], reference: Seen) -> None:
    """Same task on all ranks, no overlap, and together exactly the block that one rank alone would read."""
    world = len(everyone)
    for (step, slot), (task, expected, _) in reference.items():
        size = batch_sizes[task]
        parts = [seen[step, slot] for seen in everyone]
        if any(part[0] != task for part in parts):
            raise CheckFailed(f"ranks have different tasks at step {step}, slot {slot}: {[part[0] for part in parts]}")
        lengths = [len(part[1]) for part in parts]
        if len(set(lengths)) > 1:
            raise CheckFailed(
                f"ranks have unequal numbers of windows at step {step}: {lengths}",
                means="ranks would wait for each other forever at the end of the shorter share",
            )
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
            pairs = [(seen[at], everyone[other][at]) for at in seen]
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


def check_order(sampler: object, names: Sequence[str], sizes: Sequence[int]) -> None:
    """The order of windows differs from pass to pass."""
    from ups.data.sampler import Sampler
    from ups.doctor.probes.orders import same_in_every_pass

    assert isinstance(sampler, Sampler)
    for task, (name, size) in enumerate(zip(names, sizes, strict=True)):
        if same_in_every_pass(sampler, task, size):
            raise CheckFailed(
                f"task '{name}' comes in the same order in every pass",
                means="batches repeat their composition from pass to pass, which costs accuracy and shows nowhere",
                hint="the number of the pass must be part of the key of the order (ups.data.permutation)",
            )


if __name__ == "__main__":
    main()
