"""What a task says about its fields holds after every step, whatever the network predicts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from tests.support.small_model import LINE, PLANE, SMALL, awake, batch_of, divergence, statistics_of
from ups.config.model import LatentOperatorConfig, ModelConfig, MultiscaleConfig
from ups.errors import DataError
from ups.models.build import build_model
from ups.models.constraints import not_negative, without_shortest_waves
from ups.models.stepper import Stepper, rollout
from ups.spec.batch import Batch
from ups.spec.task import AxisSpec, BoundaryValue, FieldSpec, TaskSpec

FLOW = TaskSpec(
    "plane",
    (FieldSpec("height"), FieldSpec("velocity", tensor_rank=1)),
    (AxisSpec("x", extent=2.0), AxisSpec("y")),
    dt=0.1,
    conserved=("height",),
    positive=("height",),
    divergence_free=("velocity",),
)
CONFIGS = [
    LatentOperatorConfig.model_validate(SMALL),
    MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2),
]


def flow_batch(space: tuple[int, int]) -> Batch:
    """A height that is nearly 0 in places, and a flow around a stream function."""
    batch = batch_of(FLOW, 1, dtype=torch.float64, space=space)
    state = torch.zeros_like(batch.state)
    x, y = (torch.arange(n, dtype=torch.float64) / n * 2 * torch.pi for n in space)
    state[:, 0, 0] = batch.state[:, 0, 0].abs()
    state[:, 0, 1] = torch.sin(x)[:, None] * torch.cos(y)  # extents 2 and 1: k is pi and 2 pi
    state[:, 0, 2] = -0.5 * torch.cos(x)[:, None] * torch.sin(y)
    return batch.with_state(state)


def lively(config: ModelConfig, task: TaskSpec) -> Stepper:
    """A model that changes much in a step, but not so much that sums lose digits."""
    stepper = awake(build_model(config, [task], {"plane": statistics_of(task)}, 1)).double()
    with torch.no_grad():
        for parameter in stepper.parameters():
            parameter.mul_(0.7)
    return stepper


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
@pytest.mark.parametrize("space", [(16, 8), (12, 9)], ids=str)
def test_a_rollout_stays_positive_free_of_divergence_and_keeps_its_integral(
    config: ModelConfig, space: tuple[int, int]
) -> None:
    stepper, free = lively(config, FLOW), lively(config, replace(FLOW, positive=(), divergence_free=()))
    batch = flow_batch(space)
    start = batch.state[:, -1]
    assert divergence(start[:, 1:], FLOW).abs().max() < 1e-10
    with torch.no_grad():
        loose = free(replace(batch, task=free.tasks[0]))
        assert -1e3 < loose[:, 0].min() < 0, "the network must try"
        assert divergence(loose[:, 1:], FLOW).abs().max() > 1e-3
        for _ in range(5):
            following = stepper(batch)
            batch = batch.with_state(following[:, None])
    assert following[:, 0].min() >= 0
    size = following[:, 1:].abs().max()
    assert divergence(following[:, 1:], FLOW).abs().max() < 1e-9 * size
    assert torch.allclose(following[:, 0].sum((1, 2)), start[:, 0].sum((1, 2)), rtol=1e-10)
    assert not torch.allclose(following[:, 1:], start[:, 1:])


def test_cutting_moves_no_more_than_it_must() -> None:
    frame = torch.tensor([[[4.0, -1.0, 2.0, 0.0]]])
    kept = replace(LINE, positive=("u",), conserved=("u",))
    torch.testing.assert_close(not_negative(frame, kept, conserve=True), frame.clamp(min=0) * 5 / 6)
    torch.testing.assert_close(not_negative(frame, kept, conserve=False), frame.clamp(min=0))
    torch.testing.assert_close(not_negative(frame, replace(LINE, positive=("u",)), conserve=True), frame.clamp(min=0))
    assert torch.equal(not_negative(frame.abs(), kept, conserve=True), frame.abs())
    assert torch.equal(not_negative(-frame.abs(), kept, conserve=True), torch.zeros_like(frame))
    assert torch.equal(not_negative(frame, LINE, conserve=True), frame)


def test_a_task_says_it_in_json_and_a_task_that_does_not_is_written_as_before() -> None:
    assert TaskSpec.from_json(json.loads(json.dumps(FLOW.to_json()))) == FLOW
    assert not {"positive", "divergence_free"} & LINE.to_json().keys()


@pytest.mark.parametrize(
    "changes",
    [
        {"positive": ("depth",)},
        {"divergence_free": ("height",)},
        {"axes": (AxisSpec("x", "wall"), AxisSpec("y"))},
    ],
    ids=str,
)
def test_what_cannot_be_kept_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(DataError):
        replace(FLOW, **changes)  # type: ignore[arg-type]


WALLS = replace(
    PLANE,
    boundary_values=(
        BoundaryValue("velocity_x", "x", "first"),
        BoundaryValue("velocity_x", "x", "last"),
        BoundaryValue("height", "x", "last", 2.5),
    ),
)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_a_rollout_has_the_values_that_the_task_knows_at_its_ends(config: ModelConfig) -> None:
    stepper, free = lively(config, WALLS), lively(config, PLANE)
    batch = batch_of(WALLS, 1, dtype=torch.float64)
    with torch.no_grad():
        frames = torch.stack(list(rollout(stepper, batch, 3)), dim=1)
        without = free(replace(batch, task=PLANE))
    assert bool((frames[:, :, 1, 0] == 0).all())
    assert bool((frames[:, :, 1, -1] == 0).all())
    assert bool((frames[:, :, 0, -1] == 2.5).all())
    assert not bool((frames[:, :, 0, 0] == 2.5).any())
    torch.testing.assert_close(frames[:, 0, :, 1:-1], without[:, :, 1:-1])


def test_boundary_values_are_checked_and_survive_json() -> None:
    assert TaskSpec.from_json(WALLS.to_json()) == WALLS
    assert "boundary_values" not in PLANE.to_json()
    for wrong in (
        BoundaryValue("velocity_x", "y", "first"),  # periodic
        BoundaryValue("floor", "x", "first"),  # given, not predicted
        BoundaryValue("height", "z", "first"),
    ):
        with pytest.raises(DataError, match="not periodic"):
            replace(PLANE, boundary_values=(wrong,))
    with pytest.raises(DataError, match="two boundary values"):
        replace(PLANE, boundary_values=(WALLS.boundary_values[0],) * 2)
    with pytest.raises(DataError, match="finite"):
        BoundaryValue("height", "x", "first", float("nan"))


def shortest(frames: torch.Tensor, dim: int) -> torch.Tensor:
    """Largest amplitude of the wave of two points along an axis."""
    points = torch.arange(frames.shape[dim])
    return (
        (frames * (1.0 - 2.0 * (points % 2)).reshape([-1 if d == dim else 1 for d in range(frames.ndim)]))
        .mean(dim)
        .abs()
        .max()
    )


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)
def test_a_wave_that_no_sample_has_never_grows(config: ModelConfig) -> None:
    """Channel 0 is smooth along both axes of 16 x 8 points, channel 1 along y, and channel 2 has all waves."""
    known = replace(statistics_of(FLOW), smooth_from=((16, 8), (0, 8), (0, 0)))
    task = replace(FLOW, positive=(), divergence_free=())
    free, stepper = lively(config, task), lively(config, task)
    stepper.statistics["plane"] = known
    batch = flow_batch((16, 8))
    batch = replace(batch, task=task).with_state(torch.zeros_like(batch.state))
    with torch.no_grad():
        loose, kept = free(batch), stepper(batch)
    for channel, dim, gone in [(0, 1, True), (0, 2, True), (1, 1, False), (1, 2, True), (2, 1, False), (2, 2, False)]:
        assert shortest(loose[:, channel], dim) > 1e-3, "the network must try"
        assert (shortest(kept[:, channel], dim) < 1e-12) == gone
    # The rest of a field is what it was, and the integral is kept as before.
    assert torch.equal(kept[:, 2], loose[:, 2])
    assert torch.allclose(kept[:, 0].sum((1, 2)), loose[:, 0].sum((1, 2)), atol=1e-10)


def test_the_shortest_wave_of_a_coarser_or_odd_grid_may_be_real() -> None:
    change = torch.randn(2, 1, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for known in (0, 16):
        assert torch.equal(without_shortest_waves(change, [[known]]), change)
    for known in (8, 12):
        assert shortest(without_shortest_waves(change, [[known]]), 2) < 1e-15
    assert torch.equal(without_shortest_waves(change[..., :11], [[8]]), change[..., :11])
    assert without_shortest_waves(change, ()) is change, "statistics of older bundles say nothing"
