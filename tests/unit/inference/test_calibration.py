"""Error bars and doubt: the order statistics, what a rollout states, when it declines, and files that lie."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import ups
from tests.support.calibrated_bundle import STEPS, TASKS, Drawn, calibrated_bundle, largest
from tests.support.small_bundle import ADVECTION, FLOW, make_bundle
from ups.errors import BundleError
from ups.inference.bundle import load_bundle
from ups.inference.calibration import Calibration, TaskDocument, choose_leads, order_statistics
from ups.inference.trust import kinds_of
from ups.record.manifest import commit_directory, make_temporary
from ups.spec.task import TaskSpec


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of three tasks with statements about them."""
    return calibrated_bundle(tmp_path_factory.mktemp("bundle") / "b")


@pytest.fixture(scope="module")
def simulator(calibrated: Path) -> ups.Simulator:
    return ups.Simulator.load(calibrated)


def usual(task: TaskSpec, rows: range = range(40)) -> dict[str, Any]:
    reader = Drawn(task)
    windows = [reader.read("train", n, 0, 0 if task.steady else 1) for n in rows]
    given: dict[str, Any] = {"task": task.name, "steps": 1 if task.steady else STEPS}
    given["parameters"] = {
        p.name: np.array([w.parameters[i] for w in windows]) for i, p in enumerate(task.parameters)
    } or None
    if not task.steady:
        given["state"] = np.stack([w.state[0] for w in windows])
    if task.num_channels("static"):
        given["static"] = np.stack([w.static for w in windows])
    return given


def test_order_statistics_hold_for_new_draws() -> None:
    draw = np.random.default_rng(0)
    covered = []
    for count in (9, 30, 256, 1000):
        for _ in range(300):
            scores = draw.exponential(size=(count, 1))
            calibration = statements_of(scores)
            covered.append(draw.exponential() <= calibration.bound("fields", 0.9)[0])
    assert 0.88 <= np.mean(covered) <= 0.925


def statements_of(scores: np.ndarray) -> Calibration:
    document = TaskDocument(count=len(scores), data="", split="", leads=[1])
    empty: Any = None
    kept = {"fields": order_statistics(scores), "distance": order_statistics(scores[:, 0])}
    return Calibration(document, empty, kept)


def test_a_bound_is_the_score_of_its_rank() -> None:
    scores = np.random.default_rng(1).permutation(np.arange(1.0, 10))[:, None]
    assert statements_of(scores).bound("fields", 0.9) == [9]
    assert statements_of(scores).bound("fields", 0.5) == [5]
    assert np.isnan(statements_of(scores).bound("fields", 0.95)).all()
    with pytest.raises(BundleError, match=r"allow levels above 0 and up to 0\.9"):
        statements_of(scores).check_level(0.95)


def test_of_many_scores_256_are_kept_and_no_bound_is_too_small() -> None:
    scores = np.arange(1.0, 10_001)[:, None]
    assert len(order_statistics(scores)[0]) == 256
    for level in (0.01, 0.5, 0.9, 0.9999):
        rank = np.ceil(10_001 * level)
        assert rank <= statements_of(scores).bound("fields", level)[0] <= rank + 40


def test_scores_of_trajectories_that_ended_earlier_do_not_count() -> None:
    scores = np.array([[1.0, np.nan], [2.0, 5.0], [3.0, np.nan]])
    kept, counts = order_statistics(scores)
    assert counts.tolist() == [3, 1]
    assert kept[:, 1].tolist() == [5.0, np.inf, np.inf]


def test_a_p_value_counts_the_trajectories_that_are_further_out() -> None:
    calibration = statements_of(np.arange(1.0, 100)[:, None])
    assert calibration.p_value(np.array([0.5, 99.0, 100.0])).tolist() == [1.0, 0.02, 0.01]
    assert calibration.alarm == 0.01
    assert statements_of(np.arange(9.0)[:, None]).alarm == 0.1


