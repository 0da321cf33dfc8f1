"""Running moments: range and size next to mean and deviation. Their accuracy is tested with the statistics of data."""

from __future__ import annotations

import numpy as np
import pytest

from ups.spec.descriptors import Moments, by_channel


def test_parts_have_the_range_and_size_of_the_whole() -> None:
    values = np.random.default_rng(0).normal(3.0, 2.0, (5, 2, 7))  # T, C, X
    moments = Moments(2)
    for frame in values:
        moments.add(by_channel(frame, 0))
    assert moments.minimum == tuple(values.min(axis=(0, 2)))
    assert moments.maximum == tuple(values.max(axis=(0, 2)))
    assert moments.rms == pytest.approx(np.sqrt(np.square(values).mean(axis=(0, 2))), rel=1e-12)


def test_channels_come_first_and_none_is_no_error() -> None:
    assert by_channel(np.zeros((4, 3, 5, 6)), 1).shape == (3, 120)
    none = by_channel(np.zeros((4, 0, 5)), 1)
    Moments(0).add(none)
    assert none.shape[0] == 0


def test_values_that_are_not_finite_are_refused_or_show() -> None:
    values = np.array([[1.0, np.nan], [1.0, 2.0]])
    with pytest.raises(FloatingPointError):
        Moments(2).add(values)
    shown = Moments(2, allow_nonfinite=True)
    shown.add(values)
    assert np.isnan([shown.mean[0], shown.minimum[0], shown.std()[0]]).all()
    assert shown.mean[1] == 1.5
