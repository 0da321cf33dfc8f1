"""What checks of a run share: its data, hooks that leave early, quick or exact recipes, and comparisons with one rank.

A stage itself is put together by `ups.run.assemble`, as in a run. What one rank and many ranks must agree on (weights
at the start, gradient of the first step, learning rates, scores) is written by the check `alone` and compared by
`parity`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from ups.config.schema import Recipe
from ups.config.setting import Section
from ups.data.open import open_tasks
from ups.distributed.agreement import Status
from ups.distributed.strategies import gathered
from ups.doctor.probes.check import STATISTICS_NAME, TIMEOUT_SECONDS, Assignment
from ups.evaluation.rollout import RolloutPlan, score_task
from ups.formats.base import Reader
from ups.run.assemble import Assembled, OpenData, build_validation, open_data
from ups.run.preflight import CheckFailed
from ups.spec.batch import Batch, RankInfo
from ups.spec.keyed import key_of
from ups.spec.statistics import Statistics
from ups.training.engine import Engine, Hook
from ups.training.hooks import EvaluateHook
from ups.training.stages import Stage

_STEPS_OF_A_BUDGET = 1000


class Enough(Exception):
    """Leaves the engine between two steps, on all ranks after the same one."""


Part = TypeVar("Part", bound=Section)


def changed(section: Part, **settings: Any) -> Part:
    """A section with other settings, which are not checked."""
    return section.model_copy(update=settings)


def quick(recipe: Recipe, **engine: Any) -> Recipe:
    """The recipe with a short time-out on collectives, and with other settings of the engine where given."""
    seconds = min(recipe.engine.timeout_seconds, TIMEOUT_SECONDS)
    return changed(recipe, engine=changed(recipe.engine, timeout_seconds=seconds, max_seconds=None, **engine))


def exact(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe in float64 with a small global batch that every rank reads in two micro-batches where it can.

    Gradients of any number of ranks then agree to rounding, and accumulation is at work whatever the recipe says. No
    compilation, which would take a minute and changes no mathematics; no clipping, which would hide a wrong scale. A
    budget of seconds becomes a number of steps: rates that follow a clock differ between any two runs. Scores are of a
    few trajectories, and not of as many for each rank: whole rollouts in float64 can take minutes.
    """
    share = min(4, max(1, recipe.data.batch_size // ranks))
    micro = share // 2 if share % 2 == 0 else share
    counted = {"steps": _STEPS_OF_A_BUDGET, "budget_seconds": None, "budget_clock": "wall"}
    stages = [
        changed(
            stage,
            optim=changed(stage.optim, clip_norm=0.0, clip_ratio=0.0),
            batch_size=None,
            **(counted if stage.budget_seconds is not None else {}),
        )
        for stage in recipe.stages
    ]
    tasks = [changed(task, batch_size=None) for task in recipe.data.tasks]
    loader = changed(recipe.data.loader, workers=0)
    few = min(recipe.evaluate.max_trajectories, 4 * ranks + 1)
    return changed(
        quick(recipe, precision="float64", micro_batch_size=micro, compile=False),
        data=changed(recipe.data, tasks=tasks, batch_size=share * ranks, loader=loader),
        stages=stages,
        evaluate=changed(recipe.evaluate, max_trajectories=few),
    )


@contextlib.contextmanager
def open_run_data(assignment: Assignment) -> Iterator[OpenData]:
    """Readers and statistics; what the check `data` measured is used again."""
    if not (assignment.work_dir / STATISTICS_NAME).exists():
        with open_data(assignment.run) as opened:
            yield opened
        return
    measured = json.loads((assignment.work_dir / STATISTICS_NAME).read_text())
    with open_tasks(assignment.run.data) as readers:
        yield OpenData(readers, {name: Statistics.from_json(value) for name, value in measured.items()})


@torch.no_grad()
def move_weights(stage: Stage) -> None:
    """Add a little to every weight, by its name: a gate that starts at zero hides the gradients of all behind it."""
    for name, parameter in stage.named_parameters():
        generator = torch.Generator().manual_seed(key_of(stage.seed, "doctor", name) >> 1)
        parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


class StopAfter(Hook):
    """A hook that leaves after so many steps, or at the end of the stage."""

    def __init__(self, steps: int) -> None:
        self.last = steps

    def after_step(self, engine: Engine, agreed: Status) -> None:
        if engine.progress.stage_step >= self.last:
            raise Enough

    def at_end(self, engine: Engine) -> None:
        raise Enough


def run_steps(parts: Assembled) -> None:
    """Train until a hook has had enough. Collective: all ranks."""
    try:
        parts.engine.run()
    except Enough:
        return


def stage_name(recipe: Recipe, index: int) -> str:
    """'stage 0 (operator)'."""
    return f"stage {index} ({recipe.stages[index].type})"


NUM_STEPS = 2
# What one rank computed, for the comparison with many: weights and gradients of each stage, and rates and scores.
TENSORS = "alone_{}_{}.safetensors"
FACTS = "alone.json"


class Capture(StopAfter):
    """A hook that keeps the reduced gradient of the first step and the learning rates, and stops after two steps."""

    def __init__(self, after_first: Callable[[dict[str, Tensor]], None] | None = None) -> None:
        super().__init__(NUM_STEPS)
        self.gradients: dict[str, Tensor] = {}
        self.rates: list[list[float]] = []
        self._after_first = after_first

    def after_step(self, engine: Engine, agreed: Status) -> None:
        self.rates.append([float(group["lr"]) for group in engine.optimizer.param_groups])
        if len(self.rates) == 1:
            self.gradients = {n: whole(p.grad) for n, p in engine.parameters.items() if p.grad is not None}
            if self._after_first is not None:
                self._after_first(self.gradients)
        super().after_step(engine, agreed)


def whole(tensor: Tensor) -> Tensor:
    """A copy in host memory, gathered where it is sharded. Collective for a sharded tensor: all ranks."""
    return gathered(tensor).to("cpu", torch.float64).clone().contiguous()


def weights_of(parts: Assembled) -> dict[str, Tensor]:
    """All parameters by name. Collective for sharded ones: all ranks."""
    return {name: whole(parameter) for name, parameter in parts.stage.named_parameters()}


def plain_gradient(parts: Assembled) -> dict[str, Tensor]:
    """Gradient of the loss of the global batch of step 0, without the engine: what is right by definition."""
    parts.stage.train()
    device, dtype = parts.engine.runtime.device, next(parts.stage.parameters()).dtype
    for _ in range(parts.loader.batches_in_step(0)):
        parts.stage([batch.to(device, dtype) for batch in next(parts.loader)]).total.backward()
    gradients = {n: whole(p.grad) for n, p in parts.stage.named_parameters() if p.grad is not None}
    parts.stage.zero_grad(set_to_none=True)
    return gradients


def validation_scores(recipe: Recipe, opened: OpenData, parts: Assembled) -> dict[str, float]:
    """Scores of the present weights by the hook that training uses. Collective: all ranks."""
    members = recipe.stages[parts.engine.progress.stage_index].num_members
    validate = build_validation(recipe.evaluate, opened.readers, parts.stepper, members)
    scores: dict[str, float] = {}

    def keep(engine: Engine) -> Mapping[str, float]:
        scores.update({name: float(value) for name, value in validate(engine).items()})
        return scores

    EvaluateHook(keep, None, None).at_end(parts.engine)
    return scores


def scored_trajectories(reader: Reader, rank_info: RankInfo, context_frames: int, limit: int) -> Sequence[int]:
    """Trajectories of the valid split that this rank scores, found by scoring them with a model that predicts 0."""
    plan = RolloutPlan(context_frames, 0 if reader.task.steady else context_frames - 1, 1)
    scores = score_task({"zero": _zero}, reader, rank_info, plan, split="valid", max_trajectories=limit)
    return sorted(scores["zero"].rows)


def _zero(batch: Batch) -> Tensor:
    channels = batch.task.num_channels(batch.task.predicted)
    return batch.dt.new_zeros(batch.num_samples, channels, *batch.space)


# float64 leaves about 1e-12 after thousands of sums; a wrong denominator leaves 0.5 or more.
TOLERANCE = 1e-7
_MEANS = "training on many ranks would not be training on one with the same batch: results change with the world size"


def compare_gradients(
    gradients: Mapping[str, Tensor], reference: Mapping[str, Tensor], what: str, counts: Mapping[str, int]
) -> float:
    """Relative distance of two gradients. Raises CheckFailed if they differ, and says how.

    counts: numbers that a wrong scale may be made of, by name ('ranks': 2, 'micro-batches': 4).
    """
    missing = sorted(reference.keys() ^ gradients.keys())
    if missing:
        raise CheckFailed(f"{what}: only one side has a gradient of {', '.join(missing[:6])}", means=_MEANS)
    names = sorted(reference)
    mine = torch.cat([gradients[n].flatten() for n in names])
    truth = torch.cat([reference[n].flatten() for n in names])
    size = float(truth.norm())
    distance = float((mine - truth).norm()) / max(size, 1e-300)
    if distance <= TOLERANCE:
        return distance
    scale = float(mine @ truth) / max(size * size, 1e-300)
    if float((mine - scale * truth).norm()) <= 1e-6 * float(mine.norm()):
        raise CheckFailed(
            f"{what} is {scale:.6g} times what it must be{_guess(scale, counts)}",
            means="accumulated or averaged with a wrong denominator: the learning rate is not what the recipe says",
            hint="the loss of a micro-batch counts with (its samples / samples of the global batch) x ranks, and "
            "gradients are averaged over ranks once, in the last micro-batch",
        )
    worst = sorted(names, key=lambda n: float((gradients[n] - reference[n]).norm()), reverse=True)[:4]
    raise CheckFailed(
        f"{what} differs from what it must be by {100 * distance:.3g} % (most in {', '.join(worst)})",
        means=_MEANS,
        hint="look for what depends on the rank or on the other samples of a batch: draws, masks, batch statistics, "
        "a micro-batch whose gradient is not reduced",
    )


def _guess(scale: float, counts: Mapping[str, int]) -> str:
    """The counts that `scale` or its inverse equals: several may, in a small world."""
    many = [name for name, count in counts.items() if count > 1 and abs(scale - count) < 1e-6 * count]
    few = [name for name, count in counts.items() if count > 1 and abs(scale * count - 1) < 1e-6]
    if not many and not few:
        return ""
    return f" ({'1 / ' if few else ''}the number of {', or of '.join(many or few)})"
