"""A stored bundle loads forever and gives the same answers.

The bundles in bundles/vN were written once by bundles/make.py of their time, and no test writes them again. If this
test fails, the reader of bundles or the arithmetic of a model has changed: keep the old way for old bundles, do not
renew the files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit.inference.bundles.make import HERE, STORED
from ups import Simulator
from ups.inference.bundle import VERSION

ANSWERS = sorted(HERE.glob("v*/*.npz"))


def test_there_is_a_stored_bundle_of_every_format_version() -> None:
    assert {path.parent.name for path in ANSWERS} == {f"v{n}" for n in range(1, VERSION + 1)}
    assert {path.stem for path in ANSWERS if path.parent.name == f"v{VERSION}"} == set(STORED)


@pytest.mark.parametrize("answers", ANSWERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_stored_bundle_answers_as_on_its_first_day(answers: Path) -> None:
    simulator = Simulator.load(answers.with_suffix(""), device="cpu")
    with np.load(answers, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in stored.files}
    assert {name.split(".")[0] for name in arrays} == set(simulator.tasks)
    for task in simulator.tasks.values():
        own = {k.removeprefix(f"{task.name}."): v for k, v in arrays.items() if k.startswith(f"{task.name}.")}
        parameters = {k.removeprefix("parameters."): v for k, v in own.items() if k.startswith("parameters.")}
        expected = {k.removeprefix("answer."): v for k, v in own.items() if k.startswith("answer.")}
        steps = 1 if task.steady else next(iter(expected.values())).shape[1]
        result = simulator.rollout(own.get("state"), steps, parameters, task=task.name, static=own.get("static"))
        for field, values in expected.items():
            np.testing.assert_allclose(
                result[field].values, values, rtol=1e-5, atol=1e-5, err_msg=f"{task.name} {field}"
            )
        if not task.steady:
            assert any(np.abs(v[:, -1] - v[:, 0]).max() > 0.1 for v in expected.values()), "the answer must move"


@pytest.mark.parametrize("answers", ANSWERS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_stored_bundle_is_small_and_plain(answers: Path) -> None:
    files = [answers, *answers.with_suffix("").iterdir()]
    assert sum(path.stat().st_size for path in files) < 200_000
    assert {path.suffix for path in files} <= {"", ".json", ".md", ".npz", ".safetensors", ".yaml"}
