"""The kinds of shifted states are what they say, for every task that has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.model import shifted_states
from ups.solvers.tasks import BENCH_TASKS, TASKS

# Kinds that draw a new state with the mean and the deviation of the one before.
LIKE_BEFORE = ("box", "smooth", "short wave", "white noise", "bump", "state of another task")


def case(name: str) -> shifted_states.Case:
    task = TASKS[name].spec
    draw = np.random.default_rng(0)
    channels = len(task.channel_names("static" if task.steady else "state"))
    shape = (4, channels, *[24] * task.num_spatial_dims)
    limits = [(p.minimum, p.maximum) for p in task.parameters]
    parameters = np.stack([draw.uniform(low, high, 4) for low, high in limits] or [np.zeros((0, 4))[:0]], 1)
    return shifted_states.Case(task, draw.normal(1.0, 0.3, shape), parameters, draw.normal(size=shape), draw)


@pytest.mark.parametrize("name", BENCH_TASKS)
def test_states_that_are_drawn_anew_keep_mean_and_deviation(name: str) -> None:
    before = case(name)
    for kind in LIKE_BEFORE:
        change, tasks = shifted_states.KINDS[kind]
        if name in tasks:
            after = change(before)
            np.testing.assert_allclose(after.mean(after.state), before.mean(before.state), atol=1e-9, err_msg=kind)
            np.testing.assert_allclose(after.size(after.state), before.size(before.state), rtol=1e-6, err_msg=kind)
            assert not np.allclose(after.state, before.state), kind


@pytest.mark.parametrize("name", shifted_states.WITH_PARAMETERS)
def test_parameters_are_beyond_the_trained_range_by_half_of_it_at_most(name: str) -> None:
    for kind, sign in (("parameters above", 1), ("parameters below", -1)):
        change, tasks = shifted_states.KINDS[kind]
        if name not in tasks:
            continue
        values = change(case(name)).parameters
        for column, spec in zip(values.T, TASKS[name].spec.parameters, strict=True):
            to = np.log if spec.scale == "log" else np.asarray
            low, high = to(spec.minimum), to(spec.maximum)
            share = (to(column) - high if sign > 0 else low - to(column)) / (high - low)
            assert ((share >= 0.05) & (share <= 0.5)).all(), (kind, spec.name)


def test_what_moves_by_a_symmetry_of_the_task_is_only_moved() -> None:
    for name in BENCH_TASKS:
        before = case(name)
        after = shifted_states.moved(before)
        np.testing.assert_allclose(np.sort(np.abs(after.state), axis=None), np.sort(np.abs(before.state), axis=None))
    water = case("swe2d")
    mirrored = shifted_states.moved(water).state
    np.testing.assert_array_equal(mirrored[:, 1], -water.state[:, 1, ::-1, ::-1])  # momentum turns with its axis


def test_a_rougher_state_has_half_the_lengths() -> None:
    points = (np.arange(24) + 0.5) / 24
    before = case("burgers1d")
    wave = np.broadcast_to(np.cos(2 * np.pi * 2 * points), before.state.shape)
    after = shifted_states.rougher(replace(before, state=wave.copy())).state
    modes = np.abs(np.fft.rfft(after[0, 0]))
    assert modes.argmax() == 4
