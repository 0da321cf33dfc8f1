"""Normalization is invertible, exact about constants, and wide enough."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.small_model import LINE, PLANE, STEADY, TASKS, batch_of, statistics_of
from ups.errors import DataError
from ups.models.normalization import Normalization
from ups.models.vocabulary import Vocabulary
from ups.spec.statistics import Statistics


def normalization(**changed: Statistics) -> Normalization:
    return Normalization(Vocabulary.of(TASKS), TASKS, {t.name: statistics_of(t) for t in TASKS} | changed)


def test_restore_undoes_normalize_to_rounding() -> None:
    module = normalization()
    state = batch_of(PLANE, 2, dtype=torch.float64).state * 50 + 7
    there = module.normalize("state", PLANE, state, 2)
    torch.testing.assert_close(module.restore("state", PLANE, there, 2), state, rtol=1e-14, atol=1e-13)
    expected = (state[:, :, 2] - 9.0) / 6.0
    torch.testing.assert_close(there[:, :, 2], expected, rtol=1e-14, atol=1e-14)


def test_a_constant_channel_maps_to_zero_and_back() -> None:
    statistics = replace(statistics_of(STEADY), static_mean=(5.0,), static_std=(0.0,))
    module = normalization(steady=statistics)
    field = torch.full((2, 1, 4, 4), 5.0)
    there = module.normalize("static", STEADY, field, 1)
    assert torch.equal(there, torch.zeros_like(field))
    assert torch.equal(module.restore("static", STEADY, there, 1), field)


def test_a_parameter_with_a_log_scale_is_normalized_in_its_logarithm() -> None:
    module = normalization()
    value = torch.tensor([[math.exp(0.5 + 0.7)]], dtype=torch.float64)
    torch.testing.assert_close(module.parameters_of(LINE, value), torch.ones(1, 1, dtype=torch.float64))


def test_the_scale_of_a_change_counts_drift_and_never_vanishes() -> None:
    drift = replace(statistics_of(LINE), difference_mean=(3.0,), difference_std=(4.0,))
    frozen = replace(drift, difference_mean=(0.0,), difference_std=(0.0,), state_std=(1e6,))
    constant = replace(frozen, state_std=(0.0,))
    like = torch.zeros(1)
    assert normalization(line=drift).change_scale(LINE, like).item() == 5.0
    assert normalization(line=frozen).change_scale(LINE, like).item() == 1e6
    assert normalization(line=constant).change_scale(LINE, like).item() == 1.0


def test_statistics_that_do_not_fit_the_task_are_refused() -> None:
    with pytest.raises(DataError, match="have 3 state channels, the task has 1"):
        normalization(line=statistics_of(PLANE))
    with pytest.raises(DataError, match="no statistics for task 'cube'"):
        Normalization(Vocabulary.of(TASKS), TASKS, {t.name: statistics_of(t) for t in TASKS if t.name != "cube"})
