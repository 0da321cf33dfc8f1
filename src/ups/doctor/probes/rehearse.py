"""Check `rehearsal`: a few real steps of each stage as the run would train them, with every module watched.

Not part of the ladder: `ups doctor RECIPE --bisect` runs it again and again with one part of the recipe changed, and
`--compare-python` once in each environment. What it finds out about a failure (module, windows, step) and the numbers
of every step are facts of its verdict.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ups.doctor.probes.check import Assignment, CheckFailed, Report, begin_check, counted, start
from ups.doctor.rehearsal import NUMBERS_NAME, PLACE_NAME, SETTINGS_NAME

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.distributed.agreement import Status
    from ups.distributed.runtime import Runtime
    from ups.doctor.probes.watch import Place
    from ups.run.assemble import Assembled
    from ups.training.engine import Engine

# Compiling the first pass of a task is silent for so long, at most.
_COMPILE_SECONDS = 900.0
# A task that the mixture has not drawn by then is not waited for.
_MOST_STEPS = 50


class NotFiniteError(CheckFailed):
    """A loss or gradient is NaN or infinite."""

    cause = "not_finite"


def main() -> None:
    """The steps that `rehearsal.json` in the work directory asks for."""
    assignment = start(sys.argv[1:])
    settings = json.loads((assignment.work_dir / SETTINGS_NAME).read_text())
    with begin_check("rehearsal") as report:
        from ups.distributed.environment import RankEnvironment
        from ups.distributed.runtime import Runtime
        from ups.doctor.probes.parts import quick
        from ups.doctor.probes.watch import Place

        recipe = quick(assignment.run)
        rank = RankEnvironment.read().rank
        place = Place(assignment.work_dir / PLACE_NAME.format(rank))
        with Runtime.start(recipe.engine) as runtime:
            rehearse(assignment, recipe, runtime, settings, place, report)


def rehearse(
    assignment: Assignment, recipe: Recipe, runtime: Runtime, settings: dict[str, Any], place: Place, report: Report
) -> None:
    """Every stage, or the one that is asked for. Collective: all ranks."""
    from ups.doctor.probes.parts import open_run_data, run_steps, stage_name
    from ups.doctor.probes.watch import PlaceBox
    from ups.run.assemble import assemble
    from ups.training.progress import Progress

    asked = settings.get("stage")
    indexes = range(len(recipe.stages)) if asked is None else [int(asked)]
    numbers: list[dict[str, Any]] = []
    total = 0
    with open_run_data(assignment) as opened:
        for index in indexes:
            place.at(phase="build", stage=index, step=0, module="")
            hook = Steps(place, numbers, index)
            at, box = Progress(stage_index=index), PlaceBox.of(place)
            with assemble(recipe, opened, runtime, at, hooks=[hook], box=box) as parts:
                hook.last = steps_to_take(parts, int(settings["steps"]))
                hook.watch(parts, inside_units=not recipe.engine.compile)
                still = _COMPILE_SECONDS if recipe.engine.compile else float(settings["still_seconds"])
                try:
                    with noticed_standstill(place, still, report):
                        run_steps(parts)
                except Exception as error:
                    report.facts |= hook.known(error, stage_name(recipe, index))
                    raise
            total += hook.last
    if runtime.rank == 0:
        (assignment.work_dir / NUMBERS_NAME).write_text(json.dumps(numbers))
    report.says = (
        f"{counted(runtime.world_size, 'rank')} ({runtime.strategy}, {recipe.engine.precision}) trained "
        f"{counted(total, 'step')}, all finite"
    )


def steps_to_take(parts: Assembled, wanted: int) -> int:
    """As many as wanted, and more where the mixture needs them to bring every task once."""
    sampler, source = parts.loader.source.sampler, parts.loader.source
    missing = set(range(len(source.readers)))
    for step in range(_MOST_STEPS):
        missing -= set(sampler.tasks_of_step(step))
        if not missing:
            return max(wanted, step + 1)
    return max(wanted, _MOST_STEPS)


class Steps:
    """A hook that keeps the numbers of every step and refuses those that are not finite."""

    def __init__(self, place: Place, numbers: list[dict[str, Any]], stage_index: int) -> None:
        self.last = 1
        self._place, self._numbers, self._index = place, numbers, stage_index
        self._losses: list[float] = []
        self._windows: dict[str, Any] = {}
        self._parts: Assembled | None = None

    def watch(self, parts: Assembled, *, inside_units: bool) -> None:
        """Hook on to the stage: modules, and the losses of its samples."""
        from ups.doctor.probes.watch import Watch
        from ups.doctor.probes.windows import looked_at

        self._parts = parts
        self._watch = Watch(parts.stage, parts.stage.shard_units(), self._place, inside_units=inside_units)
        looked_at(parts, self._windows, self._losses)

    def before_step(self, engine: Engine) -> None:
        """Nothing is done before a step."""

    def after_checkpoint(self, engine: Engine) -> None:
        """Nothing is saved."""

    def after_step(self, engine: Engine, agreed: Status) -> None:
        from ups.doctor.probes.parts import Enough
        from ups.doctor.probes.watch import local

        norm, step = engine.gradient_norm, engine.progress.stage_step
        if not math.isfinite(norm) or not all(map(math.isfinite, self._losses)):
            raise NotFiniteError(
                f"step {step} has a loss of {sum(self._losses):g} and a gradient norm of {norm:g}",
                means="the weights would be destroyed; a run skips such steps and stops after many in a row",
                hint="see what `ups doctor RECIPE --bisect` says about it",
            )
        known = {name: p.grad for name, p in engine.parameters.items() if p.grad is not None}
        gradients = {name: float(local(gradient).double().norm()) for name, gradient in known.items()}
        row = {"stage": self._index, "step": step, "loss": sum(self._losses), "gradient_norm": norm}
        self._numbers.append({**row, "batch": self._windows.pop("crc", 0), "gradients": gradients})
        self._losses.clear()
        self._place.at(phase="step done", step=step, module="")
        if step >= self.last:
            raise Enough

    def at_end(self, engine: Engine) -> None:
        from ups.doctor.probes.parts import Enough

        raise Enough

    def known(self, error: Exception, stage: str) -> dict[str, Any]:
        """What was seen of a failure: its module and windows, as far as they are known."""
        found: dict[str, Any] = {"stage": self._index, "stage_name": stage, "step": self._place.values["step"] + 1}
        if self._windows.get("bad"):
            found["windows"] = self._windows["bad"]
        if isinstance(error, NotFiniteError):
            culprit = self._watch.found or self._watch.backward_culprit()
            if culprit:
                found["culprit"] = culprit
        elif self._place.values["phase"] in ("forward", "backward"):
            inside = self._watch.innermost() or str(self._place.values["module"])
            found["culprit"] = {"pass": self._place.values["phase"], **self._watch.describe(inside)}
        return found


@contextlib.contextmanager
def noticed_standstill(place: Place, seconds: float, report: Report) -> Iterator[None]:
    """Inside, a rank that enters no module for so long says where it stands and leaves: a hang is a finding, too."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            if time.monotonic() - place.changed > seconds:
                faulthandler.dump_traceback(all_threads=True)
                at = {key: place.values[key] for key in ("phase", "module", "step", "stage")}
                line = {
                    "rung": report.name,
                    "ok": False,
                    "rank": int(os.environ.get("RANK") or 0),
                    # Since when: who waits for it stood still later.
                    "time_ns": int(place.changed * 1e9),
                    "cause": "stalled",
                    "says": f"stood still for {seconds:.0f} s in {at['phase']} of step {at['step'] + 1}",
                    "facts": {"standing": at, "stage": at["stage"]},
                }
                sys.stdout.write(json.dumps(line) + "\n")
                sys.stdout.flush()
                os._exit(1)

    place.at()
    thread = threading.Thread(target=look, name="standstill", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


if __name__ == "__main__":
    main()
