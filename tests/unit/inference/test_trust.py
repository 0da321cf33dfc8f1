"""What not to believe a result for: for each sample, readable by programs, and empty when there is nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray

from tests.support.small_bundle import make_bundle
from ups import Simulator
from ups.inference.bundle import load_bundle, write_bundle
from ups.inference.simulator import BundleWarning
from ups.inference.trust import KINDS, kinds_of, scored_steps
from ups.models.stepper import rollout

X = np.arange(16) / 16
U = np.sin(2 * np.pi * X)[None]
SCORES = {"advection": {"protocol": "test, 8 trajectories, 40 steps from frame 0", "predictors": {}}}


@pytest.fixture(scope="module")
def simulator(tmp_path_factory) -> Simulator:
    bundle = load_bundle(make_bundle(tmp_path_factory.mktemp("bundles") / "small"))
    return Simulator(replace(bundle, info=replace(bundle.info, scores=SCORES)), next(bundle.stepper.buffers()).device)


def scored_bundle(path: Path, verdicts: dict[str, str]) -> Path:
    """A bundle with a rollout score of each task, and this verdict about it."""
    bundle = load_bundle(make_bundle(path.with_name("unscored")))
    predictors = {"model": {"trmse": 0.5}, "training mean": {"trmse": 0.4}}
    scores = {
        task: {"protocol": "", "predictors": predictors, "headline": [{"score": "rollout", "verdict": verdict}]}
        for task, verdict in verdicts.items()
    }
    return write_bundle(path, bundle.stepper, replace(bundle.info, scores=scores), config_text="", card="")


def kinds(result: xarray.Dataset) -> list[list[str]]:
    return [kinds_of(int(flags)) for flags in np.atleast_1d(result["warnings"].values)]


def through_files(result: xarray.Dataset, folder) -> list[xarray.Dataset]:
    result.to_netcdf(folder / "r.nc", engine="h5netcdf")
    result.to_zarr(folder / "r.zarr", consolidated=False)
    return [
        xarray.load_dataset(folder / "r.nc", engine="h5netcdf"),
        xarray.open_zarr(folder / "r.zarr", chunks=None, consolidated=False).load(),
    ]


def test_nothing_to_say_is_false_in_memory_and_from_every_file(simulator, tmp_path):
    memory = simulator.rollout(U, 40, {"beta": 1.0}, task="advection")
    streamed = simulator.rollout(U, 40, {"beta": 1.0}, task="advection", out=tmp_path / "streamed.zarr")
    for result in (memory, streamed, *through_files(memory, tmp_path)):
        assert not result.attrs["warnings"]
        assert not result.attrs["blew_up"]
        assert not result["warnings"]
        assert not result["blew_up"]
        assert result["blew_up"].dtype == bool
        assert result["warnings"].dtype == np.int32


def test_warnings_belong_to_samples(simulator, tmp_path):
    states = np.stack([U, 1000 * U, U, U])
    betas = [1.0, 1.0, 7.9, 0.1]
    memory = simulator.rollout(states, 2, {"beta": betas}, task="advection")
    streamed = simulator.rollout(states, 2, {"beta": betas}, task="advection", out=tmp_path / "streamed.zarr")
    for result in (memory, streamed, *through_files(memory, tmp_path)):
        assert kinds(result) == [[], ["amplitude", "diverged"], ["parameter_range"], []]
        first, second, third = result.attrs["warnings"].split("; ")
        assert third == "the result is not a prediction from there on: sample 1 diverged at step 1 (time 0.05)"
        assert first == "sample 2: parameter beta=7.9 is outside the training range [0.1, 4] by 3.9 (1 of its width)"
        assert second.startswith(
            "sample 1: state u is unlike the training data: its RMS is 471 and its largest value 667"
        )
        words, masks = (result["warnings"].attrs[key] for key in ("flag_meanings", "flag_masks"))
        meanings = dict(zip(words.split(), masks, strict=True))
        assert list(meanings) == list(KINDS)
        assert int(result["warnings"][1]) == meanings["amplitude"] | meanings["diverged"]


def test_a_rollout_that_is_longer_than_scored_says_so(simulator):
    result = simulator.rollout(U, 1000, {"beta": 1.0}, task="advection", every=1000)
    assert kinds(result) == [["rollout_length"]]
    assert result.attrs["warnings"] == "1000 steps are 25 times longer than the 40 that were scored"
    assert not simulator.rollout(U, 40, {"beta": 1.0}, task="advection").attrs["warnings"]


def test_the_scored_length_is_read_from_old_and_new_bundles_and_never_breaks():
    assert scored_steps(SCORES, "advection") == 40
    assert scored_steps({"a": {"num_steps": 7, "protocol": "?"}}, "a") == 7
    for odd in ({}, {"a": 3}, {"a": {"num_steps": "x"}}, {"a": {"num_steps": True}}, {"a": {"protocol": ["4 steps"]}}):
        assert scored_steps(odd, "a") is None


def test_a_task_without_scores_is_noted_but_no_warning(simulator):
    result = simulator.rollout(static=np.ones((1, 16, 16)), task="darcy")
    assert not result.attrs["warnings"]
    assert "no scores of this task" in result.attrs["notes"]


def test_a_result_of_a_task_that_is_not_better_than_a_baseline_says_so_for_each_sample(tmp_path):
    verdicts = {"advection": "not better than the training mean", "darcy": "better than the training mean"}
    bundle = load_bundle(scored_bundle(tmp_path / "bad", verdicts))
    with pytest.warns(BundleWarning, match="advection: this simulator is not better than the training mean") as caught:
        simulator = Simulator.load(bundle.path, device="cpu")
    assert len(caught) == 1
    assert caught[0].filename == __file__, "the warning names the line of the caller"
    result = simulator.rollout(np.stack([U, U]), 2, {"beta": 1.0}, task="advection")
    assert kinds(result) == [["not_better"]] * 2
    assert result["warnings"].values.tolist() == [64, 64]
    words = "this simulator is not better than the training mean: rollout 0.5 (0.4)"
    assert result.attrs["warnings"] == words
    assert not simulator.rollout(static=np.ones((1, 16, 16)), task="darcy").attrs["warnings"]


def test_a_bundle_that_is_better_loads_in_silence(tmp_path, recwarn):
    Simulator.load(scored_bundle(tmp_path / "good", {"advection": "better than persistence"}), device="cpu")
    assert not [one for one in recwarn if issubclass(one.category, BundleWarning)]


def test_a_given_field_far_from_its_training_data_is_named(simulator):
    result = simulator.rollout(static=np.stack([np.ones((1, 16, 16)), 1e6 * np.ones((1, 16, 16))]), task="darcy")
    assert kinds(result) == [[], ["amplitude"]]
    assert "static a is unlike" in result.attrs["warnings"]


@pytest.mark.parametrize("out", [None, "blown.zarr"])
def test_a_blow_up_is_reported_for_each_sample(simulator, tmp_path, out, monkeypatch):
    def bursting(predictor, batch, num_steps):
        for number, frame in enumerate(rollout(predictor, batch, num_steps)):
            frame = frame.clone()
            if number >= 2:
                frame[1, 0, 3] = float("nan")
            yield frame

    monkeypatch.setattr("ups.inference.simulator.rollout", bursting)
    monkeypatch.setattr("ups.inference.results.CHUNK_BYTES", 16 * 4 * 3)
    states = np.stack([U, U, U])
    result = simulator.rollout(states, 5, {"beta": 1.0}, task="advection", out=out and tmp_path / out)
    assert result["blew_up"].values.tolist() == [False, True, False]
    assert result.attrs["blew_up"] == "sample 1 diverged at step 3 (time 0.15)"


@pytest.fixture(scope="module")
def growing(tmp_path_factory) -> Simulator:
    """A simulator whose rollouts grow without end, and stay finite for hundreds of steps."""
    return Simulator.load(make_bundle(tmp_path_factory.mktemp("bundles") / "growing", ensemble=True), device="cpu")


@pytest.mark.parametrize("out", [None, "grown.zarr", "grown.nc"])
def test_a_rollout_that_grows_beyond_all_training_data_has_diverged_though_it_is_finite(growing, tmp_path, out):
    states = np.stack([U, 100 * U])
    result = growing.rollout(states, 400, {"beta": 1.0}, task="advection", every=50, out=out and tmp_path / out)
    assert np.isfinite(result["u"].values).all()
    assert abs(result["u"].values).max() > 1e6
    assert result["blew_up"].values.tolist() == [True, True]
    first, second = result["diverged_at"].values.tolist()
    assert 1 < second < first < 400
    assert result.attrs["blew_up"].startswith(f"sample 0 diverged at step {first} (time {0.05 * first:g}); sample 1 ")
    steps = 50 * np.arange(1, 9)
    np.testing.assert_array_equal(result["diverged"], steps >= result["diverged_at"].values[:, None])
    assert result["diverged"].dims == ("sample", "time")
    assert result["diverged"].dtype == bool
    # its RMS at that step is above the limit, and not before: 100 deviations of 1.5 where nothing else is known
    around = growing.rollout(U, first, {"beta": 1.0}, task="advection")["u"].values
    sizes = np.sqrt(np.square(around - 0.1).mean(axis=1))
    assert sizes[-1] > 150 >= sizes[:-1].max()


def test_each_member_diverges_on_its_own(growing):
    result = growing.rollout(U, 200, {"beta": 1.0}, task="advection", members=4, every=100)
    steps = result["diverged_at"]
    assert steps.dims == ("member",)
    assert (steps > 100).all()
    np.testing.assert_array_equal(result["blew_up"], steps > 0)
    assert result["diverged"].dims == ("member", "time")


def with_ranges(simulator: Simulator) -> Simulator:
    """The same simulator with the ranges of waves 1 to 3 of amplitudes up to 1, and of smooth coefficients of darcy."""
    from ups.spec.descriptors import RangeFinder, ranges_fit

    draw = np.random.default_rng(0)
    amplitudes = draw.uniform(0, 1, (64, 3, 1))
    waves = np.sin(2 * np.pi * (np.arange(1, 4)[:, None] * X + draw.uniform(size=(64, 3, 1))))
    frames = {
        "advection": {"state": (amplitudes * waves).sum(1)[:, None, None]},
        "darcy": {role: np.ones((64, 1, 1, 16, 16)) * amplitudes[:, :1, None, None] for role in ("static", "target")},
    }
    info, statistics = simulator._bundle.info, dict(simulator._bundle.info.statistics)
    for task, roles in frames.items():
        ranges = {}
        for role, values in roles.items():
            finder = RangeFinder(simulator.tasks[task].axes)
            finder.add(range(64), values)
            ranges[role] = finder.ranges([0.1], [1.5])
        statistics[task] = replace(statistics[task], ranges=ranges)
        assert ranges_fit(statistics[task].ranges, simulator.tasks[task], [16] * len(simulator.tasks[task].axes))
    return Simulator(replace(simulator._bundle, info=replace(info, statistics=statistics)), simulator._device)


def test_a_state_of_usual_size_with_other_waves_or_another_mean_is_named(simulator, tmp_path):
    states = np.stack([U, 0.7 * np.sin(2 * np.pi * 6 * X)[None], U + 0.3, np.sign(X - 0.5)[None]])
    for out in (None, tmp_path / "r.nc"):
        result = with_ranges(simulator).rollout(states, 2, {"beta": 1.0}, task="advection", out=out)
        assert kinds(result) == [[], ["descriptor"], ["descriptor"], ["descriptor"]]
        assert int(result["warnings"][1]) == 32
    text = result.attrs["warnings"]
    assert text.startswith("samples 1, 2, 3, worst: state u is unlike the training data: its RMS of waves ")
    assert "cannot tell" not in result.attrs["notes"]


def test_a_given_field_of_a_steady_task_is_described_too(simulator):
    checkered = np.indices((16, 16)).sum(0)[None] % 2.0
    result = with_ranges(simulator).rollout(static=np.stack([np.full((1, 16, 16), 0.5), checkered]), task="darcy")
    assert kinds(result) == [[], ["descriptor"]]
    assert "static a is unlike the training data" in result.attrs["warnings"]


def test_a_bundle_without_ranges_says_that_it_cannot_tell(simulator):
    result = simulator.rollout(np.sign(X - 0.5)[None], 2, {"beta": 1.0}, task="advection")
    assert kinds(result) == [[]]
    assert "cannot tell whether a state is unlike its training" in result.attrs["notes"]


def test_a_field_keeps_its_name(tmp_path):
    from ups.inference.inputs import read_start
    from ups.inference.results import Layout, open_sink
    from ups.inference.trust import Trust
    from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

    task = TaskSpec("t", (FieldSpec("warnings"), FieldSpec("blew_up")), (AxisSpec("x"),), dt=1.0)
    start = read_start(task, 1, np.ones((2, 16)), None, None, (X,))
    sink = open_sink(Layout(task, start, 1, 1, Trust(np.zeros(1, np.int32), (), ()), {}), None)
    sink.add(np.ones((1, 2, 16), np.float32))
    result = sink.finish()
    assert result["warnings"].dims == ("time", "x")
    assert not result["warnings_"]
    assert not result["blew_up_"]
