"""`ups doctor RECIPE --bisect`: finds which part of a recipe a failure needs, by changing one part after the other.

First the recipe as it is. If it fails, each part in turn is put to its simplest setting. If the same failure remains,
the change stays, so later trials are simpler and quicker. If the failure is gone, the change is taken back: the failure
needs that part. The recipe that is left fails, and needs every part of it that is not simple. Trials run in processes
of their own (`ups.doctor.trials`), and all together have a time limit. The words for the result follow the search. No
torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ups.config.recipe import dump_recipe
from ups.doctor.examine import Verdict
from ups.doctor.trials import (
    TITLES,
    TRIAL_SECONDS,
    Change,
    Kind,
    TrialOutcome,
    Trials,
    Variant,
    alone,
    as_ddp,
    in_a_place_of_its_own,
    only_tasks,
    simplifications,
    task_names,
)
from ups.record.text import path_text

SMALLEST_NAME = "smallest.yaml"
# Of a step, in their order.
_PHASES = ("data", "forward", "backward", "sync", "optimizer")


@dataclass
class Finding:
    """What the search found out.

    needs: parts without which the failure is gone. unclear: parts whose simplest setting fails in another way.
    not_tried: parts for which there was no time. smallest: a recipe that still fails, with `ranks` ranks.
    """

    outcomes: list[TrialOutcome] = field(default_factory=list)
    kind: Kind = "opened"
    failure: TrialOutcome | None = None
    needs: list[str] = field(default_factory=list)
    simplified: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    comes_and_goes: bool = False
    smallest: Path | None = None
    ranks: int = 1
    # Of the last trial that failed in the same way: the simplest one.
    last: TrialOutcome | None = None

    @property
    def failed(self) -> Verdict | None:
        """How the recipe fails as it is; None if it does not."""
        return None if self.failure is None else self.failure.failed


class _OutOfTimeError(Exception):
    """No time is left for another trial."""


class Bisection:
    """One search. on_outcome is called after each trial."""

    def __init__(
        self,
        trials: Trials,
        variant: Variant,
        limit_seconds: float,
        on_outcome: Callable[[TrialOutcome], None] | None = None,
    ) -> None:
        self._trials, self._variant = trials, variant
        self._ends = time.monotonic() + limit_seconds
        self._on_outcome = on_outcome
        self.finding = Finding(ranks=variant.ranks)

    def run(self) -> Finding:
        """Search until every part was tried or the time is up."""
        finding = self.finding
        try:
            if not self._fails():
                return finding
            for title, search in (("strategy", self._strategy), ("tasks", self._tasks), ("settings", self._settings)):
                finding.not_tried.append(title)
                search()
                finding.not_tried.remove(title)
            if finding.needs and finding.last is not None:
                again = self._try(self._variant, "the smallest recipe, once more")
                finding.comes_and_goes = again.ok
        except _OutOfTimeError:
            finding.not_tried = finding.not_tried or ["everything"]
        if finding.failure is not None:
            finding.smallest = self._trials.root / SMALLEST_NAME
            apart = in_a_place_of_its_own(self._variant, self._trials.root / "run")
            finding.smallest.write_text(dump_recipe(apart))
            finding.ranks = self._variant.ranks
        return finding

    def _fails(self) -> bool:
        """The recipe as it is, by one kind of trial after the other."""
        kinds: tuple[Kind, ...] = ("opened", "rehearsal", *(("parity",) if self._variant.ranks > 1 else ()))
        for kind in kinds:
            self.finding.kind = kind
            outcome = self._try(self._variant, f"as it is: {TITLES[kind]}")
            if not outcome.ok:
                self.finding.failure = self.finding.last = outcome
                reached = max((int(position.get("stage", 0)) for position in outcome.positions.values()), default=None)
                self._variant = replace(self._variant, stage=outcome.facts.get("stage", reached))
                return True
        return False

    def _try(self, variant: Variant, label: str) -> TrialOutcome:
        left = self._ends - time.monotonic()
        if left <= 0:
            raise _OutOfTimeError
        outcome = self._trials.run(self.finding.kind, variant, label, min(TRIAL_SECONDS, max(left, 30.0)))
        self.finding.outcomes.append(outcome)
        if self._on_outcome is not None:
            self._on_outcome(outcome)
        return outcome

    def _simplify(self, change: Change) -> bool:
        """Try one change and keep it if the failure stays; whether it did."""
        outcome = self._try(change.variant, change.label)
        assert self.finding.failure is not None
        if outcome.same_failure(self.finding.failure):
            self._variant, self.finding.last = change.variant, outcome
            self.finding.simplified.append(change.part)
            return True
        if outcome.ok:
            self.finding.needs.append(change.part)
        else:
            self.finding.unclear.append(f"{change.part} (with {change.label}: {outcome.cause})")
        return False

    def _strategy(self) -> None:
        """One rank alone; if the failure is gone then, whole copies of the model instead of shards."""
        if self.finding.kind == "opened":
            return
        ranks, needs = self._variant.ranks, self.finding.needs
        strategy = self._variant.recipe.engine.strategy_on(ranks)
        one = Change.of(f"strategy {strategy} on {ranks} ranks", "one rank, no strategy", alone(self._variant))
        if one is None or self._simplify(one) or strategy != "fsdp" or ranks == 1 or not needs:
            return
        copies = Change.of("strategy fsdp", f"ddp on {ranks} ranks", as_ddp(self._variant))
        if copies is not None and self._simplify(copies):
            needs[0] = f"several ranks ({ranks}), with ddp as well as fsdp"
        elif copies is not None and copies.part in needs:
            needs.remove(one.part)

    def _tasks(self) -> None:
        """Halve the tasks until one is left, the one that the failure names first, if it names one; then see whether
        the others fail without it.
        """
        everything = names = tuple(task_names(self._variant))
        tried: dict[tuple[str, ...], tuple[Variant, TrialOutcome] | None] = {}

        def fails(chosen: tuple[str, ...]) -> bool:
            """Whether these tasks alone fail in the same way; other failures count as no."""
            if chosen not in tried:
                tried[chosen] = self._same_failure_of(chosen)
            return tried[chosen] is not None

        facts = self.finding.last.facts if self.finding.last is not None else {}
        suspected = (str(facts.get("task") or (facts.get("windows") or {}).get("task")),)
        if len(everything) > 1 and suspected[0] in everything and fails(suspected):
            names = suspected
        while len(names) > 1:
            middle = len(names) // 2
            half = next((part for part in (names[:middle], names[middle:]) if fails(part)), None)
            if half is None:
                break
            names = half
        if names == everything:
            self.finding.needs += [f"tasks together: {', '.join(names)}"] if len(names) > 1 else []
            return
        if fails(tuple(name for name in everything if name not in names)):
            self.finding.simplified.append("tasks")
        else:
            self.finding.needs.append(f"task{'s' if len(names) > 1 else ''} {', '.join(names)}")
        smallest = tried[names]
        assert smallest is not None
        self._variant, self.finding.last = smallest

    def _same_failure_of(self, tasks: Sequence[str]) -> tuple[Variant, TrialOutcome] | None:
        variant = only_tasks(self._variant, tasks)
        if variant is None:
            return None
        outcome = self._try(variant, f"tasks: {', '.join(tasks)}")
        assert self.finding.failure is not None
        return (variant, outcome) if outcome.same_failure(self.finding.failure) else None

    def _settings(self) -> None:
        assert self.finding.failure is not None
        for change in simplifications(lambda: self._variant, self.finding.kind, self.finding.failure.cause):
            if change is not None:
                self._simplify(change)


def _behind(positions: dict[int, dict[str, Any]]) -> int | None:
    """The one rank that is behind all others in the order of a step: they wait for it. None if there is no such rank.

    Not the one that reported first: whoever waits may have stood still for longer than the one that never comes.
    """

    def progress(rank: int) -> tuple[int, int, int]:
        position = positions[rank]
        phase = position.get("phase")
        return int(position["stage"]), int(position["step"]), _PHASES.index(phase) if phase in _PHASES else -1

    first, *others = sorted(positions, key=progress) or [0]
    return first if others and progress(first) < progress(others[0]) else None


def place_of(finding: Finding) -> dict[str, Any]:
    """Module, shard unit, network, windows and line of the simplest failure, as far as they are known."""
    outcome = finding.last
    if outcome is None or outcome.failed is None:
        return {}
    facts = outcome.facts
    location: dict[str, Any] = {
        name: facts[name] for name in ("windows", "stage_name", "step", "task") if facts.get(name) is not None
    }
    culprit = facts.get("culprit") or _standing(outcome)
    if culprit:
        location["culprit"] = culprit
    if outcome.failed.at:
        location["at"] = outcome.failed.at
    return location


def _standing(outcome: TrialOutcome) -> dict[str, Any] | None:
    """The module in which a rank stood still or was ended, by what it wrote on its way."""
    stalled = outcome.cause == "stalled"
    behind = _behind(outcome.positions) if stalled else None
    if behind is not None:
        late = outcome.positions[behind]
        return {"pass": late["phase"], "module": late["module"], "rank": behind}
    position: dict[str, Any] | None = outcome.facts.get("standing")
    if position is None and outcome.failed is not None and (outcome.failed.at or stalled):
        # Ended by a signal or at its deadline: what it wrote on its way is all that is left.
        position = outcome.positions.get(outcome.failed.rank or 0, {})
        position = position if position.get("phase") in ("forward", "backward") else None
    return None if position is None else {"pass": position["phase"], "module": position.get("module", "")}


_MODEL = "the model"
_IN_FLOAT32 = " (x.float() under torch.autocast(x.device.type, enabled=False))"
_SHOWN_OF_FAILURE = ("check", "cause", "says", "rank", "log")


def module_text(culprit: dict[str, Any]) -> str:
    """'module a.b.c (shard unit a.b, network operator), forward pass in bfloat16'."""
    name, unit = culprit.get("module") or "", culprit.get("unit")
    text = f"module {name}" if name else "the loss of the stage, outside of every module"
    belongs = [] if unit is None else ["a shard unit"] if unit == name else [f"shard unit {unit}"]
    belongs += [f"network {culprit['network']}"] if culprit.get("network") else []
    text += f" ({', '.join(belongs)})" if name and belongs else ""
    text += f", {culprit.get('pass', 'forward')} pass"
    if culprit.get("rank") is not None:
        text += f" of rank {culprit['rank']}, for which the others wait"
    if culprit.get("dtype"):
        text += f" in {culprit['dtype']}"
    if culprit.get("bad_parameters"):
        text += f"; its own weights are not finite: {', '.join(culprit['bad_parameters'])}"
    elif culprit.get("inputs_finite") is True and name:
        text += "; what went in was finite"
        if culprit.get("largest_input") is not None:
            text += f" (at most {culprit['largest_input']:.3g})"
    elif culprit.get("inputs_finite") is False:
        text += "; what went in was not finite either"
    return text


def windows_text(windows: dict[str, Any]) -> str:
    """Where the bad windows are."""
    count, where = len(windows["where"]), "; ".join(windows["where"])
    return f"{count} of {windows['of']} windows of task '{windows['task']}' have {windows['what']}: {where}"


def located(finding: Finding) -> list[str]:
    """What the failure needs, in words; empty if it could not be located."""
    facts = place_of(finding)
    needs = list(finding.needs)
    windows = facts.get("windows")
    by_data = bool(windows) or finding.kind == "opened"
    if windows and not any(need.startswith("task") for need in needs):
        needs.append(f"data of task {windows['task']}")
    if finding.kind == "opened" and not needs and facts.get("task"):
        needs.append(f"task {facts['task']}")
    culprit = facts.get("culprit")
    if culprit is not None and not needs and not by_data:
        name = culprit.get("module")
        needs.append(f"{_MODEL}: {name}" if name else f"{_MODEL}: the loss of {facts.get('stage_name', 'the stage')}")
    return needs


def verdict(finding: Finding) -> str:
    """One line."""
    if finding.failed is None:
        tried = finding.outcomes[-1].label if finding.outcomes else "nothing"
        if finding.not_tried:
            return f"no failure was seen, but the time was up before everything was tried (last: {tried})"
        labels = [outcome.label.partition(": ")[2] or outcome.label for outcome in finding.outcomes]
        return f"the recipe does not fail here: {', '.join(labels)}"
    needs = located(finding)
    if not needs:
        return "the failure could not be located: it stays with every part at its simplest setting"
    text = f"the failure needs: {' and '.join(needs)}"
    return f"{text} (a guess: it comes and goes)" if finding.comes_and_goes else text


def next_step(finding: Finding, recipe: str) -> str:
    """What to do now."""
    if finding.failure is None:
        return (
            "if a run of it fails later: `ups why RUN`, more steps (--steps), more time (--minutes), every value of "
            f"the data (ups data validate {recipe})"
        )
    location, failed = place_of(finding), (finding.last or finding.failure).failed
    needs = " ".join(located(finding))
    smallest = "" if finding.smallest is None else f"ups train {path_text(finding.smallest)} shows it"
    smallest += f" (--ranks {finding.ranks})" if smallest else ""
    if finding.comes_and_goes:
        return f"run the search again; {smallest}"
    if "task" in needs or location.get("windows"):
        return "look at the data with `ups data validate`, and leave the bad trajectories or the task out"
    if "loader workers" in needs:
        return f"train with --set data.loader.workers=0, and look at what the worker said in {finding.failure.folder}"
    if "precision" in needs:
        wider, only = ("float64", "") if "precision float32" in needs else ("float32", _IN_FLOAT32)
        module = f"let the named module alone compute in that{only}"
        return f"train with --set engine.precision={wider}, or {module}; {smallest}"
    if "strategy" in needs or "ranks" in needs:
        return f"train with another engine.strategy until it is mended; {smallest}"
    if _MODEL in needs:
        return f"look at that module; {smallest}"
    if not needs:
        at = f" at {location['at']}" if location.get("at") else ""
        return f"read the log{at} in {failed.log if failed else finding.failure.folder}; {smallest}"
    return f"leave that setting out until it is mended; {smallest}"


def to_json(finding: Finding, recipe: str) -> dict[str, Any]:
    """The object of `--json`."""
    failed = finding.failed
    failure = None if failed is None else {name: getattr(failed, name) for name in _SHOWN_OF_FAILURE}
    return {
        "ok": failed is None,
        "fails": failed is not None,
        "located": None if failed is None else bool(located(finding)),
        "verdict": verdict(finding),
        "needs": [] if failed is None else located(finding),
        "failure": failure,
        **place_of(finding),
        "not_needed": finding.simplified,
        "unclear": finding.unclear,
        "not_tried": finding.not_tried,
        "comes_and_goes": finding.comes_and_goes,
        "smallest_recipe": None if finding.smallest is None else str(finding.smallest),
        "smallest_ranks": finding.ranks,
        "next": next_step(finding, recipe),
        "trials": [outcome.to_json() for outcome in finding.outcomes],
    }
