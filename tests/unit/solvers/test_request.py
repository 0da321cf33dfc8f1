"""Requests, chunks, identities and summaries: everything about a sweep that needs no process."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.data.same_data import differences
from ups.errors import ConfigError, DataError
from ups.solvers.problem import Draws, Solution
from ups.solvers.request import Chunk, make_request
from ups.solvers.sweep import Summary
from ups.solvers.tasks import TASKS


def test_chunks_cover_every_trajectory_of_every_split_once():
    request = make_request("ks1d", trajectories=(40, 16, 1))
    assert list(request.chunks()) == [
        Chunk("train", 0, 16),
        Chunk("train", 1, 16),
        Chunk("train", 2, 8),
        Chunk("valid", 0, 16),
        Chunk("test", 0, 1),
    ]


def test_the_default_is_the_benchmark():
    request = make_request("ns2d")
    assert (request.trajectories, request.resolution, request.num_frames, request.seed) == ((512, 64, 64), 32, 21, 0)


def test_a_steady_task_ignores_frames_so_that_all_tasks_can_be_asked_for_together():
    assert make_request("darcy2d", num_frames=5).num_frames == 0


@pytest.mark.parametrize("counts", [(0, 1, 1), (-1, 0, 0), (5, -1, 0), (10**9, 1, 1)])
def test_impossible_counts_are_refused(counts):
    with pytest.raises(ConfigError):
        make_request("ks1d", trajectories=counts)


def test_a_trajectory_has_the_same_bytes_however_many_are_asked_for():
    few = make_request("darcy2d", trajectories=(3, 0, 0), resolution=16).solve(Chunk("train", 0, 3))
    many = make_request("darcy2d", trajectories=(16, 0, 0), resolution=16).solve(Chunk("train", 0, 16))
    assert np.array_equal(few.target, many.target[:3])
    assert np.array_equal(few.parameters, many.parameters[:3])


def test_the_identity_changes_with_everything_that_changes_the_data():
    base = make_request("burgers1d")
    others = [
        make_request("ks1d"),
        make_request("burgers1d", seed=1),
        make_request("burgers1d", resolution=64),
        make_request("burgers1d", num_frames=11),
        make_request("burgers1d", trajectories=(512, 64, 65)),
        make_request("burgers1d", fixed={"nu": 0.02}),
    ]
    assert len({r.identity() for r in [base, *others]}) == 7
    assert base.identity() == make_request("burgers1d", num_frames=41).identity()


def test_the_stated_size_is_the_size_of_the_arrays():
    for name in ("darcy2d", "advection1d"):
        request = make_request(name, trajectories=(5, 0, 0), resolution=16, num_frames=3)
        solution = request.solve(Chunk("train", 0, 5))
        assert request.num_bytes() == sum(a.nbytes for a in solution.arrays().values())


def test_a_solution_that_is_not_finite_is_reported_with_its_trajectory():
    request = make_request("advection1d", trajectories=(64, 0, 0), num_frames=3)
    chunk = Chunk("train", 2, 16)
    solution = request.solve(chunk)
    broken = solution.state.copy()
    broken[5, 1, 0, 7] = np.nan
    with pytest.raises(DataError, match="train trajectory 37"):
        request._check_finite(chunk, Solution(broken, solution.static, solution.target, solution.parameters))


class TestSummary:
    def summary(self, shift=0.0, seed=0):
        request = make_request("advection1d", trajectories=(32, 0, 0), num_frames=3, seed=seed)
        total = Summary(TASKS["advection1d"].spec)
        for chunk in request.chunks():
            s = request.solve(chunk)
            total.add(Solution(s.state + np.float32(shift), s.static, s.target, s.parameters))
        return {"train": total.to_json()}

    def test_it_is_what_numpy_says(self):
        request = make_request("advection1d", trajectories=(32, 0, 0), num_frames=3)
        state = np.concatenate([request.solve(c).state for c in request.chunks()]).astype(float)
        moments = self.summary()["train"]["state"]["u"]
        assert moments["mean"] == pytest.approx(state.mean(), abs=1e-9)
        assert moments["std"] == pytest.approx(state.std(), rel=1e-9)
        assert moments["minimum"] == state.min()
        assert moments["change_rms"] == pytest.approx(np.sqrt((np.diff(state, axis=1) ** 2).mean()), rel=1e-9)

    def test_equal_data_and_rounding_are_the_same_other_data_are_not(self):
        one = self.summary()
        assert differences(one, self.summary()) == []
        assert differences(one, self.summary(shift=1e-6)) == []
        assert one["train"]["sha256"] != self.summary(shift=1e-6)["train"]["sha256"]
        assert any("train state u" in line for line in differences(one, self.summary(shift=0.01)))
        assert differences(one, self.summary(seed=1))
        assert differences(one, {})


def test_a_parameter_is_drawn_from_another_range_and_the_store_says_so() -> None:
    usual = make_request("burgers1d", trajectories=(1, 0, 4))
    shifted = make_request("burgers1d", trajectories=(1, 0, 4), ranges={"nu": (0.1, 0.2)})
    assert "ranges" not in usual.to_json(), "data sets that were there before keep their identity"
    assert shifted.identity() != usual.identity()
    (nu,) = shifted.bench_task.spec.parameters
    assert (nu.minimum, nu.maximum, nu.scale) == (0.1, 0.2, "log")
    drawn = Draws(0, "burgers1d", "test", (0, 1, 2, 3)).parameters(shifted.bench_task.spec)
    assert ((drawn >= 0.1) & (drawn < 0.2)).all()


@pytest.mark.parametrize(
    ("ranges", "fixed"), [({"nu": (0.2, 0.1)}, {}), ({"mu": (0.1, 0.2)}, {}), ({"nu": (0.1, 0.2)}, {"nu": 0.1})]
)
def test_a_range_that_makes_no_sense_is_refused(ranges, fixed) -> None:
    with pytest.raises(ConfigError):
        make_request("burgers1d", ranges=ranges, fixed=fixed)
