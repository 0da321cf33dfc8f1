"""From a recipe to what its stages need: opens the data, finds the kinds of micro-batches, rehearses each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ups.config.schema import EngineConfig, Recipe
from ups.plan.rehearsal import Kind, Rehearsal, rehearse
from ups.run.assemble import OpenData, bare_stage, stage_loader
from ups.spec.place import Place

# Steps of a mixture that are looked at to see which micro-batches come how often.
_STEPS = 64


def kinds_of(recipe: Recipe, opened: OpenData, index: int, ranks: int) -> list[Kind]:
    """The kinds of micro-batches that the first of `ranks` ranks sees in stage `index`, with one real batch of each."""
    _, stage = bare_stage(recipe, opened, index, device="meta")
    with stage_loader(recipe, opened, Place(0, ranks, 0, ranks), index, stage) as loader:
        source = loader.source
        first: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
        often: Counter[tuple[tuple[int, int], ...]] = Counter()
        for step in range(_STEPS):
            number = source.first(step)
            for parts in source.layout(step):
                tasks = [source.sampler.locate(step, slot)[0] for slot, _ in parts]
                key = tuple((task, source.cuts[task].micro_batch) for task in tasks)
                often[key] += 1
                first.setdefault(key, tuple(range(number, number + len(parts))))
                number += len(parts)
        kinds = []
        for key, numbers in first.items():
            loader._numbers = iter(numbers)
            batches = tuple(loader._part() for _ in numbers)
            kinds.append(Kind(batches, tuple(size for _, size in key), often[key] / _STEPS))
    # The largest first: what it needs is then seen in both steps of a rehearsal.
    return sorted(kinds, key=lambda kind: -sum(b.state.numel() + b.target.numel() for b in kind.batches))


def rehearse_stage(
    recipe: Recipe,
    opened: OpenData,
    index: int,
    ranks: int,
    kinds: Sequence[Kind],
    *,
    micro_batch: int | None = None,
    engine: EngineConfig | None = None,
) -> Rehearsal:
    """What stage `index` needs on one of `ranks` ranks. micro_batch: another limit of windows in a pass."""
    _, stage = bare_stage(recipe, opened, index, device="meta")
    if micro_batch is not None:
        kinds = [replace(kind, samples=tuple(min(n, micro_batch) for n in kind.samples)) for kind in kinds]
    with torch.random.fork_rng(devices=[]):
        return rehearse(stage, kinds, ranks, engine or recipe.engine, recipe.stages[index])
