"""Every score that `ups train`, `ups eval`, `ups compare` and a card print has its reference next to it.

The real commands run small; their output is read number by number. A number that no rule below explains as a score
with its reference in the same line is a failure, so a new number must bring its reference.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.integration.environments import ROOT
from tests.support.command_line import ups_here
from ups.formats.store_writer import StoreWriter
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

NUMBER = r"(?:-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|inf|nan)"
REFERENCE = r"(?:persistence|training mean|linear extrapolation)"
# Lines of a command that hold no score.
NO_SCORES = re.compile(
    r"stage \d|VERDICT |wrote |scoring |Errors on |one step, rollout|reference: |recipe of |  \S+: \S+ -> "
)
MODELS = {"train": 1, "eval": 1, "compare": 2}
SPLITS = {"train": 8, "valid": 8, "test": 8}


def unexplained(line: str, num_models: int = 1) -> list[str]:
    """The numbers of a line that are no score with its reference next to it."""
    if NO_SCORES.search(line) or re.match(r"\s*(task|error)\s+.*reference", line):
        return []
    line = re.sub(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d  ", "", line)  # when a line of progress was written
    rest = re.sub(r"^valid step \d+", "", line)
    rest = re.sub(r"^\S+: \d+ trajectories(, \d+ steps)?, ", "", rest)  # head of a comparison
    rest = re.sub(r"\(\d+ steps\)|, better on \d+ of \d+ trajectories", "", rest)
    rest = rest.replace("; fewer than 6 cannot be significant", "")
    rest = re.sub(rf"minus \S+: {NUMBER} \[{NUMBER}, {NUMBER}\]", "", rest)  # held against another model
    rest = re.sub(rf"one_step {NUMBER} \({REFERENCE} {NUMBER}", "", rest)  # validation
    # a row of a table: one number for each model, then that of the reference with its name, then their ratio
    rest = re.sub(rf"(?:\s{{2,}}{NUMBER}\*?){{{num_models}}}\s{{2,}}{NUMBER}\s+{REFERENCE}(\s+{NUMBER}x)?", " ", rest)
    return re.findall(rf"(?<![\w.]){NUMBER}(?![\w.])", rest)


def scores_of(card: str) -> list[str]:
    """Lines of a card's section of scores; what each stage brought is another section."""
    return card.split("## Scores")[1].split("## ")[0].splitlines()


def unexplained_in_card(card: str) -> list[str]:
    """The rows of a card's scores in which a number has no reference next to it."""
    rows = [line for line in scores_of(card) if line.startswith("| ")][1:]
    sound = re.compile(rf"\|[^|]+\|[^|]+\|[^|]+\| {NUMBER} \| {NUMBER} \({REFERENCE}\) \| {NUMBER} \|[^|]*\|")
    assert rows
    return [row for row in rows if not sound.fullmatch(row)]


def write_data(folder: Path) -> None:
    """Small stores under the names of recipes/tiny.yaml."""
    draw = np.random.default_rng(0)
    x = (np.arange(32) + 0.5) / 32
    wave = TaskSpec(
        "advection1d",
        (FieldSpec("u"),),
        (AxisSpec("x"),),
        (ParameterSpec("beta", minimum=0.1, maximum=4.0),),
        dt=0.05,
        symmetries=("translation",),
    )
    with StoreWriter(folder / "advection1d.zarr", wave, [x], 6) as writer:
        for split, count in SPLITS.items():
            for _ in range(count):
                beta, shift = draw.uniform(0.1, 4.0), draw.uniform()
                moved = x - 0.05 * beta * np.arange(6)[:, None] + shift
                state = np.sin(2 * np.pi * moved)[:, None].astype(np.float32)
                writer.append(split, state=state, parameters=[beta])
    bounded = (AxisSpec("x", "dirichlet"), AxisSpec("y", "dirichlet"))
    flow = TaskSpec("darcy2d", (FieldSpec("a", "static"), FieldSpec("u", "target")), bounded, steady=True)
    with StoreWriter(folder / "darcy2d.zarr", flow, [x[::2]] * 2, 0) as writer:
        for split, count in SPLITS.items():
            for _ in range(count):
                fields = draw.normal(size=(2, 1, 16, 16)).astype(np.float32)
                writer.append(split, static=fields[0], target=fields[1])


def ups(desk: Path, *arguments: str) -> list[str]:
    """Lines that a command printed, to either stream."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_COLOR", "1")
        patch.setenv("HOME", str(desk))
        done = ups_here(desk, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Command -> its lines; `card` -> the card."""
    desk = tmp_path_factory.mktemp("desk")
    (desk / "data").mkdir()
    write_data(desk / "data")
    recipe = str(ROOT / "recipes" / "tiny.yaml")
    lines = {"train": ups(desk, "train", recipe, "--set", "stages.0.steps=6")}
    lines["eval"] = ups(desk, "eval", "tiny", "--no-report")
    ups(desk, "eval", "runs/tiny/bundle", "--recipe-data", "--no-report", "--out", "other")
    lines["compare"] = ups(desk, "compare", "tiny", "other")
    lines["card"] = (desk / "runs" / "tiny" / "bundle" / "card.md").read_text().splitlines()
    return lines


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_no_number_stands_without_its_reference(printed: dict[str, list[str]]) -> None:
    for command in ("train", "eval", "compare"):
        lines = printed[command]
        assert {line: numbers for line in lines if (numbers := unexplained(line, MODELS[command]))} == {}, command
        rows = [line for line in printed[command] if re.search(rf"{NUMBER}\s+{REFERENCE}", line)]
        assert len(rows) >= 7, "four scores of a transient and three of a steady task"
    assert unexplained_in_card("\n".join(printed["card"])) == []
    assert any("valid step " in line and "(training mean " in line for line in printed["train"])


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_every_score_has_its_verdict_and_equal_models_have_no_star(printed: dict[str, list[str]]) -> None:
    for command in ("train", "eval", "card"):
        lines = scores_of("\n".join(printed[command])) if command == "card" else printed[command]
        lines = [line for line in lines if not line.startswith("wrote ")]  # what is not better stands there again
        rows = [line for line in lines if re.search(r"(one step|rollout|solution|median \w+) .*\d", line)]
        assert len(rows) == 7
        for row in rows:
            assert re.search(rf"(not better|better|not significantly better|worse) than (the )?{REFERENCE}", row), row
    assert "*" not in "".join(line for line in printed["compare"] if "significantly best" not in line)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_removed_reference_is_seen(printed: dict[str, list[str]]) -> None:
    """The guard of the first test: each score in turn loses its reference."""
    broken = 0
    for command in ("train", "eval", "compare"):
        for line in printed[command]:
            without = re.sub(rf"{NUMBER}\s+(?={REFERENCE})", "", line)
            without = re.sub(rf"\({REFERENCE} {NUMBER}", "(", without)
            if without != line:
                broken += 1
                assert unexplained(without, MODELS[command]), without
    assert broken >= 20
    card = "\n".join(printed["card"])
    assert unexplained_in_card(re.sub(rf"\| {NUMBER} \({REFERENCE}\) \|", "| - |", card))


def test_lines_that_flatter_are_seen() -> None:
    """What was printed before: a rollout without reference, and a table of models alone."""
    assert unexplained(
        "  burgers1d  0.004112  0.1285     persistence  31.2x  0.02076  0.06746       0.06715       0 of 64"
    )
    assert unexplained("  A  0.9273*  2.169  2.017  2.009  -")
    assert unexplained("valid step 40  burgers1d/one_step 0.004")
