"""FNO and U-Net stand behind the same interface as our own model: shapes, gradients, boundaries, one task each."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.support.small_bundle import ADVECTION, DARCY, FLOW, statistics_of
from ups.config.model import FnoConfig, UnetConfig
from ups.errors import ConfigError
from ups.models.build import build_model
from ups.models.unet import pad
from ups.spec.batch import Batch

CONFIGS = [UnetConfig(width=8, levels=2, blocks=1)]
try:
    import neuralop  # noqa: F401

    CONFIGS.append(FnoConfig(width=8, modes=8, depth=2))
except ImportError:
    pass


def inputs(task, points=16, context_frames=1):
    generator = torch.Generator().manual_seed(0)
    space = (points,) * task.num_spatial_dims

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    frames = 0 if task.steady else context_frames
    return Batch(
        task=task,
        state=random(2, frames, task.num_channels("state"), *space),
        static=random(2, task.num_channels("static"), *space),
        target=torch.zeros(2, 0, *space),
        parameters=torch.full((2, len(task.parameters)), 0.5),
        dt=torch.full((2,), 0.1),
        coordinates=tuple(torch.arange(points) / points for _ in space),
        numbers=torch.arange(2),
    )


def build(config, task, context_frames=1):
    return build_model(config, [task], {task.name: statistics_of(task)}, context_frames, seed=3)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
@pytest.mark.parametrize("task", [ADVECTION, FLOW, DARCY], ids=lambda t: t.name)
@pytest.mark.parametrize("context_frames", [1, 3])
def test_every_task_has_the_right_shape_and_all_parameters_learn(config, task, context_frames):
    stepper = build(config, task, context_frames)
    frame = stepper(inputs(task, context_frames=context_frames))
    role = "target" if task.steady else "state"
    assert frame.shape == (2, task.num_channels(role), *(16,) * task.num_spatial_dims)
    frame.square().mean().backward()
    assert all(p.grad is not None for p in stepper.parameters())


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_the_same_seed_gives_the_same_weights(config):
    first, second = build(config, ADVECTION), build(config, ADVECTION)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_one_task_only(config):
    statistics = {t.name: statistics_of(t) for t in (ADVECTION, DARCY)}
    with pytest.raises(ConfigError, match="learns one task"):
        build_model(config, [ADVECTION, DARCY], statistics, 1)


def test_the_unet_commutes_with_rolls_of_its_coarsest_cell_on_a_periodic_axis():
    stepper = build(CONFIGS[0], ADVECTION)
    batch = inputs(ADVECTION)
    rolled = batch.with_state(batch.state.roll(2, -1))
    torch.testing.assert_close(stepper(rolled), stepper(batch).roll(2, -1))


def test_padding_goes_around_periodic_axes_and_repeats_the_edge_of_others():
    x = torch.arange(6.0).reshape(1, 1, 2, 3)
    padded = pad(x, 1, (False, True))
    assert padded[0, 0].tolist() == [
        [2, 0, 1, 2, 0],
        [2, 0, 1, 2, 0],
        [5, 3, 4, 5, 3],
        [5, 3, 4, 5, 3],
    ]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_no_parameter_is_complex_and_a_change_of_precision_loses_nothing(config):
    stepper = build(config, ADVECTION)
    assert not any(p.is_complex() for p in stepper.parameters())
    assert all(isinstance(value, torch.Tensor) for value in stepper.state_dict().values())
    before = stepper(inputs(ADVECTION))
    after = stepper.to(torch.float64).to(torch.float32)(inputs(ADVECTION))
    assert torch.equal(before, after)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_integrals_are_kept_only_where_it_is_asked_for(config):
    task = replace(ADVECTION, conserved=("u",))
    batch = inputs(task)
    changes = []
    for conserve in (False, True):
        frame = build(config.model_copy(update={"conserve": conserve}), task)(batch)
        changes.append(float((frame[:, 0] - batch.state[:, -1, 0]).mean(-1).abs().max()))
    assert changes[0] > 1e-3
    assert changes[1] < 1e-6


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_muon_gets_matrices_alone(config):
    network = build(config, ADVECTION).network
    names = {id(p): name for name, p in network.named_parameters()}
    chosen = {names[id(p)]: p for p in network.matrices()}
    assert chosen
    assert all(1 < p.shape[0] < p.numel() for p in chosen.values())
    assert not any("depthwise" in name for name in chosen)
    if config.type == "unet":
        assert {name.split(".")[0] for name in chosen} == {"down", "up", "shrink", "grow", "merge"}