def test_a_rollout_of_many_steps_has_few_leads() -> None:
    leads = choose_leads(100_000)
    assert len(leads) <= 256
    assert (leads[0], leads[-1]) == (1, 100_000)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_errors_of_usual_trajectories_stay_below_what_is_stated(simulator: ups.Simulator, task: TaskSpec) -> None:
    result = simulator.rollout(**usual(task), level=0.8)
    reader = Drawn(task)
    field = task.fields_of(task.predicted)[-1]
    at = task.channel_names(task.predicted).index(field.name)
    truth = np.stack(
        [
            reader.read("train", n, 0, 0).target if task.steady else reader.read("train", n, 0, STEPS + 1).state[1:, at]
            for n in range(40)
        ]
    )
    away = result[field.name].values - (truth[:, at] if task.steady else truth)
    axes = tuple(range(-task.num_spatial_dims, 0))
    rms = np.sqrt((away**2).mean(axis=axes))
    stated, band = result[f"{field.name}_error"].values, result[f"{field.name}_band"].values
    assert stated.shape == rms.shape == band.shape
    assert 0.6 <= (rms <= stated).mean() <= 1.0
    assert np.isfinite(band).all()
    assert stated.max() < 20 * rms.max()


def test_quantities_have_values_and_errors(simulator: ups.Simulator) -> None:
    result = simulator.rollout(**usual(ADVECTION), level=0.8, quantities={"largest": largest})
    values = result["u"].values
    assert np.allclose(result["u_mean"], values.mean(-1), atol=1e-5)
    assert np.allclose(result["u_energy"], (values**2).mean(-1), rtol=1e-4)
    assert np.allclose(result["largest"], values.max(-1), atol=1e-5)
    assert all(np.isfinite(result[f"{n}_error"]).all() for n in ("u_mean", "u_energy", "largest"))
    assert "largest" not in simulator.rollout(**usual(ADVECTION), level=0.8)


def test_later_steps_get_no_statement(simulator: ups.Simulator) -> None:
    given = usual(ADVECTION, range(2)) | {"steps": STEPS + 2}
    stated = simulator.rollout(**given, level=0.8)["u_error"].values
    assert np.isfinite(stated[:, :STEPS]).all()
    assert np.isnan(stated[:, STEPS:]).all()


def test_every_nth_frame_has_the_statements_of_its_step(simulator: ups.Simulator, tmp_path: Path) -> None:
    given = usual(ADVECTION, range(2))
    dense, thin = (simulator.rollout(**given, level=0.8, every=every) for every in (1, 2))
    assert np.allclose(thin["u_error"], dense["u_error"][:, 1::2])
    stored = simulator.rollout(**given, level=0.8, out=tmp_path / "r.nc")
    assert np.allclose(stored["u_band"], dense["u_band"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"level": 0.99}, "allow levels above 0 and up to 0.952"),
        ({"level": 0}, "level 0 cannot be stated"),
        ({"level": 0.8, "quantities": {"drag": largest}}, "'drag' was not calibrated"),
        ({"on_doubt": "panic"}, "on_doubt is one of"),
    ],
)
def test_what_cannot_be_stated_is_refused(simulator: ups.Simulator, change: dict[str, Any], words: str) -> None:
    with pytest.raises(BundleError, match=words):
        simulator.rollout(**usual(ADVECTION, range(2)), **change)


def test_another_grid_gets_no_error_bars(simulator: ups.Simulator) -> None:
    state = np.repeat(usual(ADVECTION, range(2))["state"], 2, axis=-1)
    given = usual(ADVECTION, range(2)) | {"state": state}
    with pytest.raises(BundleError, match="on the trained grid"):
        simulator.rollout(**given, level=0.8)


def test_a_bundle_without_statements_says_what_to_do(tmp_path: Path) -> None:
    plain = ups.Simulator.load(make_bundle(tmp_path / "b", tasks=(ADVECTION,)))
    given = usual(ADVECTION, range(2))
    assert "p_value" not in plain.rollout(**given)
    for change in ({"level": 0.9}, {"on_doubt": "stop"}):
        with pytest.raises(BundleError, match="was not calibrated") as caught:
            plain.rollout(**given, **change)
        assert "ups calibrate" in caught.value.hint


def test_usual_states_raise_no_doubt_and_strange_ones_do(simulator: ups.Simulator) -> None:
    given = usual(ADVECTION)
    result = simulator.rollout(**given)
    assert (result["outside_at"].values > 0).mean() <= 0.15
    assert (np.diff(result["p_value"].values, axis=1) <= 0).all()
    strange = given | {"state": given["state"] * 20}
    doubted = simulator.rollout(**strange)
    assert (doubted["outside_at"].values == 1).all()
    assert (doubted["p_value"].values <= 1 / 21 + 1e-6).all()
    assert "further out than calibrated" in doubted.attrs["warnings"]
    assert all(
        flags & (1 << doubted["warnings"].attrs["flag_meanings"].split().index("outside"))
        for flags in doubted["warnings"].values
    )
    ignored = simulator.rollout(**strange, on_doubt="ignore")
    assert "p_value" not in ignored
    assert "further out" not in ignored.attrs["warnings"]


