"""From a recipe to what its stages need: opens the data, finds the kinds of micro-batches, rehearses each stage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from ups.config.schema import Recipe
from ups.data.sampler import Cut
from ups.plan.devices import Device
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
                key = tuple((task, source.cuts[task].micro_batch_size) for task in tasks)
                often[key] += 1
                first.setdefault(key, tuple(range(number, number + len(parts))))
                number += len(parts)
        kinds = []
        for key, numbers in first.items():
            loader._numbers = iter(numbers)
            batches = tuple(loader._part() for _ in numbers)
            kinds.append(Kind(batches, tuple(size for _, size in key), often[key] / _STEPS))
    # The largest last: with the gradients of those before it, as it comes in a step sooner or later.
    return sorted(kinds, key=lambda kind: sum(b.state.numel() + b.target.numel() for b in kind.batches))


def rehearse_stage(recipe: Recipe, opened: OpenData, index: int, ranks: int, kinds: Sequence[Kind]) -> Rehearsal:
    """What stage `index` needs on one of `ranks` ranks."""
    _, stage = bare_stage(recipe, opened, index, device="meta")
    with torch.random.fork_rng(devices=[]):
        return rehearse(stage, kinds, ranks, recipe.engine, recipe.stages[index])


def device_bytes(found: Rehearsal, offloaded: bool) -> int:
    """The most that a stage holds in the memory of its device; `offloaded`: the state is in that of the host."""
    return found.needed_bytes - (found.state_bytes if offloaded else 0)


def largest_micro_batch(
    recipe: Recipe, opened: OpenData, index: int, ranks: int, usable_bytes: int, *, offloaded: bool = False
) -> int | None:
    """Most windows of a task in a pass with which stage `index` fits on a rank; None if not even one does.

    Rehearsed, not extrapolated: of the sizes that cut the share of a rank evenly, the list is halved until one is left.
    A rank never takes more than its share, whatever the memory.
    """
    place = Place(0, ranks, 0, ranks)
    share = max(Cut.of(size, place).share for size in recipe.data_of(index).batch_sizes)
    sizes = [n for n in range(1, share + 1) if share % n == 0]

    def fits(size: int) -> bool:
        tried = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"micro_batch_size": size})})
        found = rehearse_stage(tried, opened, index, ranks, kinds_of(tried, opened, index, ranks))
        return device_bytes(found, offloaded) <= usable_bytes

    if fits(sizes[-1]):  # the usual case, and then the only one that is tried
        return sizes[-1]
    low, high = 0, len(sizes) - 1  # sizes[:low] fit, sizes[high:] do not
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low - 1] if low else None


def step_seconds(found: Rehearsal, kinds: Sequence[Kind], device: Device) -> float:
    """Seconds of arithmetic of one step on one rank: all its micro-batches, then the update."""
    return sum(pass_seconds(found, kinds, device)) + device.seconds(found.update)


def pass_seconds(found: Rehearsal, kinds: Sequence[Kind], device: Device) -> tuple[float, float]:
    """Seconds of all forward and of all backward passes of a step on one rank."""
    forward = sum(k.per_step * device.seconds(one) for k, one in zip(kinds, found.forward, strict=True))
    backward = sum(k.per_step * device.seconds(one) for k, one in zip(kinds, found.backward, strict=True))
    return forward, backward
