"""The model that comes with the package: complete, small, better than what costs nothing, and without dead parts.

Skipped in a checkout without it, but for the tests that show on a made model that the checks can fail.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.integration.environments import ROOT
from tests.support.calibrated_bundle import make_shipped
from tests.support.dead_parts import dead_parts, parts_of, states_of
from ups.data.open import open_paths
from ups.inference.bundle import load_bundle
from ups.inference.stored_scores import SCORES, bundle_warnings, score_rows

BUNDLE = ROOT / "src" / "ups" / "shipped" / "ups-joint" / "bundle"
TASKS = ["advection1d", "burgers1d", "ks1d", "reacdiff1d", "euler1d", "ns2d", "swe2d", "diffreact2d", "darcy2d"]
MAX_BYTES, MAX_STATES_BYTES = 8_000_000, 6_000_000

shipped = pytest.mark.skipif(not BUNDLE.is_dir(), reason="this checkout has no shipped model")


@shipped
def test_it_knows_the_nine_tasks_with_scores_and_error_bars() -> None:
    bundle = load_bundle(BUNDLE)  # verifies every byte
    assert {task.name for task in bundle.info.tasks} >= {*TASKS}
    assert bundle.calibrations.keys() == {task.name for task in bundle.info.tasks}
    assert bundle_warnings(bundle.info.scores, bundle.info.provenance) == []
    for task in TASKS:
        rows = score_rows(task, bundle.info.scores[task], SCORES)
        assert rows
        assert all(row.model < 0.5 * row.reference for row in rows), rows


@shipped
def test_it_is_small_and_names_nothing_of_the_machine_that_trained_it() -> None:
    files = [path for path in BUNDLE.parent.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files if BUNDLE in path.parents) <= MAX_BYTES
    assert sum(path.stat().st_size for path in files) <= MAX_BYTES + MAX_STATES_BYTES
    texts = {path.name: path.read_text() for path in files if path.suffix in (".json", ".yaml", ".md")}
    found = {name: re.findall(r"(?<![\w.])/(?:root|home|tmp|work|mnt|Users)/\S*", text) for name, text in texts.items()}
    assert not any(found.values()), found


@shipped
def test_test_states_of_each_task_came_along() -> None:
    for task in load_bundle(BUNDLE).info.tasks:
        reader = open_paths(BUNDLE.parent / "states" / f"{task.name}.zarr")
        assert reader.splits["test"] >= 4
        assert reader.splits["train"] == 0, "states to start from, and nothing to train on"


@shipped
def test_no_part_of_its_networks_is_dead() -> None:
    assert dead_parts(load_bundle(BUNDLE).stepper, states_of(BUNDLE)) == []


def test_a_planted_part_that_nothing_uses_is_noticed(tmp_path: Path) -> None:
    bundle = make_shipped(tmp_path / "made")
    stepper = load_bundle(bundle).stepper
    before = {name: value.clone() for name, value in stepper.state_dict().items()}
    stepper.networks["operator"].unused = nn.Linear(4, 4)
    assert "networks.operator.unused.weight" in dead_parts(stepper, states_of(bundle))
    assert all(torch.equal(value, stepper.state_dict()[name]) for name, value in before.items()), "put back"
    assert "networks.operator.unused.weight" in parts_of(stepper)
