"""The plan of a run: what each stage needs on one rank, how long it takes, what failures and hours add.

Bytes and arithmetic are counted in a rehearsal of the real code (`ups.plan.rehearsal`). Seconds are made from them
with a table of devices, so they are estimates; `measure_steps` trains a few real steps instead.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ups.config.schema import Recipe
from ups.data.open import open_tasks
from ups.distributed.runtime import Runtime
from ups.evaluation.cost import break_even
from ups.evaluation.rollout import RolloutPlan
from ups.plan.devices import GPUS_PER_HOST, HOURS_BETWEEN_FAILURES, OF_FREE_MEMORY, Device, Outlook, outlook, traffic
from ups.plan.rehearsal import Kind, Rehearsal, rehearse
from ups.run.assemble import OpenData, assemble, bare_stage, stage_loader
from ups.run.directory import read_run_recipe, read_statistics
from ups.run.latent_caching import field_bytes
from ups.spec.batch import RankInfo
from ups.training.engine import Engine, Hook
from ups.training.progress import Progress

# Steps of a mixture that are looked at to see which micro-batches come how often.
_STEPS = 64


def kinds_of(recipe: Recipe, opened: OpenData, index: int, ranks: int) -> list[Kind]:
    """The kinds of micro-batches that the first of `ranks` ranks sees in stage `index`, with one real batch of each."""
    _, stage = bare_stage(recipe, opened, index, device="meta")
    with stage_loader(recipe, opened, RankInfo(0, ranks, 0, ranks), index, stage) as loader:
        source = loader.source
        first: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
        often: Counter[tuple[tuple[int, int], ...]] = Counter()
        for step in range(_STEPS):
            number = source.first(step)
            tasks = source.sampler.tasks_of_step(step)
            for parts in source.layout(step):
                rows = [source.rows(step, *part) for part in parts]
                sizes = [max(1, stop - start) for start, stop in rows]
                key = tuple((tasks[slot], size) for (slot, _), size in zip(parts, sizes, strict=True))
                often[key] += 1
                first.setdefault(key, tuple(range(number, number + len(parts))))
                number += len(parts)
        kinds = []
        for key, numbers in first.items():
            loader._numbers = iter(numbers)
            batches = tuple(loader._part(1.0) for _ in numbers)
            kinds.append(Kind(batches, tuple(size for _, size in key), often[key] / _STEPS))
    # The largest last: with the gradients of those before it, as it comes in a step sooner or later.
    return sorted(kinds, key=lambda kind: sum(b.state.numel() + b.target.numel() for b in kind.batches))


def rehearse_stage(recipe: Recipe, opened: OpenData, index: int, ranks: int, kinds: Sequence[Kind]) -> Rehearsal:
    """What stage `index` needs on one of `ranks` ranks."""
    _, stage = bare_stage(recipe, opened, index, device="meta")
    with torch.random.fork_rng(devices=[]):
        return rehearse(stage, kinds, ranks, recipe.engine, recipe.stages[index])


def device_bytes(rehearsal: Rehearsal, offloaded: bool) -> int:
    """The most that a stage holds in the memory of its device; `offloaded`: the state is in that of the host."""
    return rehearsal.needed_bytes - (rehearsal.state_bytes if offloaded else 0)


def largest_micro_batch(
    recipe: Recipe, opened: OpenData, index: int, ranks: int, usable_bytes: int, *, offloaded: bool = False
) -> int | None:
    """Most windows of a task in a pass with which stage `index` fits on a rank; None if not even one does.

    Rehearsed, not extrapolated: of the sizes that cut the share of a rank evenly, the list is halved until one is left.
    A rank never takes more than its share, whatever the memory.
    """
    share = max(-(-size // ranks) for size in recipe.data_of(index).batch_sizes)
    sizes = [n for n in range(1, share + 1) if share % n == 0]

    def fits(size: int) -> bool:
        tried = recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"micro_batch_size": size})})
        rehearsal = rehearse_stage(tried, opened, index, ranks, kinds_of(tried, opened, index, ranks))
        return device_bytes(rehearsal, offloaded) <= usable_bytes

    if fits(sizes[-1]):  # the usual case, and then the only one that is tried
        return sizes[-1]
    low, high = 0, len(sizes) - 1  # sizes[:low] fit, sizes[high:] do not
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if fits(sizes[middle]) else (low, middle)
    return sizes[low - 1] if low else None


def pass_seconds(rehearsal: Rehearsal, kinds: Sequence[Kind], device: Device) -> tuple[float, float]:
    """Seconds of all forward and of all backward passes of a step on one rank."""
    forward = sum(k.per_step * device.seconds(one) for k, one in zip(kinds, rehearsal.forward, strict=True))
    backward = sum(k.per_step * device.seconds(one) for k, one in zip(kinds, rehearsal.backward, strict=True))
    return forward, backward


# What a rank on a CPU holds besides tensors: Python, torch, kernels.
_PROCESS_BYTES = 600 << 20
# Assumed of the copy of a state into host memory, bytes per second.
_COPY_BANDWIDTH = 10e9


@dataclass(frozen=True)
class Circumstances:
    """What a plan is made for. Rates are bytes per second; the price is of one device.

    hours_between_failures: of one GPU, or of the machine whose CPU all ranks share; None: failures are left out.
    """

    ranks: int
    device: Device
    price_per_hour: float | None = None
    hours_between_failures: float | None = HOURS_BETWEEN_FAILURES
    restart_seconds: float = 120.0
    storage_bandwidth: float = 1e9

    @property
    def usable_bytes(self) -> int:
        """Memory of one rank."""
        return self.device.usable_bytes // (1 if self.device.queues else self.ranks)

    def outlook(self, save_seconds: float, write_seconds: float, interval: float = 0.0) -> Outlook | None:
        """What failures cost with saves every `interval` seconds of work; 0: Young's interval.

        write_seconds: from a save until it is complete, while training continues; work since then is lost as well.
        """
        if self.hours_between_failures is None:
            return None
        num_devices = self.ranks if self.device.queues else 1
        lost = self.restart_seconds + write_seconds
        return outlook(num_devices, self.hours_between_failures, save_seconds, lost, interval)


def plan_run(recipe: Recipe, opened: OpenData, setup: Circumstances) -> dict[str, Any]:
    """The plan as plain data: `stages` and `run`."""
    stages = [plan_stage(recipe, opened, index, setup) for index in range(len(recipe.stages))]
    seconds = [stage["seconds"] for stage in stages]
    save_bytes = max(stage["checkpoint_bytes"] for stage in stages)
    save_seconds = save_bytes / setup.storage_bandwidth
    # An asynchronous save stops the loop for the copy of what this rank holds, and writes while training continues.
    copied = max(stage["state_bytes"] for stage in stages) / _COPY_BANDWIDTH
    stops_seconds = copied if recipe.checkpoint.asynchronous else save_seconds
    longest = max(stages, key=lambda stage: stage["seconds"])
    step = longest["step"]["seconds"]
    configured = recipe.checkpoint.interval_steps
    write_seconds = save_seconds if recipe.checkpoint.asynchronous else 0.0
    young, as_is = (setup.outlook(stops_seconds, write_seconds, interval) for interval in (0.0, configured * step))
    effective = as_is.effective if as_is else configured * step / (configured * step + stops_seconds)
    hours = sum(seconds) / 3600 / effective if effective else float("inf")
    return {
        "device": {"name": setup.device.name, "source": setup.device.source, "memory_bytes": setup.device.memory_bytes},
        "ranks": setup.ranks,
        "hosts": math.ceil(setup.ranks / GPUS_PER_HOST) if setup.device.queues else 1,
        "network_bandwidth": setup.device.network_bandwidth,
        "strategy": recipe.engine.strategy_on(setup.ranks),
        "precision": recipe.engine.precision,
        "data_bytes": {reader.task.name: field_bytes(reader) for reader in opened.readers},
        "stages": stages,
        "checkpoints": {
            "bytes": save_bytes,
            "save_seconds": save_seconds,
            "stops_seconds": stops_seconds,
            "interval_steps": configured,
            "young_interval_steps": max(1, round(young.interval_seconds / step)) if young else None,
        },
        "failures": {
            "hours_between": young.failure_seconds / 3600 if young else None,
            "effective_part": effective,
            "effective_part_young": young.effective if young else None,
        },
        "training_seconds": sum(seconds),
        "hours": hours,
        "device_hours": hours * setup.ranks,
        "price": None if setup.price_per_hour is None else hours * setup.ranks * setup.price_per_hour,
    }


def plan_stage(recipe: Recipe, opened: OpenData, index: int, setup: Circumstances) -> dict[str, Any]:
    """What stage `index` needs on one rank, as plain data."""
    stage, device, ranks = recipe.stages[index], setup.device, setup.ranks
    kinds = kinds_of(recipe, opened, index, ranks)
    rehearsal = rehearse_stage(recipe, opened, index, ranks, kinds)
    forward, backward = pass_seconds(rehearsal, kinds, device)
    update = device.seconds(rehearsal.update)
    gathers_low = recipe.engine.precision == "bfloat16" and not recipe.engine.float32_fraction
    strategy = recipe.engine.strategy_on(ranks)
    shards = (recipe.engine.shard_ranks or ranks) if strategy == "fsdp" else 1  # ranks that have a copy of the model
    sent = traffic(
        strategy,
        ranks,
        shards,
        device,
        # fully_shard cuts rows: where a tensor has fewer rows than ranks, padding is sent as well.
        parameter_bytes=rehearsal.parameter_bytes * shards // (2 if gathers_low else 1),
        gradient_bytes=rehearsal.gradient_bytes * shards,
        units=rehearsal.units,
        passes=sum(kind.per_step for kind in kinds),
        forward_seconds=forward,
        backward_seconds=backward,
    )
    step = forward + backward + update + sent.exposed_seconds
    steps = stage.steps or max(1, round((stage.budget_seconds or 0.0) / step))
    peak = device_bytes(rehearsal, _offloaded(recipe, device))
    passes = zip(kinds, rehearsal.forward, rehearsal.backward, strict=True)
    flops = sum(k.per_step * op.flops for k, *both in passes for one in both for op in one)
    flops += sum(op.flops for op in rehearsal.update)
    weight_bytes = rehearsal.parameters * (8 if recipe.engine.precision == "float64" else 4)
    return {
        "type": stage.type,
        "parameters": rehearsal.parameters,
        "trained": rehearsal.trainable,
        "optimizer": stage.optim.type,
        "micro_batches": {"+".join(b.task.name for b in kind.batches): list(kind.samples) for kind in kinds},
        "memory_bytes": {
            "parameters": rehearsal.parameter_bytes,
            "gradients": rehearsal.gradient_bytes,
            "optimizer": rehearsal.optimizer_bytes,
            "average": rehearsal.average_bytes,
            "batch": rehearsal.batch_bytes,
            "activations": rehearsal.activation_bytes,
            "peak": peak,
            "usable": setup.usable_bytes,
        },
        "fits": peak <= setup.usable_bytes,
        "samples_of_a_rank": max(recipe.data_of(index).batch_sizes) // ranks,
        "largest_micro_batch": _largest(recipe, opened, index, setup, kinds, peak),
        "flops": flops,
        "step": {
            "seconds": step,
            "forward_seconds": forward,
            "backward_seconds": backward,
            "update_seconds": update,
            "sent_bytes": sent.sent_bytes,
            "communication_seconds": sent.seconds,
            "not_hidden_seconds": sent.exposed_seconds,
        },
        "steps": steps,
        "seconds": steps * step,
        "state_bytes": rehearsal.state_bytes,
        # Without the padding of shards.
        "checkpoint_bytes": round(rehearsal.state_bytes * weight_bytes / rehearsal.parameter_bytes),
    }


def _largest(
    recipe: Recipe, opened: OpenData, index: int, setup: Circumstances, kinds: Sequence[Kind], peak: int
) -> int | None:
    if recipe.engine.fixed_micro_batch_size is None and peak <= setup.usable_bytes:
        return max(n for kind in kinds for n in kind.samples)  # the whole share of a rank, which was just rehearsed
    return largest_micro_batch(
        recipe, opened, index, setup.ranks, setup.usable_bytes, offloaded=_offloaded(recipe, setup.device)
    )


def _offloaded(recipe: Recipe, device: Device) -> bool:
    """Whether weights and optimizer are somewhere else than the device that computes: on a CPU they never are."""
    return recipe.engine.offload and device.queues


def measure_stages(recipe: Recipe, opened: OpenData, steps: int = 4) -> list[dict[str, float]]:
    """CPU time of a real step of each stage on one rank of this machine, on one thread."""
    engine = recipe.engine.model_copy(update={"strategy": "single", "device": "cpu", "threads": 1})
    alone = recipe.model_copy(update={"engine": engine})
    with Runtime.start(engine) as runtime:
        return [
            {"step_seconds": measure_steps(alone, opened, runtime, index, steps)} for index in range(len(recipe.stages))
        ]


def predict_break_even(recipe: Recipe, opened: OpenData, training_seconds: float) -> dict[str, dict[str, Any]]:
    """Task -> what `ups.evaluation.cost` says before the training: measured costs, and a guess of the error."""
    model, _ = bare_stage(recipe, opened, len(recipe.stages) - 1)
    predicted = {}
    for reader in opened.readers:
        split = next(name for name in ("test", "valid", "train") if reader.splits.get(name))
        plan = RolloutPlan.whole(reader, recipe.data.context_frames, split=split)
        seconds = training_seconds / len(opened.readers)
        predicted[reader.task.name] = break_even(
            reader, plan, model.eval(), split=split, trained=False, training_seconds=seconds
        )
    return predicted


class _Clock(Hook):
    """A hook: CPU time of each step of this process."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._from = time.process_time()

    def after_step(self, engine: Engine, agreed: object) -> None:
        """Note the time since the last step."""
        now = time.process_time()
        self.seconds.append(now - self._from)
        self._from = now


