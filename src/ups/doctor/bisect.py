"""`ups doctor RECIPE --bisect`: finds which part of a recipe a failure needs, by changing one part after the other.

First the recipe as it is. If it fails, each part in turn is put to its simplest setting: a change with which the same
failure remains stays made, so later trials are simpler and quicker; a change with which it is gone is taken back, and
the failure needs that part. What is left in the end fails, and every part of it that is not simple is needed. Trials
run in processes of their own (`ups.doctor.rehearsal`), and all of them together have a time limit. No torch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups.config.recipe import dump_recipe
from ups.doctor.rehearsal import TITLES, TRIAL_SECONDS, Kind, Outcome, Trials, Variant
from ups.doctor.simpler import (
    Change,
    alone,
    as_ddp,
    in_a_place_of_its_own,
    only_tasks,
    simplifications,
    strategy_of,
    task_names,
)

SMALLEST_NAME = "smallest.yaml"
# Of a step, in their order.
_PHASES = ("data", "forward", "backward", "sync", "optimizer")


@dataclass
class Finding:
    """What the search found out.

    needs: parts without which the failure is gone. unclear: parts whose simplest setting fails in another way.
    not_tried: parts for which there was no time. smallest: a recipe that still fails, with `ranks` ranks.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    kind: Kind = "opened"
    failure: Outcome | None = None
    needs: list[str] = field(default_factory=list)
    simplified: list[str] = field(default_factory=list)
    unclear: list[str] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    comes_and_goes: bool = False
    smallest: Path | None = None
    ranks: int = 1
    # Of the last trial that failed in the same way: the simplest one.
    last: Outcome | None = None


class _OutOfTimeError(Exception):
    """No time is left for another trial."""


class Bisection:
    """One search. on_outcome is called after each trial."""

    def __init__(
        self,
        trials: Trials,
        variant: Variant,
        limit_seconds: float,
        on_outcome: Callable[[Outcome], None] | None = None,
    ) -> None:
        self._trials, self._variant = trials, variant
        self._ends = time.monotonic() + limit_seconds
        self._on_outcome = on_outcome
        self.finding = Finding(ranks=variant.ranks)

    def run(self) -> Finding:
        """Search until every part was tried or the time is up."""
        found = self.finding
        try:
            if not self._fails():
                return found
            for title, search in (("strategy", self._strategy), ("tasks", self._tasks), ("settings", self._settings)):
                found.not_tried.append(title)
                search()
                found.not_tried.remove(title)
            if found.needs and found.last is not None:
                again = self._try(self._variant, "the smallest recipe, once more")
                found.comes_and_goes = again.ok
        except _OutOfTimeError:
            found.not_tried = found.not_tried or ["everything"]
        if found.failure is not None:
            found.smallest = self._trials.root / SMALLEST_NAME
            apart = in_a_place_of_its_own(self._variant, self._trials.root / "run")
            found.smallest.write_text(dump_recipe(apart))
            found.ranks = self._variant.ranks
        return found

    def _fails(self) -> bool:
        """The recipe as it is, by one kind of trial after the other."""
        kinds: tuple[Kind, ...] = ("opened", "rehearsal", *(("parity",) if self._variant.ranks > 1 else ()))
        for kind in kinds:
            self.finding.kind = kind
            outcome = self._try(self._variant, f"as it is: {TITLES[kind]}")
            if not outcome.ok:
                self.finding.failure = self.finding.last = outcome
                stage = outcome.facts.get("stage")
                if stage is None and outcome.places:
                    stage = max(int(place.get("stage", 0)) for place in outcome.places.values())
                if isinstance(stage, int):
                    self._variant = Variant(self._variant.recipe, self._variant.ranks, stage, self._variant.steps)
                return True
        return False

    def _try(self, variant: Variant, label: str) -> Outcome:
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
        one, given = alone(self._variant), strategy_of(self._variant)
        ranks = self._variant.ranks
        if one is None:
            return
        if self._simplify(Change(f"strategy {given} on {ranks} ranks", "one rank, no strategy", one)):
            return
        copies = as_ddp(self._variant) if given == "fsdp" and ranks > 1 else None
        if copies is None:
            return
        several, shards = self.finding.needs, "strategy fsdp"
        if several and self._simplify(Change(shards, f"ddp on {ranks} ranks", copies)):
            several[0] = f"several ranks ({ranks}), with ddp as well as fsdp"
        elif shards in several:
            several.remove(f"strategy fsdp on {ranks} ranks")

    def _tasks(self) -> None:
        """Halve the tasks until one is left, the one that the failure names first, if it names one; then see whether
        the others fail without it.
        """
        names = everything = task_names(self._variant)
        known: dict[tuple[str, ...], bool | None] = {}

        def fails(chosen: Sequence[str]) -> bool:
            """Whether these tasks alone fail in the same way; other failures count as no."""
            key = tuple(chosen)
            if key not in known:
                variant = only_tasks(self._variant, chosen)
                known[key] = None
                if variant is not None:
                    outcome = self._try(variant, f"tasks: {_listed(chosen)}")
                    assert self.finding.failure is not None
                    known[key] = outcome.same_failure(self.finding.failure)
                    if known[key]:
                        smaller[key] = (variant, outcome)
            return bool(known[key])

        smaller: dict[tuple[str, ...], tuple[Variant, Outcome]] = {}
        suspected = [name for name in everything if len(everything) > 1 and name == self._suspected_task()]
        if suspected and fails(suspected):
            names = suspected
        while len(names) > 1:
            middle = len(names) // 2
            half = next((part for part in (names[:middle], names[middle:]) if fails(part)), None)
            if half is None:
                break
            names = half
        if names == everything:
            if len(names) > 1:
                self.finding.needs.append(f"tasks together: {_listed(names)}")
            return
        others = [name for name in everything if name not in names]
        if fails(others):
            self.finding.simplified.append("tasks")
        else:
            self.finding.needs.append(f"task{'s' if len(names) > 1 else ''} {_listed(names)}")
        self._variant, self.finding.last = smaller[tuple(names)]

    def _suspected_task(self) -> str | None:
        facts = self.finding.last.facts if self.finding.last is not None else {}
        task = facts.get("task") or (facts.get("windows") or {}).get("task")
        return str(task) if task else None

    def _settings(self) -> None:
        assert self.finding.failure is not None
        for make in simplifications(self.finding.kind, self.finding.failure.cause):
            change = make(self._variant)
            if change is not None:
                self._simplify(change)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names)


