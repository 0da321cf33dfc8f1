"""Trials of a recipe for `ups doctor --bisect`: a few real steps, in processes of their own.

A trial is one or two check programs on one variant of the recipe, with a deadline. It leaves a verdict, and the last
position of every rank. A variant is the recipe with some part at its simplest setting: it is edited as plain data and
validated like a file, so anybody could have written it. No torch.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from ups.config.recipe import dump_recipe, plain_data
from ups.config.schema import Recipe
from ups.doctor.checks import CHECK_PROGRAMS, OPENED, REHEARSAL, CheckProgram
from ups.doctor.examine import Examination, Verdict, run_checks, write_assignment
from ups.errors import UpsError
from ups.record.run_dir import RunDir

SETTINGS_NAME = "rehearsal.json"
PLACE_NAME = "place_{}.json"
# Of a trial, unless less is left of the whole time.
TRIAL_SECONDS = 600.0

Kind = Literal["opened", "rehearsal", "parity"]

PROGRAMS: dict[Kind, tuple[CheckProgram, ...]] = {
    "opened": (OPENED,),
    "rehearsal": (REHEARSAL,),
    "parity": tuple(program for program in CHECK_PROGRAMS if program.module in ("model", "parity")),
}
# What a kind of trial proves, in words for the table.
TITLES: dict[Kind, str] = {
    "opened": "open and measure the data",
    "rehearsal": "train a few steps",
    "parity": "compare many ranks with one",
}


@dataclass(frozen=True)
class Variant:
    """What is tried: a recipe on so many ranks; `stage` is the only one that is rehearsed, None all of them."""

    recipe: Recipe
    ranks: int
    stage: int | None = None
    steps: int = 4


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended. `failed` is the first verdict that is not well; positions: where each rank was last."""

    label: str
    failed: Verdict | None
    seconds: float
    folder: Path
    positions: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.failed is None

    @property
    def cause(self) -> str:
        """The stable name of the failure; empty if there was none."""
        return self.failed.cause if self.failed else ""

    @property
    def facts(self) -> dict[str, Any]:
        return self.failed.facts if self.failed else {}

    def same_failure(self, other: TrialOutcome) -> bool:
        """Whether both failed in the same way."""
        return not self.ok and not other.ok and self.cause == other.cause

    def to_json(self) -> dict[str, Any]:
        """One row of the table of trials."""
        row: dict[str, Any] = {"trial": self.label, "ok": self.ok, "seconds": round(self.seconds, 1)}
        if self.failed is not None:
            row |= {"cause": self.cause, "says": self.failed.says, "rank": self.failed.rank}
        return row


@dataclass(frozen=True)
class Trials:
    """Runs trials below one directory, which keeps what each of them left.

    still_seconds: a rank that enters no module for so long stands still. on_start: told the label of each trial.
    """

    root: Path
    run_dir: Path
    environment: dict[str, str] = field(default_factory=dict)
    still_seconds: float = 45.0
    on_start: Callable[[str], None] | None = None

    def run(self, kind: Kind, variant: Variant, label: str, seconds: float = TRIAL_SECONDS) -> TrialOutcome:
        """One trial, at most `seconds` for each of its programs."""
        if self.on_start is not None:
            self.on_start(label)
        number = len(list(self.root.iterdir())) if self.root.is_dir() else 0
        folder = self.root / f"{number:02d}_{kind}"
        folder.mkdir(parents=True)
        text = dump_recipe(variant.recipe)
        examination = Examination(variant.ranks, self.run_dir, text, self.environment)
        write_assignment(examination, folder)
        settings = {"stage": variant.stage, "steps": variant.steps, "still_seconds": self.still_seconds}
        (folder / SETTINGS_NAME).write_text(json.dumps(settings))
        # Of the first trial, which measured all tasks: no rank measures again.
        for known in sorted(self.root.glob(f"*_opened/{RunDir.statistics.name}"))[:1]:
            shutil.copy(known, folder / RunDir.statistics.name)
        started = time.monotonic()
        failed = None
        for program in PROGRAMS[kind]:
            limited = replace(program, seconds=min(seconds, program.seconds))
            failed = next((v for v in run_checks(limited, examination, folder) if not v.ok), None)
            if failed is not None:
                break
        return TrialOutcome(label, failed, time.monotonic() - started, folder, read_places(folder))


def read_places(folder: Path) -> dict[int, dict[str, Any]]:
    """Where every rank was last, by what it wrote on its way."""
    positions = {}
    for path in folder.glob(PLACE_NAME.format("*")):
        with contextlib.suppress(OSError, ValueError):
            positions[int(path.stem.rpartition("_")[2])] = json.loads(path.read_text())
    return positions


@dataclass(frozen=True)
class Change:
    """One part at another setting. part: what the failure needs if it is gone with this change."""

    part: str
    label: str
    variant: Variant

    @classmethod
    def of(cls, part: str, label: str, variant: Variant | None) -> Change | None:
        """None where the change would be no recipe."""
        return None if variant is None else cls(part, label, variant)