def test_a_parameter_well_beyond_its_range_is_doubted_from_the_start(simulator: ups.Simulator) -> None:
    given = usual(ADVECTION, range(2))
    (parameter,) = simulator.tasks[given["task"]].parameters
    width = parameter.maximum - parameter.minimum
    values = np.array([parameter.maximum + 0.01 * width, parameter.maximum + 0.2 * width])
    result = simulator.rollout(**(given | {"parameters": {parameter.name: values}}))
    assert all("parameter_range" in kinds_of(int(flags)) for flags in result["warnings"].values)
    assert result["outside_at"].values[1] == 1
    assert result["outside_at"].values[0] != 1, "so far beyond are also new values of the same distribution"


def test_no_errors_are_stated_from_the_doubt_on(simulator: ups.Simulator) -> None:
    given = usual(ADVECTION, range(3))
    state = given["state"].copy()
    state[1] *= 20
    asked = given | {"state": state, "level": 0.8}
    result, all_the_same = (simulator.rollout(**asked, on_doubt=how) for how in ("warn", "ignore"))
    outside = result["outside_at"].values
    assert outside[1] == 1
    for name in ("u_error", "u_band", "u_energy_error"):
        expected = np.stack([(step > 0) & (np.arange(1, STEPS + 1) >= step) for step in outside])
        assert np.array_equal(np.isnan(result[name]), expected), name
        assert np.isfinite(all_the_same[name]).all()
    assert np.isfinite(result["u"]).all()


def test_stop_leaves_out_what_comes_after_the_doubt(simulator: ups.Simulator) -> None:
    given = usual(ADVECTION, range(3))
    state = given["state"].copy()
    state[1] *= 20
    result = simulator.rollout(**(given | {"state": state}), on_doubt="stop")
    gone = np.isnan(result["u"].values).all(axis=-1)
    outside = result["outside_at"].values
    expected = [(step > 0) & (np.arange(1, STEPS + 1) >= step) for step in outside]
    assert np.array_equal(gone, np.stack(expected))
    assert outside[1] == 1
    every = simulator.rollout(**(given | {"state": given["state"] * 20}), on_doubt="stop", every=2)
    assert every.sizes["time"] == STEPS // 2
    assert np.isnan(every["u"]).all()


def test_watching_changes_no_number(simulator: ups.Simulator) -> None:
    given = usual(FLOW, range(2))
    watched, plain = simulator.rollout(**given, level=0.8), simulator.rollout(**given, on_doubt="ignore")
    assert np.array_equal(watched["density"], plain["density"])


def damaged(path: Path, change: Callable[[dict[str, torch.Tensor], dict[str, str]], None]) -> Path:
    """The bundle with another calibration file, committed as if it were whole."""
    copy = make_temporary(path.with_name("damaged"))
    for file in path.iterdir():
        if file.name not in ("MANIFEST", "COMMITTED"):
            (copy / file.name).write_bytes(file.read_bytes())
    name = copy / "calibration.safetensors"
    with safe_open(name, "pt") as file:
        tensors, document = {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata())  # noqa: SIM118
    change(tensors, document)
    save_file(tensors, name, metadata=document)
    commit_directory(copy, path.with_name("damaged"))
    return path.with_name("damaged")


@pytest.mark.parametrize(
    "change",
    [
        lambda tensors, document: tensors.pop("advection/basis"),
        lambda tensors, document: tensors.update({"advection/fields": torch.zeros(3, 2)}),
        lambda tensors, document: document.update(document="{}}"),
        lambda tensors, document: document.update(document=document["document"].replace('"count": 20', '"count": -1')),
        lambda tensors, document: document.update(document=document["document"].replace("advection", "other")),
        lambda tensors, document: document.update(document=document["document"].replace("[1, 2", "[-1, 2")),
        lambda tensors, document: tensors.update({"advection/basis": torch.zeros(3)}),
        lambda tensors, document: document.clear(),
    ],
)
def test_a_calibration_that_is_not_sound_is_refused(calibrated: Path, change: Any) -> None:
    with pytest.raises(BundleError, match="cannot be read"):
        load_bundle(damaged(calibrated, change))
