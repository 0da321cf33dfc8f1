"""Faults in a run of the joint model (grouped tasks, unequal blocks, Muon, balance, a linear part fitted first, and a
corrector after it), in one that learns from latents of a frozen encoder, which it reads from a cache, and in one with a
corrector of kind flow, a student of it and a stage on steady tasks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.test_matrix import fault, reported
from tests.support.faults.small_run import rows, weights, write_recipe
from tests.support.faults.supervised import Result, run
from tests.support.latents import prepare_latents
from tests.support.mixture import MODELS, write_mixture
from ups.config.recipe import resolve
from ups.doctor.examine import Examination, examine

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

OPTIM = {"type": "muon", "learning_rate": 2e-3, "matrix_learning_rate": 5e-3, "clip_norm": 0.0, "clip_ratio": 3.0}
SLOWER = OPTIM | {"learning_rate": 5e-4, "matrix_learning_rate": 1e-3}
# Copies: one object in several places would be written as an anchor, which recipes do not have.
FLOW_STAGES = [
    {"type": "operator", "steps": 8, "loss": "nrmse", "optim": dict(OPTIM)},
    {"type": "steady", "steps": 4, "optim": dict(OPTIM), "tasks": ["darcy2d"]},
    {"type": "corrector", "kind": "flow", "steps": 10, "optim": dict(OPTIM)},
    {"type": "distill", "steps": 6, "optim": dict(OPTIM)},
]
STAGES = [
    {"type": "linear", "steps": 6},
    {"type": "operator", "steps": 14, "loss": "nrmse", "balance": 0.5, "noise": 0.005, "optim": OPTIM},
    {"type": "corrector", "kind": "ensemble", "steps": 8, "optim": SLOWER},
]


OTHERS = [pytest.param(name, marks=pytest.mark.long) for name in ("sharded", "latents", "flow")]


@pytest.fixture(scope="module", params=["joint", *OTHERS])
def recipe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    tasks = [task | {"batch_size": 4 if number else 8} for number, task in enumerate(write_mixture(folder))]
    if request.param == "latents":
        stages = [{"type": "operator", "steps": 28, "unroll_steps": 2, **prepare_latents(folder, tasks)}]
        return write_recipe(folder, tasks, save_every=4, model=MODELS["deep_encoder"], stages=stages)
    if request.param == "flow":
        return write_recipe(folder, tasks, save_every=4, model=MODELS["multiscale"], stages=FLOW_STAGES)
    engine = {"device": "cpu", "strategy": "fsdp" if request.param == "sharded" else "auto"}
    model = MODELS["multiscale"] | {"noise_size": 4}
    return write_recipe(folder, tasks, save_every=4, model=model, stages=STAGES, engine=engine)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory, recipe: Path) -> Result:
    result = run(tmp_path_factory.mktemp("clean") / "run", recipe=recipe)
    assert result.code == 0, result.output
    return result


@pytest.mark.long
def test_a_run_killed_three_times_continues_bitwise(tmp_path: Path, recipe: Path, clean: Result) -> None:
    kill_points = [(1, 5, "forward"), (0, 14, "backward"), (1, 26, "forward")]
    kills = [fault("kill", rank, step, phase, signal="SIGKILL") for rank, step, phase in kill_points]
    result = run(tmp_path / "run", *kills, restarts=3, recipe=recipe)
    assert result.code == 0, result.output
    assert len(result.faults) == 3
    assert weights(result) == weights(clean)  # model, both optimizers, average, and the averages of tasks
    said = {row["step"]: (row["loss"], row["grad_norm"]) for row in rows(clean)}
    assert all((row["loss"], row["grad_norm"]) == said[row["step"]] for row in rows(result))


@pytest.mark.parametrize("step", [9, pytest.param(23, marks=pytest.mark.long)])
def test_a_step_that_is_no_number_on_one_rank_is_skipped_by_all(tmp_path: Path, recipe: Path, step: int) -> None:
    result = run(tmp_path / "run", fault("nan", 1, step, "forward"), recipe=recipe)
    assert result.code == 0, result.output
    assert result.failed_lines == []
    assert {row["step"]: row["skipped"] for row in rows(result)}[28] == 1


@pytest.mark.long
def test_lack_of_memory_halves_the_micro_batch_and_learns_the_same(tmp_path: Path, recipe: Path, clean: Result) -> None:
    memory = [fault("out_of_memory", 1, 9, "forward", fits=2), fault("out_of_memory", 0, 23, "forward", fits=1)]
    result = run(tmp_path / "run", *memory, restarts=3, micro_batch_size=4, recipe=recipe)
    assert result.code == 0, result.output
    assert reported(result) == [(1, "forward", "out_of_memory"), (0, "forward", "out_of_memory")]
    assert result.document["overrides"] == {"engine.micro_batch_size": 1}
    assert rows(result)[-1]["loss"] == pytest.approx(rows(clean)[-1]["loss"], rel=0.02)


def test_the_doctor_proves_gradients_and_says_that_weights_of_muon_are_not_compared(
    tmp_path: Path, recipe: Path
) -> None:
    programs = ("model", "parity")  # the first leaves the gradients of one rank, which the second compares
    verdicts = examine(Examination(2, tmp_path / "run", resolve(recipe).text, only=programs))
    by_check = {verdict.check: verdict for verdict in verdicts}
    assert all(verdict.ok for verdict in verdicts), verdicts
    assert "gradients of 2 ranks are those of one" in by_check["parity"].says
    assert ("later ones are not compared" in by_check["parity"].says) == ("muon" in recipe.read_text())
