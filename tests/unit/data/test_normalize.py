"""Statistics are those of the train split, exact in one pass, and never used for other data than they were made of."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parent))
import planted_readers as planted

import ups.data.normalize as normalize
from ups.data.normalize import compute_statistics, ensure_statistics, load_statistics, statistics_path
from ups.errors import DataError
from ups.formats.base import Subsampling
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.spec.descriptors import Moments, ranges_fit
from ups.spec.statistics import Statistics, safe
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

TASK = TaskSpec(
    "flow",
    (FieldSpec("u"), FieldSpec("p"), FieldSpec("c"), FieldSpec("a", role="static")),
    (AxisSpec("x"), AxisSpec("y")),
    parameters=(ParameterSpec("nu", minimum=0.001, maximum=1.0, scale="log"),),
    dt=0.1,
)
SHAPE = (7, 3, 4, 6)  # T, C, X, Y


def arrays_of(trajectory: int) -> tuple[np.ndarray, np.ndarray, float]:
    rng = np.random.default_rng(trajectory)
    state = rng.normal(size=SHAPE).cumsum(axis=0)
    state[:, 1] = 101_325.0 + 3.0 * state[:, 1]  # a large mean
    state[:, 2] = 0.1  # constant, and not representable
    return state.astype(np.float32), rng.normal(2.0, 0.5, (1, 4, 6)).astype(np.float32), float(10 ** rng.uniform(-3, 0))


def write_flow(path: Path, num_train: int = 20, spoil: int | None = None, overwrite: bool = False) -> Path:
    with StoreWriter(path, TASK, [np.arange(4.0), np.arange(6.0)], 7, overwrite=overwrite) as writer:
        for trajectory in range(num_train):
            state, static, nu = arrays_of(trajectory)
            if trajectory == spoil:
                state[3, 0, 2, 1] = np.nan
            writer.append("train", state=state, static=static, parameters=[nu])
        writer.append("valid", state=np.full(SHAPE, 1e6), static=np.full((1, 4, 6), 1e6), parameters=[1.0])
        writer.append("test", state=np.full(SHAPE, -1e6), static=np.full((1, 4, 6), 1e6), parameters=[1.0])
    return path


@pytest.fixture
def flow(tmp_path: Path) -> Path:
    (tmp_path / "data").mkdir()
    return write_flow(tmp_path / "data" / "flow.zarr")


def assert_exact(statistics: Statistics, trajectories: range | list[int], stride: int = 1) -> None:
    every = [arrays_of(t) for t in trajectories]
    state = np.stack([s[::stride] for s, _, _ in every]).astype(np.float64)
    difference = np.diff(state, axis=1)
    static = np.stack([a for _, a, _ in every]).astype(np.float64)
    logs = np.log([np.float32(nu) for _, _, nu in every])
    assert statistics.state_mean == pytest.approx(state.mean((0, 1, 3, 4)), rel=1e-12)
    assert statistics.state_std[:2] == pytest.approx(state.std((0, 1, 3, 4))[:2], rel=1e-10)
    assert statistics.difference_mean == pytest.approx(difference.mean((0, 1, 3, 4)), abs=1e-9)
    assert statistics.difference_std[:2] == pytest.approx(difference.std((0, 1, 3, 4))[:2], rel=1e-10)
    assert statistics.static_mean == pytest.approx([static.mean()], rel=1e-12)
    assert statistics.static_std == pytest.approx([static.std()], rel=1e-10)
    assert statistics.parameter_mean == pytest.approx([logs.mean()], rel=1e-6)
    assert statistics.parameter_std == pytest.approx([logs.std()], rel=1e-6)
    assert statistics.target_mean == ()


def test_statistics_are_those_of_the_train_split_alone(flow: Path) -> None:
    reader = StoreReader(flow)
    statistics = compute_statistics(reader)
    assert_exact(statistics, range(20))
    assert statistics.num_frames == 20 * 7
    assert statistics.data_identity == reader.identity()


@pytest.mark.parametrize("read_bytes", [1, 4 * 72 * 2, 4 * 72 * 3, 4 * 72 * 7 + 4 * 24, 4 * 72 * 22])
def test_pieces_of_any_size_give_the_same_statistics(
    flow: Path, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compute_statistics(StoreReader(flow))
    assert ranges_fit(whole.ranges, TASK, (4, 6))
    monkeypatch.setattr(normalize, "_READ_BYTES", read_bytes)
    statistics = compute_statistics(StoreReader(flow))
    assert_exact(statistics, range(20))
    for role in ("state", "static"):
        np.testing.assert_allclose(statistics.ranges[role], whole.ranges[role], rtol=1e-9, atol=1e-9)


def test_ranges_are_those_of_the_described_trajectories_of_the_train_split(
    flow: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = np.stack([arrays_of(t)[0] for t in range(20)])  # (B, T, C, X, Y)
    low, high = np.array(compute_statistics(StoreReader(flow)).ranges["state"])[:, 0, :2].T  # of the mean
    means = state.astype(np.float64).mean((3, 4))
    np.testing.assert_allclose([low, high], [means.min((0, 1)), means.max((0, 1))], rtol=1e-9)
    monkeypatch.setattr(normalize, "MAX_DESCRIBED_BYTES", 1)
    fewer = compute_statistics(StoreReader(flow))
    assert_exact(fewer, range(20))
    assert (np.array(fewer.ranges["state"])[:, 0, 0] >= low - 1e-9).all()


def test_statistics_of_an_earlier_version_are_measured_again(flow: Path) -> None:
    made = ensure_statistics(StoreReader(flow), flow)
    file = statistics_path(flow)
    document = json.loads(file.read_text()) | {"version": 4}
    file.write_text(json.dumps(document))
    assert ensure_statistics(StoreReader(flow), flow) == made
    assert json.loads(file.read_text())["version"] == normalize._VERSION


def test_differences_are_those_at_the_stride_of_the_reader(flow: Path) -> None:
    assert_exact(compute_statistics(StoreReader(flow, Subsampling(time_stride=3))), range(20), stride=3)


def test_a_constant_channel_has_no_deviation_and_its_exact_mean(flow: Path) -> None:
    statistics = compute_statistics(StoreReader(flow))
    assert statistics.state_mean[2] == float(np.float32(0.1))
    assert (statistics.state_std[2], statistics.difference_std[2]) == (0.0, 0.0)
    assert safe(statistics.state_std)[2] == 1.0


def test_normalization_is_invertible_to_one_part_in_a_million(flow: Path) -> None:
    statistics = compute_statistics(StoreReader(flow))
    mean = np.array(statistics.state_mean, np.float32)[:, None, None]
    std = np.array(safe(statistics.state_std), np.float32)[:, None, None]
    state, _, _ = arrays_of(3)
    normal = (state - mean) / std
    assert np.abs(normal).max() < 10
    assert normal.dtype == np.float32
    back = normal * std + mean
    scale = np.abs(state).max(axis=(0, 2, 3), keepdims=True)
    assert (np.abs(back - state) <= 1e-6 * scale).all()
    assert np.array_equal(back[:, 2], state[:, 2])


def test_a_steady_task_has_targets_and_no_frames(tmp_path: Path) -> None:
    statistics = compute_statistics(StoreReader(planted.write_darcy(tmp_path / "darcy.zarr", num_train=3)))
    assert statistics.target_mean == (-1.0,)
    assert statistics.static_std == pytest.approx((np.std([0, 1, 2]),))
    assert (statistics.state_mean, statistics.difference_std, statistics.num_frames) == ((), (), 3)


def test_a_huge_split_is_measured_on_a_fixed_sample_from_all_over_it(flow: Path) -> None:
    reader = StoreReader(flow)
    sample = [compute_statistics(reader, max_bytes=1) for _ in range(2)]
    assert sample[0] == sample[1]
    assert sample[0].num_frames == 16 * 7
    assert_exact(sample[0], normalize._sample(reader, 20, 1))
    assert max(normalize._sample(reader, 20, 1)) >= 16


def test_progress_ends_at_its_total(flow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for read_bytes in (1, 4 * 72 * 22):
        monkeypatch.setattr(normalize, "_READ_BYTES", read_bytes)
        seen: list[tuple[int, int]] = []
        compute_statistics(StoreReader(flow), lambda done, total, seen=seen: seen.append((done, total)))
        assert seen[-1] == (20, 20)
        assert seen == sorted(set(seen))


@pytest.mark.parametrize("read_bytes", [1, 8 << 20])
def test_values_that_are_not_finite_are_refused_with_their_place(
    tmp_path: Path, read_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(normalize, "_READ_BYTES", read_bytes)
    reader = StoreReader(write_flow(tmp_path / "flow.zarr", spoil=5))
    with pytest.raises(DataError, match=r"flow.zarr train trajectory 5, frame 3 has a value that is not finite"):
        compute_statistics(reader)


def test_a_parameter_that_has_no_logarithm_is_refused_with_its_place(tmp_path: Path) -> None:
    with StoreWriter(tmp_path / "flow.zarr", TASK, [np.arange(4.0), np.arange(6.0)], 7) as writer:
        for nu in (0.5, 0.0):
            writer.append("train", state=np.zeros(SHAPE), static=np.zeros((1, 4, 6)), parameters=[nu])
    with pytest.raises(DataError, match=r"trajectory 1 has a parameter of 0 or less"):
        compute_statistics(StoreReader(tmp_path / "flow.zarr"))


# Where they are kept


def test_statistics_are_stored_next_to_the_data_and_found_again(flow: Path) -> None:
    reader = StoreReader(flow)
    assert load_statistics(reader, flow) is None
    made = ensure_statistics(reader, flow)
    assert statistics_path(flow) == flow.parent / "flow.zarr.statistics.json"
    assert statistics_path(flow).exists()
    assert load_statistics(reader, str(flow)) == made
    assert load_statistics(StoreReader(flow), [flow, "another.hdf5"]) == made


def test_found_statistics_are_not_computed_again(flow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ensure_statistics(StoreReader(flow), flow)
    monkeypatch.setattr(normalize, "compute_statistics", None)
    assert ensure_statistics(StoreReader(flow), flow) == made


def test_stale_statistics_are_ignored_with_a_warning_and_replaced(flow: Path, caplog: pytest.LogCaptureFixture) -> None:
    old = ensure_statistics(StoreReader(flow), flow)
    write_flow(flow, num_train=5, overwrite=True)
    assert load_statistics(StoreReader(flow), flow) is None
    assert "they are of other data" in caplog.text
    new = ensure_statistics(StoreReader(flow), flow)
    assert new != old
    assert load_statistics(StoreReader(flow), flow) == new


def test_other_strides_have_their_own_statistics_in_the_same_file(flow: Path) -> None:
    fine, coarse = StoreReader(flow), StoreReader(flow, Subsampling(time_stride=2))
    made = ensure_statistics(fine, flow), ensure_statistics(coarse, flow)
    assert made[0] != made[1]
    assert (load_statistics(fine, flow), load_statistics(coarse, flow)) == made


def test_the_file_does_not_grow_without_end(flow: Path) -> None:
    for number in range(40):
        normalize._store(statistics_path(flow), Statistics(data_identity=str(number)))
    entries = json.loads(statistics_path(flow).read_text())["entries"]
    assert list(entries) == [str(n) for n in range(24, 40)]


def test_a_directory_that_cannot_be_written_is_no_obstacle(
    flow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    # A directory in place of the file: unwritable for root too, who passes through permission bits.
    statistics_path(flow).mkdir()
    made = ensure_statistics(StoreReader(flow), flow)
    (file,) = (tmp_path / "cache" / "ups" / "statistics").iterdir()
    assert file.name.startswith("flow.zarr.")
    assert load_statistics(StoreReader(flow), flow) == made


def test_statistics_that_can_be_kept_nowhere_are_still_returned(
    flow: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    statistics_path(flow).mkdir()
    assert_exact(ensure_statistics(StoreReader(flow), flow), range(20))


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": "other"}', "[" * 100_000, "\x00\xff"])
def test_a_damaged_file_is_ignored_and_replaced(flow: Path, content: str) -> None:
    statistics_path(flow).write_text(content)
    made = ensure_statistics(StoreReader(flow), flow)
    assert load_statistics(StoreReader(flow), flow) == made


@pytest.mark.timeout(60)
def test_a_pipe_next_to_the_data_is_not_waited_for(flow: Path) -> None:
    os.mkfifo(statistics_path(flow))
    assert_exact(ensure_statistics(StoreReader(flow), flow), range(20))
    assert statistics_path(flow).is_file()


def test_an_entry_that_does_not_fit_the_task_is_ignored(flow: Path, caplog: pytest.LogCaptureFixture) -> None:
    identity = StoreReader(flow).identity()
    normalize._store(statistics_path(flow), Statistics(state_mean=(1.0,), state_std=(1.0,), data_identity=identity))
    assert load_statistics(StoreReader(flow), flow) is None
    assert "do not fit task 'flow'" in caplog.text
    assert_exact(ensure_statistics(StoreReader(flow), flow), range(20))


def test_a_relative_path_means_the_same_file(flow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(flow.parent)
    assert statistics_path("flow.zarr") == statistics_path(flow)
    assert os.path.isabs(statistics_path("flow.zarr"))


# The arithmetic


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=60),
    offset=st.sampled_from([0.0, 1e6, -1e9]),
    cut=st.integers(1, 10),
)
def test_merged_parts_have_the_moments_of_the_whole(values: list[float], offset: float, cut: int) -> None:
    whole = np.array(values) + offset
    moments = Moments(1)
    for i in range(0, len(whole), cut):
        moments.add(whole[None, i : i + cut])
    assert moments.mean[0] == pytest.approx(whole.mean(), rel=1e-12, abs=1e-9)
    expected = whole.std() if whole.std() > 2.0**-23 * abs(whole.mean()) else 0.0
    assert moments.std()[0] == pytest.approx(expected, rel=1e-6, abs=2.0**-22 * abs(offset) + 1e-9)


def test_many_numbers_around_a_large_mean_lose_no_digits() -> None:
    moments = Moments(1)
    rng = np.random.default_rng(0)
    for _ in range(50):
        moments.add(1e8 + rng.normal(0, 100.0, (1, 20_000)))
    assert moments.std()[0] == pytest.approx(100.0, rel=3e-3)
    naive = np.float32(1e8) ** 2  # what a sum of squares would have to resolve
    assert np.spacing(naive) > 100.0**2


def test_rounding_noise_around_a_constant_is_constant() -> None:
    moments = Moments(1)
    moments.add(np.float32(300.0) * (1 + np.random.default_rng(0).normal(0, 2e-8, (1, 1000))))
    assert moments.std() == (0.0,)


def test_nothing_added_is_no_statistics() -> None:
    assert (Moments(2).mean, Moments(2).std()) == ((0.0, 0.0), (0.0, 0.0))
