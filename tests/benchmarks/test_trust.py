"""What `benchmarks/model/trust.py` reads out of rollouts, of a task with a vector and of a steady one."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import ups
from tests.support.small_bundle import DARCY, FLOW, make_bundle
from ups.inference.bundle import load_bundle
from ups.spec.task import TaskSpec


@pytest.fixture
def trust(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "model"))
    return importlib.import_module("trust")


def given(trust: Any, task: TaskSpec, count: int = 3, steps: int = 2) -> Any:
    draw = np.random.default_rng(0)
    space = [16] * task.num_spatial_dims
    state, static = (
        draw.normal(size=(count, task.num_channels(role), *space)).astype(np.float32) for role in ("state", "static")
    )
    parameters = np.tile([p.minimum for p in task.parameters], (count, 1)).astype(np.float32)
    truth = np.zeros((count, steps, task.num_channels(task.predicted), *space), np.float32)
    return trust.Given(state, static, parameters, truth)


@pytest.mark.parametrize("task", [FLOW, DARCY], ids=lambda task: task.name)
def test_frames_have_the_channels_of_the_task(trust: Any, task: TaskSpec, tmp_path: Path) -> None:
    simulator = ups.Simulator.load(make_bundle(tmp_path / "b"), "cpu")
    start = given(trust, task, steps=1 if task.steady else 2)
    frames = trust.frames_of(trust.rollout_of(simulator, task, start), task)
    assert frames.shape == start.truth.shape
    tensors = [None if x.shape[1] == 0 else torch.from_numpy(x) for x in (start.state, start.parameters, start.static)]
    with torch.no_grad():
        expected = simulator.module(*tensors, steps=frames.shape[1], task=task.name).numpy()
    np.testing.assert_allclose(frames, expected.reshape(frames.shape), rtol=1e-4, atol=1e-5)
    errors = trust.rms(frames, task, None)
    assert errors.shape == (*frames.shape[:2], len(task.fields_of(task.predicted)))
    squares = np.square(frames).mean((3, 4))
    by_field = [squares[:, :, :2].sum(2), squares[:, :, 2]] if task is FLOW else [squares[:, :, 0]]  # a vector's length
    np.testing.assert_allclose(errors, np.sqrt(np.stack(by_field, 2)), rtol=1e-4)


def test_an_error_that_is_no_number_is_not_small(trust: Any) -> None:
    frames = np.ones((1, 2, 1, 4, 4), np.float32)
    frames[0, 1, 0, 2, 2] = np.nan
    assert trust.rms(frames, DARCY, None).tolist() == [[[1.0], [np.inf]]]


def test_a_parameter_out_of_its_range_is_beyond_by_its_widths(trust: Any, tmp_path: Path) -> None:
    bundle = load_bundle(make_bundle(tmp_path / "b"))
    start = given(trust, FLOW)
    start.parameters[:, 1] = [1.5, 2.5, 0.9]  # rho from 1 to 2
    subject = SimpleNamespace(task=FLOW, bundle=bundle)
    assert trust.beyond_ranges(subject, start) == pytest.approx([0.0, 0.5, 0.1], abs=1e-6)
    numbers = trust.input_numbers(subject, start)
    np.testing.assert_allclose(numbers[:, :2], np.stack([np.log([0.01] * 3), [1.5, 2.5, 0.9]], 1), rtol=1e-6)


def test_the_stopwatch_tells_the_scale_from_the_calibration(trust: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 11.0, 13.0, 17.0, 25.0])
    monkeypatch.setattr(trust.time, "process_time", lambda: next(times))
    watch = trust.Stopwatch()
    for split in ("train", "valid", "test", "test"):
        watch(f"calibrating flow on {split}", 1, 1)
    assert watch.seconds == {"scale": 3.0, "calibration": 12.0}
