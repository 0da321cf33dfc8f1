"""Statistics survive JSON exactly; anything that is not what was written is refused."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ups.errors import DataError
from ups.spec.statistics import Statistics, safe

FINITE = st.floats(allow_nan=False, allow_infinity=False)
POSITIVE = st.floats(0, 1e300)


@given(pairs=st.lists(st.tuples(FINITE, POSITIVE), max_size=6), frames=st.integers(0, 10**12))
def test_json_brings_back_the_same_numbers(pairs: list[tuple[float, float]], frames: int) -> None:
    mean, std = tuple(m for m, _ in pairs), tuple(s for _, s in pairs)
    statistics = Statistics(state_mean=mean, state_std=std, data_identity="abc", num_frames=frames)
    assert Statistics.from_json(json.loads(json.dumps(statistics.to_json()))) == statistics


@pytest.mark.parametrize(
    "change",
    [
        {"state_mean": [1.0]},
        {"state_mean": [1.0], "state_std": [-1.0]},
        {"state_mean": [float("nan")], "state_std": [1.0]},
        {"state_mean": [10**400], "state_std": [1.0]},
        {"state_mean": [True], "state_std": [1.0]},
        {"state_mean": ["1"], "state_std": [1.0]},
        {"state_mean": 1.0},
        {"data_identity": 3},
        {"num_frames": "many"},
        {"num_frames": True},
        {"more": []},
        {"smooth_from": 3},
        {"smooth_from": [3]},
        {"smooth_from": [[-1]]},
        {"smooth_from": [[True]]},
        {"ranges": 3},
        {"ranges": {"other": []}},
        {"ranges": {"state": 3}},
        {"ranges": {"state": [3]}},
        {"ranges": {"state": [[[1, 2, 3]]]}},
        {"ranges": {"state": [[[1, 2, 3, float("nan")]]]}},
        {"ranges": {"state": [["1234"]]}},
    ],
)
def test_malformed_statistics_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(DataError, match="malformed"):
        Statistics.from_json({**Statistics().to_json(), **change})


@pytest.mark.parametrize("document", [None, [], "text", {}, {"state_mean": []}])
def test_what_is_no_statistics_at_all_is_refused(document: object) -> None:
    with pytest.raises(DataError, match="malformed"):
        Statistics.from_json(document)


def test_statistics_from_before_short_waves_were_measured_say_nothing_of_them() -> None:
    document = Statistics(smooth_from=((16, 0),)).to_json()
    assert Statistics.from_json(json.loads(json.dumps(document))).smooth_from == ((16, 0),)
    del document["smooth_from"]
    assert Statistics.from_json(document).smooth_from == ()


def test_a_constant_channel_is_divided_by_one() -> None:
    assert safe((2.0, 0.0, 1e-30)) == (2.0, 1.0, 1e-30)


def test_statistics_from_before_ranges_were_measured_are_read_and_written_as_they_were() -> None:
    document = Statistics(state_mean=(1.0,), state_std=(2.0,)).to_json()
    assert "ranges" not in document
    assert Statistics.from_json(document).ranges == {}
    ranges = {"state": (((0.0, 1.0, -0.5, 1.5),),)}
    statistics = Statistics.from_json(json.loads(json.dumps(Statistics(ranges=ranges).to_json())))
    assert statistics.ranges == ranges