def measure_steps(recipe: Recipe, opened: OpenData, runtime: Runtime, index: int, steps: int) -> float:
    """CPU time of a step of stage `index`: trains `steps`, of which the first warms up. Collective: all ranks."""
    stages = list(recipe.stages)
    stages[index] = stages[index].model_copy(update={"steps": steps, "budget_seconds": None})
    short = recipe.model_copy(update={"stages": stages})
    clock = _Clock()
    with assemble(short, opened, runtime, Progress(stage_index=index), hooks=[clock]) as parts:
        parts.engine.run()
    return statistics.median(clock.seconds[1:])


def usable_bytes(recipe: Recipe, host_bytes: int) -> tuple[int, bool]:
    """Bytes for the tensors of one rank, and whether they are those of a GPU."""
    if recipe.engine.device != "cpu" and torch.cuda.is_available():
        return int(OF_FREE_MEMORY * torch.cuda.mem_get_info(0)[0]), True
    return int(OF_FREE_MEMORY * host_bytes) - _PROCESS_BYTES, False


def main() -> None:
    """Print the largest micro-batch size with which every stage of a run fits: for `engine.micro_batch_size: auto`.

    In a process of its own: it needs torch, which the supervisor must not, and asks CUDA for free memory, which leaves
    a context on the device for as long as the process lives.
    """
    run_dir, ranks, host_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    recipe = read_run_recipe(run_dir).recipe
    usable, on_gpu = usable_bytes(recipe, host_bytes)
    smallest, at = None, 0
    with open_tasks(recipe.data) as readers:
        opened = OpenData(readers, read_statistics(run_dir, readers))
        for index in range(len(recipe.stages)):
            size = largest_micro_batch(recipe, opened, index, ranks, usable, offloaded=recipe.engine.offload and on_gpu)
            if smallest is None or size is None or size < smallest:
                smallest, at = size, index
            if size is None:
                break
    sys.stdout.write(json.dumps({"micro_batch_size": smallest, "stage": at, "usable_bytes": usable}) + "\n")


if __name__ == "__main__":
    main()