def _behind(places: dict[int, dict[str, Any]]) -> int | None:
    """The one rank that is behind all others in the order of a step: they wait for it. None if there is no such rank.

    Not the one that reported first: whoever waits may have stood still for longer than the one that never comes.
    """

    def progress(rank: int) -> tuple[int, int, int]:
        place = places[rank]
        phase = str(place.get("phase"))
        return int(place["stage"]), int(place["step"]), _PHASES.index(phase) if phase in _PHASES else -1

    order = sorted(places, key=progress)
    return order[0] if len(order) > 1 and progress(order[0]) < progress(order[1]) else None


def place_of(finding: Finding) -> dict[str, Any]:
    """Module, shard unit, network, windows and line of the simplest failure, as far as they are known."""
    outcome = finding.last
    if outcome is None or outcome.failed is None:
        return {}
    facts, found = outcome.facts, {}
    culprit = facts.get("culprit")
    behind = _behind(outcome.places) if outcome.cause == "stalled" else None
    if culprit is None and behind is not None:
        culprit = {"pass": outcome.places[behind]["phase"], "module": outcome.places[behind]["module"], "rank": behind}
    elif culprit is None and "standing" in facts:
        culprit = {"pass": facts["standing"]["phase"], "module": facts["standing"]["module"]}
    if culprit is None and (outcome.failed.at or outcome.cause == "stalled") and outcome.places:
        # Ended by a signal or at its deadline: what it wrote on its way is all that is left.
        place = outcome.places.get(outcome.failed.rank or 0, {})
        if place.get("phase") in ("forward", "backward"):
            culprit = {"pass": place["phase"], "module": place.get("module", "")}
    if culprit is not None:
        found["culprit"] = culprit
    for name in ("windows", "stage_name", "step", "task"):
        if facts.get(name) is not None:
            found[name] = facts[name]
    if outcome.failed.at:
        found["at"] = outcome.failed.at
    return found
