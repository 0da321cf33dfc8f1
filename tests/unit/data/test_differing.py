"""Trajectories of one set that differ in length and in time step: stored, counted, measured and scored unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ups.config.schema import DataConfig
from ups.data.inspect import card_lines, make_card
from ups.data.loader import build_loader, first_batch
from ups.data.normalize import compute_statistics
from ups.data.pack import pack
from ups.data.rank_source import WindowIndex
from ups.data.validate import trajectories_in_train, validate_paths
from ups.errors import DataError
from ups.evaluation.figures import examples
from ups.evaluation.results import task_result
from ups.evaluation.rollout import RolloutPlan, references, score_task
from ups.formats.base import Subsampling
from ups.formats.check_store import check_store
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.models.stepper import persistence
from ups.spec.batch import Batch, RankInfo
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

WAVE = TaskSpec("wave", (FieldSpec("u"),), (AxisSpec("x"),), dt=0.1)
POINTS = 16
LENGTHS = {"train": (6, 3, 9, 1), "test": (4, 9, 2)}
STEPS = {"train": (0.1, 0.2, 0.05, 0.1), "test": (0.1, 0.2, 0.4)}


def frames_of(split: str, trajectory: int) -> np.ndarray:
    """A wave that moves by dt in every frame: (T, 1, X)."""
    times = np.arange(LENGTHS[split][trajectory]) * STEPS[split][trajectory]
    x = np.arange(POINTS) / POINTS
    phase = 0.1 * trajectory + (0.05 if split == "test" else 0.0)
    return np.sin(2 * np.pi * (x - times[:, None] - phase)).astype(np.float32)[:, None]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "wave.zarr"
    with StoreWriter(path, WAVE, (np.arange(POINTS) / POINTS,), 9) as writer:
        for split, lengths in LENGTHS.items():
            for number, length in enumerate(lengths):
                state = frames_of(split, number)
                # one of them as a source that is read piece by piece
                source = state if number else (lambda first, stop, state=state: state[first:stop])
                writer.append(split, state=source, frames=length, dt=STEPS[split][number])
    return path


def test_frames_and_steps_come_back(store: Path) -> None:
    reader = StoreReader(store)
    assert check_store(store) == []
    assert reader.differing == ("frames", "dt")
    assert (reader.num_frames, reader.task.dt, reader.task.dt_range) == (9, 0.1, (0.05, 0.4))
    for split, lengths in LENGTHS.items():
        for number, length in enumerate(lengths):
            window = reader.read(split, number, 0, length)
            assert np.array_equal(window.state, frames_of(split, number))
            assert window.dt == pytest.approx(STEPS[split][number])
            assert reader.times_in(split, number)[-1] == pytest.approx((length - 1) * STEPS[split][number])
    with pytest.raises(DataError, match="trajectories of at most 9 frames"):
        reader.read("train", 1, 0, 4)


def test_a_store_of_equal_trajectories_is_written_as_before(tmp_path: Path) -> None:
    for name, more in (("plain", {}), ("said", {"frames": 3, "dt": 0.1})):
        with StoreWriter(tmp_path / name, WAVE, (np.arange(POINTS) / POINTS,), 3) as writer:
            writer.append("train", state=frames_of("train", 0)[:3], **more)
    plain, said = (json.loads((tmp_path / name / "zarr.json").read_text()) for name in ("plain", "said"))
    assert plain == said
    assert plain["attributes"]["ups"]["version"] == 1
    assert "dt_range" not in plain["attributes"]["ups"]["task"]


def test_a_store_whose_trajectories_differ_is_not_for_older_readers(store: Path) -> None:
    attributes = json.loads((store / "zarr.json").read_text())["attributes"]["ups"]
    assert (attributes["version"], attributes["differing"]) == (2, ["frames", "dt"])


@pytest.mark.parametrize("more", [{"frames": 0}, {"frames": 10}, {"dt": 0.0}, {"dt": float("nan")}])
def test_lengths_and_steps_that_cannot_be_are_refused(tmp_path: Path, more: dict[str, float]) -> None:
    with StoreWriter(tmp_path / "a.zarr", WAVE, (np.arange(POINTS) / POINTS,), 9) as writer:
        writer.append("train", state=np.zeros((9, 1, POINTS)))
        with pytest.raises(DataError):
            writer.append("train", state=np.zeros((9, 1, POINTS)), **more)
        with pytest.raises(DataError, match="must have shape"):  # a short one must be announced
            writer.append("train", state=np.zeros((5, 1, POINTS)))


def test_every_window_of_every_trajectory_has_a_number(store: Path) -> None:
    reader = StoreReader(store)
    index = WindowIndex.of(reader, "train", 3)
    expected = [(t, s) for t, n in enumerate(LENGTHS["train"]) for s in range(n - 2)]
    assert [index.locate(n) for n in range(len(index))] == expected
    assert [index.number(*window) for window in expected] == list(range(len(index)))
    for wrong in ((1, 1), (3, 0)):
        with pytest.raises(DataError):
            index.number(*wrong)
    with pytest.raises(DataError):
        index.locate(len(index))


def test_a_pass_of_the_loader_has_every_window_once_whatever_the_world(store: Path) -> None:
    reader = StoreReader(store)
    data = DataConfig.model_validate({"tasks": [{"name": "wave", "path": str(store)}], "batch_size": 6})
    num_windows = sum(max(0, n - 1) for n in LENGTHS["train"])
    seen = {}
    for world in (1, 2, 3):
        windows: list[tuple[int, float]] = []
        loaders = [build_loader(data, [reader], RankInfo(r, world), seed=3, window_frames=2) for r in range(world)]
        for _ in range(num_windows):
            for loader in loaders:
                (batch,) = next(loader)
                assert batch.state.isfinite().all()
                windows += zip(batch.numbers.tolist(), batch.dt.tolist(), strict=True)
        seen[world] = windows
        assert sorted(n for n, _ in windows) == sorted([*range(num_windows)] * 6)
    assert seen[1] == seen[2] == seen[3]
    index = WindowIndex.of(reader, "train", 2)
    for number, dt in seen[1]:
        assert dt == pytest.approx(STEPS["train"][index.locate(number)[0]])


def test_statistics_are_of_the_frames_that_there_are(store: Path) -> None:
    statistics = compute_statistics(StoreReader(store))
    whole = np.concatenate([frames_of("train", t) for t in range(4)])
    changes = np.concatenate([np.diff(frames_of("train", t), axis=0) for t in range(4)])
    assert statistics.num_frames == len(whole) == sum(LENGTHS["train"])
    np.testing.assert_allclose(statistics.state_std, whole.std(dtype=np.float64), rtol=1e-6)
    np.testing.assert_allclose(statistics.difference_std, changes.std(dtype=np.float64), rtol=1e-6)


def test_strides_thin_every_trajectory(store: Path) -> None:
    reader = StoreReader(store, Subsampling(time_stride=2))
    assert reader.frames_of("train").tolist() == [3, 2, 5, 1]
    assert reader.dt_in("train", 1) == pytest.approx(0.4)
    assert np.array_equal(reader.read("train", 2, 1, 4).state, frames_of("train", 2)[2::2])


def test_packing_keeps_what_differs(store: Path, tmp_path: Path) -> None:
    pack(StoreReader(store), tmp_path / "again.zarr", compression="zstd")
    again = StoreReader(tmp_path / "again.zarr")
    assert again.frames_of("test").tolist() == list(LENGTHS["test"])
    assert [again.dt_in("test", t) for t in range(3)] == list(STEPS["test"])
    assert np.array_equal(again.read("test", 1, 2, 7).state, frames_of("test", 1)[2:])


def test_the_checks_read_no_further_than_the_end(store: Path) -> None:
    assert validate_paths(store).counts == {}
    reader = StoreReader(store)
    assert trajectories_in_train(reader, "test") == {}
    time = dict(card_lines(make_card(reader, [str(store)])))["time"]
    assert time == "1 to 9 frames, 0.05 to 0.4 apart, from 0 on"


def test_rollouts_go_to_the_end_of_each_trajectory_and_count_alike(store: Path) -> None:
    reader = StoreReader(store)
    plan = RolloutPlan.whole(reader, 1)
    seen_dt: list[float] = []

    def spy(batch: Batch) -> torch.Tensor:
        seen_dt.extend(batch.dt.tolist())
        return persistence(batch)

    scores = {}
    for world in (1, 2):
        parts = [score_task({"p": spy}, reader, RankInfo(r, world), plan)["p"] for r in range(world)]
        scores[world] = parts[0].merge(parts[1:])
    one, two = scores[1], scores[2]
    expected = {}
    for t in range(3):
        frames = frames_of("test", t).astype(np.float64)
        errors = np.sqrt(((frames[1:] - frames[:1]) ** 2).mean(axis=(1, 2)))
        expected[t] = errors / np.sqrt((frames**2).mean())
        assert one.rows[t]["trmse"][0] == pytest.approx(expected[t].mean(), rel=1e-6)
    assert one.summary()["trmse"] == pytest.approx(np.mean([e.mean() for e in expected.values()]), rel=1e-6)
    curve = [np.mean([e[s] for e in expected.values() if len(e) > s]) for s in range(8)]
    np.testing.assert_allclose(one.curve("trmse")[:, 0], curve, rtol=1e-6)
    for name, value in one.summary().items():
        assert two.summary()[name] == pytest.approx(value, rel=1e-12), name
    torch.testing.assert_close(one.spectra("truth"), two.spectra("truth"))
    assert set(np.round(seen_dt, 6)) == set(STEPS["test"])
    predictors = references(reader, plan)
    whole = score_task(predictors, reader, RankInfo(0, 1), plan)
    steps = score_task(predictors, reader, RankInfo(0, 1), plan, kind="one_step")
    result = task_result(reader, plan, "test", whole, "persistence", steps)
    assert result["protocol"]["num_trajectories"] == 3


def test_a_trajectory_with_nothing_to_predict_is_left_out(store: Path) -> None:
    reader = StoreReader(store)
    scores = score_task({"p": persistence}, reader, RankInfo(0, 1), RolloutPlan.whole(reader, 2))["p"]
    assert sorted(scores.rows) == [0, 1]


def test_pictures_have_the_time_of_their_trajectory(store: Path) -> None:
    reader = StoreReader(store)
    pictures = examples(persistence, reader, RolloutPlan.whole(reader, 1), [1, 2, 0])
    assert [e.trajectory for e in pictures] == [1, 2, 0]
    assert [len(e.prediction) for e in pictures] == [8, 1, 3]
    assert pictures[0].time_of(7) == pytest.approx(8 * 0.2)
    assert pictures[1].time_of(0) == pytest.approx(0.4)


def test_a_first_batch_takes_those_that_are_long_enough(store: Path) -> None:
    assert len(first_batch(StoreReader(store), "test", window_frames=3, batch_size=4).numbers) == 2
