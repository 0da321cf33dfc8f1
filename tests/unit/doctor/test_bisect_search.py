"""The search itself: what it concludes from trials that fail by a rule which only the test knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ups.config.recipe import plain_data, resolve
from ups.config.schema import Recipe
from ups.doctor.bisect import Bisection, Finding, located, next_step, place_of, to_json, verdict
from ups.doctor.examine import Verdict
from ups.doctor.trials import Kind, TrialOutcome, Trials, Variant, alone, as_ddp, only_tasks

Rule = Callable[[Variant], str]


def variant_of(ranks: int = 4, tasks: int = 5, **engine: Any) -> Variant:
    data = [{"name": f"t{n}", "path": f"t{n}.zarr"} for n in range(tasks)]
    document = {
        "run": {"name": "a"},
        "data": {"tasks": data, "batch_size": 8, "loader": {"workers": 2}},
        "stages": [{"type": "operator", "steps": 1}],
        "engine": engine,
        "gate": [{"metric": "one_step_trmse", "at_most": 1.0, "tasks": ["t0"]}],
    }
    return Variant(Recipe.model_validate(document), ranks)


@dataclass(frozen=True)
class Ruled(Trials):
    """Trials that start no process: a rule says the cause of the failure, or nothing."""

    rule: Rule = field(default=lambda variant: "")
    kind: Kind = "rehearsal"

    def run(
        self, kind: Kind, variant: Variant, label: str, seconds: float = 0.0, python: str | None = None
    ) -> TrialOutcome:
        cause = self.rule(variant) if kind == self.kind else ""
        failed = Verdict("rehearsal", False, cause, exit_code=6, cause=cause) if cause else None
        return TrialOutcome(label, failed, 0.0, self.root)


def searched(
    folder: Path, rule: Rule, variant: Variant | None = None, limit: float = 60.0, kind: Kind = "rehearsal"
) -> Finding:
    trials = Ruled(folder, folder / "run", rule=rule, kind=kind)
    return Bisection(trials, variant or variant_of(), limit).run()


def names(variant: Variant) -> set[str]:
    return {task.name for task in variant.recipe.data.tasks}


def test_two_parts_that_are_needed_together_are_both_named(tmp_path: Path) -> None:
    finding = searched(
        tmp_path,
        lambda v: "not_finite" if v.recipe.engine.compile and v.recipe.engine.precision == "bfloat16" else "",
        variant_of(compile=True, precision="bfloat16", activation_checkpointing=True),
    )
    assert finding.needs == ["compilation (engine.compile)", "precision bfloat16"]
    assert "recomputation (engine.activation_checkpointing)" in finding.simplified
    assert finding.ranks == 1


def test_training_the_smallest_recipe_touches_nothing_of_the_run_that_failed(tmp_path: Path) -> None:
    document = plain_data(variant_of().recipe)
    document["run"]["dir"] = "runs/precious"
    document["checkpoint"]["mirror"] = "s3://bucket/precious"
    document["tracking"]["trackers"] = [{"type": "tensorboard"}]
    finding = searched(tmp_path, lambda v: "not_finite", Variant(Recipe.model_validate(document), 2))
    smallest = resolve(finding.smallest or "").recipe
    assert (smallest.run.name, smallest.run.dir) == ("a-smallest", str(tmp_path / "run"))
    assert (smallest.checkpoint.mirror, smallest.tracking.trackers) == (None, [])


@pytest.mark.parametrize("bad", range(5))
def test_one_task_of_five_is_found_by_halving(tmp_path: Path, bad: int) -> None:
    finding = searched(tmp_path, lambda v: "data" if f"t{bad}" in names(v) else "", kind="opened")
    assert located(finding) == [f"task t{bad}"]
    assert len(finding.outcomes) <= 9


def test_tasks_that_fail_only_together_are_named_together(tmp_path: Path) -> None:
    finding = searched(tmp_path, lambda v: "not_finite" if {"t1", "t4"} <= names(v) else "")
    assert finding.needs == ["tasks together: t0, t1, t2, t3, t4"]


def test_several_ranks_are_told_from_shards(tmp_path: Path) -> None:
    many = searched(tmp_path, lambda v: "stalled" if v.ranks > 1 else "", variant_of(strategy="fsdp", offload=True))
    assert many.needs == ["several ranks (4), with ddp as well as fsdp"]

    def only_shards(v: Variant) -> str:
        return "stalled" if v.recipe.engine.strategy_on(v.ranks) == "fsdp" else ""

    shards = searched(tmp_path, only_shards, variant_of(strategy="fsdp"))
    assert shards.needs == ["strategy fsdp"]


def test_another_failure_decides_nothing(tmp_path: Path) -> None:
    def rule(variant: Variant) -> str:
        return "not_finite" if variant.recipe.data.loader.workers else "data"

    finding = searched(tmp_path, rule)
    assert finding.needs == []
    assert finding.unclear == ["loader workers (data.loader.workers: 2) (with no loader workers: data)"]
    assert verdict(finding).startswith("the failure could not be located")
    assert to_json(finding, "r.yaml")["located"] is False
    assert "read the log" in next_step(finding, "r.yaml")


def test_a_failure_that_comes_and_goes_is_a_guess(tmp_path: Path) -> None:
    tried: list[Variant] = []

    def rule(variant: Variant) -> str:
        tried.append(variant)
        return "stalled" if len(tried) == 1 else ""

    finding = searched(tmp_path, rule, variant_of(tasks=1))
    assert finding.comes_and_goes
    assert verdict(finding).endswith("(a guess: it comes and goes)")


def test_the_time_limit_ends_the_search_and_says_what_was_not_tried(tmp_path: Path) -> None:
    finding = searched(tmp_path, lambda v: "not_finite", limit=-1.0)
    assert (finding.failure, finding.outcomes, finding.not_tried) == (None, [], ["everything"])
    assert "the time was up" in verdict(finding)


def test_of_ranks_that_stand_still_the_one_behind_is_named_and_not_the_one_that_waits(tmp_path: Path) -> None:
    waits = {"stage": 0, "step": 3, "phase": "backward", "module": "encoder"}
    late = {"stage": 0, "step": 3, "phase": "forward", "module": "decoder"}
    standing = Verdict("rehearsal", False, "", cause="stalled", facts={"standing": waits})  # reported by who waits
    finding = Finding(last=TrialOutcome("", standing, 0.0, tmp_path, {0: waits, 1: late}))
    culprit = place_of(finding)["culprit"]
    assert (culprit["module"], culprit["rank"]) == ("decoder", 1)


def test_variants_are_recipes_that_mean_what_they_say() -> None:
    variant = variant_of(strategy="fsdp", shard_ranks=2, offload=True)
    one, copies, few = alone(variant), as_ddp(variant), only_tasks(variant, ["t3"])
    assert one is not None
    assert copies is not None
    assert few is not None
    assert (one.ranks, one.recipe.engine.strategy, one.recipe.engine.micro_batch_size) == (1, "single", 2)
    assert (copies.ranks, copies.recipe.engine.shard_ranks, copies.recipe.engine.offload) == (4, None, False)
    assert (names(few), few.recipe.gate[0].tasks) == ({"t3"}, None)