def changed(variant: Variant, change: Callable[[dict[str, Any]], None]) -> Variant | None:
    """The variant with its recipe edited; None if that is no recipe."""
    data: dict[str, Any] = copy.deepcopy(plain_data(variant.recipe))
    change(data)
    try:
        recipe = Recipe.model_validate(data)
    except (ValidationError, UpsError):
        return None
    return replace(variant, recipe=recipe)


def engine(variant: Variant, **settings: Any) -> Variant | None:
    """The variant with other settings of the engine."""
    return changed(variant, lambda data: data["engine"].update(settings))


def in_a_place_of_its_own(variant: Variant, run_dir: Path) -> Recipe:
    """The recipe of a variant for the user to train: it must not continue the run that failed, or write over it."""

    def change(data: dict[str, Any]) -> None:
        data["run"].update(name=f"{data['run']['name'][:100]}-smallest", dir=str(run_dir))
        data["checkpoint"].update(mirror=None)
        data["tracking"].update(trackers=[])

    moved = changed(variant, change)
    assert moved is not None  # none of this decides whether it is a recipe
    return moved.recipe


def alone(variant: Variant) -> Variant | None:
    """One rank without any strategy, with as many windows in a pass as a rank has now."""
    if variant.ranks == 1 and variant.recipe.engine.strategy_on(1) == "single":
        return None
    one = replace(variant, ranks=1)
    micro = micro_batch_size(variant)
    return engine(one, strategy="single", shard_ranks=None, offload=False, micro_batch_size=micro)


def micro_batch_size(variant: Variant) -> int:
    """The most windows in one pass of a rank."""
    share = max(variant.recipe.data.batch_sizes) // variant.ranks
    return variant.recipe.engine.fixed_micro_batch_size or max(1, share)


def as_ddp(variant: Variant) -> Variant | None:
    """The same ranks with whole copies of the model."""
    return engine(variant, strategy="ddp", shard_ranks=None, offload=False)


def only_tasks(variant: Variant, names: Sequence[str]) -> Variant | None:
    """The variant with some of its tasks."""

    def change(data: dict[str, Any]) -> None:
        data["data"]["tasks"] = [task for task in data["data"]["tasks"] if task["name"] in names]
        per_step = data["data"].get("tasks_per_step")
        if per_step is not None:
            data["data"]["tasks_per_step"] = min(per_step, len(names))
        for section in (*data["stages"], *data["gate"]):
            if section.get("tasks") is not None:
                section["tasks"] = [name for name in section["tasks"] if name in names] or None

    return changed(variant, change)


def task_names(variant: Variant) -> list[str]:
    """The tasks that the rehearsed stage trains on, or all."""
    recipe = variant.recipe
    data = recipe.data if variant.stage is None else recipe.data_of(variant.stage)
    return [task.name for task in data.tasks]


def simplifications(variant: Callable[[], Variant], kind: Kind, cause: str) -> Iterator[Change | None]:
    """What to try after strategy and tasks, one after the other (None: no recipe); variant: the one that is left."""
    if kind == "opened":
        return
    rehearsal = kind == "rehearsal"
    workers = variant().recipe.data.loader.workers
    if rehearsal and workers:
        without = changed(variant(), lambda data: data["data"]["loader"].update(workers=0))
        yield Change.of(f"loader workers (data.loader.workers: {workers})", "no loader workers", without)
    for name, simplest, part, label in _SETTINGS:
        if getattr(variant().recipe.engine, name) != simplest and (rehearsal or name != "compile"):
            yield Change.of(part, label, engine(variant(), **{name: simplest}))
    for narrow, wider in (("bfloat16", "float32"), ("float32", "float64")):
        if rehearsal and variant().recipe.engine.precision == narrow:
            yield Change.of(f"precision {narrow}", f"precision {wider}", engine(variant(), precision=wider))
    if rehearsal and _on_gpus(variant()):
        on_cpu = engine(variant(), device="cpu", backend="auto")
        yield Change.of("the GPU (engine.device)", "on the CPU", on_cpu)
    if rehearsal and _on_gpus(variant()) and variant().ranks > 1 and variant().recipe.engine.backend != "gloo":
        yield Change.of("NCCL (engine.backend)", "gloo between ranks", engine(variant(), backend="gloo"))
    micro = micro_batch_size(variant())
    if cause == "out_of_memory" and micro > 1:
        one = engine(variant(), micro_batch_size=1)
        yield Change.of(f"a micro-batch of {micro} windows", "one window at a time", one)


# Settings of the engine: name, simplest value, what the failure needs without it, the trial.
_SETTINGS: tuple[tuple[str, Any, str, str], ...] = (
    ("compile", False, "compilation (engine.compile)", "without compilation"),
    (
        "activation_checkpointing",
        False,
        "recomputation (engine.activation_checkpointing)",
        "without recomputation",
    ),
    ("offload", False, "offloading (engine.offload)", "without offloading"),
    ("shard_ranks", None, "groups of shards (engine.shard_ranks)", "shards over all ranks"),
)


def _on_gpus(variant: Variant) -> bool:
    return variant.recipe.engine.device != "cpu" and any(Path("/dev").glob("nvidia[0-9]*"))
