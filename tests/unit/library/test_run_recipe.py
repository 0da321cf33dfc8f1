"""The order of steps: what is left out, what is done again, and what is written down when a step does not end well.

The steps here write small files; the real ones are in `tests/integration/test_run_command.py`.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from ups.config.recipe import ResolvedRecipe, resolve
from ups.config.schema import GateCondition
from ups.errors import DataError, RunHeldError
from ups.library import run_recipe
from ups.library.recipe_steps import Job, RecipeStep, before_gate
from ups.library.run_recipe import StepLines
from ups.library.train import Output
from ups.record.identity import file_sha256
from ups.run.steps_file import read_steps
from ups.supervise.run_file import hold_steps

RECIPE = """
run: { name: a }
data: { tasks: [{ name: waves, path: waves.npy }] }
stages: [{ type: operator, steps: 1 }]
"""


# Each step, and whose file it copies.
FROM = {"train": "first", "gate": "train", "bundle": "gate"}


class Place:
    """Three steps in a row: each copies the file of the one before it, and counts how often it was done."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir = folder, folder / "run"
        (folder / "recipe.yaml").write_text(RECIPE)
        (folder / "first").write_text("content")
        self.resolved: ResolvedRecipe = resolve(folder / "recipe.yaml")
        self.done: list[str] = []
        self.error: BaseException | None = None
        self.gate_failed = ""

    def steps(self) -> Sequence[RecipeStep]:
        return (self.step("train", "first"), self.step("gate", "train"), self.step("bundle", "gate", good=True))

    def step(self, name: str, before: str, *, good: bool = False) -> RecipeStep:
        def work(job: Job) -> str:
            self.done.append(name)
            if name == "train" and self.error is not None:
                raise self.error
            (self.folder / name).write_bytes((self.folder / before).read_bytes())
            if name == "gate":
                job.gate_failed = self.gate_failed
            return job.gate_failed or f"copied {before}"

        return RecipeStep(
            name,
            f"copying {before}",
            inputs=lambda job: file_sha256(self.folder / before),
            outputs=lambda job: file_sha256(self.folder / name),
            work=work,
            after_failed_gate=not good,
        )

    def run(self, output: Output | None = None) -> tuple[int, list[str]]:
        """Exit code, and which steps were done."""
        self.done = []
        return run_recipe.run_resolved(self.resolved, self.run_dir, 1, output or Output()), self.done

    def outcomes(self) -> dict[str, str]:
        return {record.name: record.outcome for record in read_steps(self.run_dir)}


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    made = Place(tmp_path)
    monkeypatch.setattr(run_recipe, "STEPS", made.steps())
    return made


def test_a_log_has_a_line_when_a_step_begins_and_one_when_it_has_ended(
    desk: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert desk.run(StepLines())[0] == 0
    out, err = capsys.readouterr()
    assert [line[21:] for line in err.splitlines()] == [
        "train: copying first",
        "gate: copying train",
        "bundle: copying gate",
    ]
    lines = [re.sub(r" +", " ", line) for line in out.splitlines()]
    assert lines[:3] == [f"{name} copied {before} (0 s)" for name, before in FROM.items()]
    assert lines[3].startswith("next: ups rollout ")
    assert "run --picture run.png; the report is " in lines[3]
    assert len(lines) == 4
    desk.run(StepLines())
    assert capsys.readouterr().err == ""


def test_the_last_line_after_a_failed_gate_says_where_the_reasons_are(
    desk: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    desk.gate_failed = "waves: too bad"
    desk.run(StepLines())
    lines = capsys.readouterr().out.splitlines()
    assert "not passed: waves: too bad" in lines[1]
    assert lines[2].startswith("next: ups why ")


def test_only_the_gate_pronounces_a_verdict_about_a_training_that_came_to_its_end(desk: Place) -> None:
    gated = desk.resolved.recipe.model_copy(update={"gate": [GateCondition(metric="trmse", at_most=1.0)]})
    for recipe, count in ((desk.resolved.recipe, 3), (gated, 2)):
        said: list[str] = []
        say = before_gate(said.append, recipe)
        for line in ("FAILED rank=1", "VERDICT state=failed exit=6", "VERDICT state=completed exit=0"):
            say(line)
        assert len(said) == count


def test_nothing_is_done_twice(desk: Place) -> None:
    assert desk.run() == (0, ["train", "gate", "bundle"])
    assert desk.run() == (0, [])
    assert set(desk.outcomes().values()) == {"done"}


def test_a_change_repeats_what_depends_on_it_and_nothing_before(desk: Place) -> None:
    desk.run()
    (desk.folder / "train").write_text("foreign content")
    assert desk.run() == (0, ["train"]), "it made the same again, so that nothing after it has changed"
    (desk.folder / "first").write_text("other content")
    assert desk.run() == (0, ["train", "gate", "bundle"])
    (desk.folder / "bundle").unlink()
    assert desk.run() == (0, ["bundle"])
    (desk.run_dir / "steps.json").unlink()
    assert desk.run() == (0, ["train", "gate", "bundle"]), "without a memory everything is done again"


def test_a_failed_gate_is_a_code_that_stays_until_something_changes(desk: Place) -> None:
    desk.gate_failed = "waves: trmse at most 1: is 2"
    assert desk.run() == (9, ["train", "gate"])
    assert desk.outcomes() == {"train": "done", "gate": "gate_failed"}
    assert desk.run() == (9, [])
    desk.gate_failed = ""
    (desk.folder / "gate").unlink()
    assert desk.run() == (0, ["gate", "bundle"])


@pytest.mark.parametrize(
    ("error", "outcome", "cause"),
    [
        (DataError("it is gone"), "failed", "data"),
        (KeyError("x"), "failed", "exception(KeyError)"),
        (KeyboardInterrupt(), "interrupted", ""),
    ],
)
def test_a_step_that_fails_is_written_down_and_tried_again(
    desk: Place, error: BaseException, outcome: str, cause: str
) -> None:
    desk.error = error
    with pytest.raises(type(error)):
        desk.run()
    (record,) = read_steps(desk.run_dir)
    assert (record.outcome, record.cause) == (outcome, cause)
    desk.error = None
    assert desk.run() == (0, ["train", "gate", "bundle"])


def test_two_at_once_are_refused(desk: Place) -> None:
    with hold_steps(desk.run_dir), pytest.raises(RunHeldError, match="another `ups run`"):
        desk.run()
    assert desk.done == []
