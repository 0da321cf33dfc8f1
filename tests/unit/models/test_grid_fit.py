"""Grids that strides and patches do not divide: no seam around a periodic axis, and only true points come back."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.support.small_model import CUBE, LINE, PLANE, awake, batch_of, loss_of, small_model, statistics_of, step
from ups.config.model import LatentOperatorConfig, ModelConfig, MultiscaleConfig, UnetConfig
from ups.models.build import build_model
from ups.models.grid_fit import GridFit, Resampling
from ups.models.stepper import Stepper
from ups.spec.task import AxisSpec, TaskSpec
from ups.training.stages import build_stage

TORUS = replace(PLANE, name="torus", axes=(AxisSpec("x"), AxisSpec("y")), symmetries=("translation",))
FLOOR = replace(PLANE, name="floor", axes=(AxisSpec("x", ("wall", "open")), AxisSpec("y")))
CONFIGS: tuple[ModelConfig, ...] = (
    MultiscaleConfig(widths=[8, 16, 16], blocks=[1, 1, 1], num_heads=2),
    LatentOperatorConfig(width=16, depth=2, num_heads=2, patch_size=4),
    UnetConfig(width=8, levels=3, blocks=1),
)
each_network = pytest.mark.parametrize("config", CONFIGS, ids=lambda c: c.type)


def built(config: ModelConfig, task: TaskSpec) -> Stepper:
    return awake(build_model(config, [task], {task.name: statistics_of(task)}, 1, 0)).double()


@pytest.mark.parametrize("points", [2, 3, 9, 10, 100, 101])
def test_waves_of_a_periodic_axis_go_to_a_finer_grid_and_come_back(points: int) -> None:
    fit = GridFit(8)
    (finer,) = fit.grid((points,))
    wave = min(3, (points - 1) // 2)

    def field(count: int) -> torch.Tensor:
        x = 2 * math.pi * torch.arange(count, dtype=torch.float64) / count
        return torch.stack([0.3 + torch.cos(wave * x), torch.sin(wave * x + 0.2)])[None]

    torch.testing.assert_close(fit.onto(field(points), LINE), field(finer), rtol=0, atol=1e-12)
    anything = torch.randn(2, 3, points, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    there = fit.onto(anything, LINE)
    assert there.shape == (2, 3, finer)
    torch.testing.assert_close(fit.back(there, LINE, (points,)), anything, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("given", "trained"), [(12, 16), (15, 16), (16, 15), (32, 16), (17, 128), (128, 17)])
@pytest.mark.parametrize("offset", [0.0, 0.013])
def test_an_input_is_resampled_to_where_the_points_of_the_training_grid_are(
    given: int, trained: int, offset: float
) -> None:
    resampling = Resampling(LINE, (given,), (trained,), (offset,))

    def field(first: float, count: int, wave: int) -> torch.Tensor:
        return torch.cos(2 * math.pi * wave * (first + torch.arange(count, dtype=torch.float64) / count) + 0.4)[
            None, None
        ]

    highest = (min(given, trained) - 1) // 2
    for wave in (0, 1, highest):
        here, there = field(0.0, given, wave), field(offset, trained, wave)
        torch.testing.assert_close(resampling.onto(here, "state"), there, rtol=0, atol=1e-11)
        torch.testing.assert_close(resampling.back(there, "state"), here, rtol=0, atol=1e-11)
    if given > trained + 2:  # a wave that the training grid cannot hold is left out, not folded onto another
        finest = field(0.0, given, (given - 1) // 2)
        assert resampling.onto(finest, "state").abs().max() < 1e-11


def test_a_resampled_field_that_is_never_negative_stays_so_and_keeps_its_integral() -> None:
    task = replace(LINE, positive=(LINE.fields[0].name,), conserved=(LINE.fields[0].name,))
    peak = torch.zeros(2, 1, 1, 16, dtype=torch.float64)
    peak[..., 5] = 1.0
    for points in (12, 40):
        resampling = Resampling(task, (16,), (points,), (0.01,))
        there = resampling.onto(peak, "state")
        assert there.shape == (2, 1, 1, points)
        assert there.min() >= 0
        torch.testing.assert_close(there.mean(-1), peak.mean(-1), rtol=1e-12, atol=0)
        assert resampling.onto(peak, "static").min() < 0, "of a static field nothing of that kind is known"


def test_other_axes_go_on_at_both_ends_and_are_cut_there_again() -> None:
    wall = replace(LINE, axes=(AxisSpec("x", "wall"),))
    fit = GridFit(4)
    x = torch.arange(5.0)[None, None]
    assert fit.onto(x, wall).flatten().tolist() == [0, 0, 1, 2, 3, 4, 4, 4]
    assert torch.equal(fit.back(fit.onto(x, wall), wall, (5,)), x)
    (places,) = fit.coordinates([torch.arange(5.0) / 4], wall)
    assert places.tolist() == [0, 0, 0.25, 0.5, 0.75, 1, 1, 1]


def test_places_around_a_periodic_axis_are_those_of_the_finer_grid() -> None:
    (places,) = GridFit(8).coordinates([0.5 + torch.arange(10, dtype=torch.float64) / 10], LINE)
    torch.testing.assert_close(places, 0.5 + torch.arange(16, dtype=torch.float64) / 16)


def test_a_grid_that_fits_is_left_alone() -> None:
    fit = GridFit(4)
    batch = batch_of(PLANE, 1)
    fields = batch.state[:, 0]
    assert fit.onto(fields, PLANE) is fields
    assert fit.back(fields, PLANE, batch.space) is fields
    found = fit.coordinates(batch.coordinates, PLANE)
    assert all(ours is theirs for ours, theirs in zip(found, batch.coordinates, strict=True))


@each_network
@pytest.mark.parametrize(("task", "space", "shifts"), [(LINE, (21,), (7,)), (TORUS, (21, 14), (7, 7))])
def test_a_roll_by_whole_cells_of_the_finer_grid_is_exact(
    config: ModelConfig, task: TaskSpec, space: tuple[int, ...], shifts: tuple[int, ...]
) -> None:
    """A third of 21 points is a third of 24, two cells of 4; half of 14 points is half of 16."""
    if config.type == "latent_operator" and len(space) == 2:
        config = config.model_copy(update={"attention": "global"})  # windows have places of their own
    stepper = built(config, task)
    batch = batch_of(task, 1, dtype=torch.float64, space=space)
    # The highest wave of an even number of points has no place between them.
    smooth = sum(batch.state.roll(n, -1) for n in (0, 1)) / 2
    batch = replace(batch, state=smooth, static=torch.ones_like(batch.static))
    axes = tuple(range(-len(space), 0))
    rolled = stepper.predict(batch.with_state(batch.state.roll(shifts, axes)))
    torch.testing.assert_close(rolled.roll([-s for s in shifts], axes), stepper.predict(batch), rtol=1e-9, atol=1e-6)


@each_network
@pytest.mark.parametrize(
    ("task", "space"), [(LINE, (13,)), (PLANE, (9, 10)), (FLOOR, (9, 10)), (CUBE, (13, 12, 14))], ids=lambda v: str(v)
)
def test_every_network_gives_the_points_of_the_data(
    config: ModelConfig, task: TaskSpec, space: tuple[int, ...]
) -> None:
    stepper = built(config, task).float()
    batch = batch_of(task, 1, space=space)
    found = step(stepper, batch)
    assert found.shape == batch.state[:, 0].shape
    assert found.isfinite().all()
    with torch.autocast("cpu", torch.bfloat16):
        assert step(stepper, batch).isfinite().all()


def test_an_axis_that_needs_no_fit_stays_exact_next_to_one_that_does() -> None:
    stepper = built(CONFIGS[0], TORUS)
    batch = batch_of(TORUS, 1, dtype=torch.float64, space=(10, 16))
    rolled = stepper.predict(batch.with_state(batch.state.roll(4, -1)))
    moved = replace(batch, static=batch.static.roll(-4, -1))
    torch.testing.assert_close(rolled.roll(-4, -1), stepper.predict(moved), rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("space", ["physical", "latent"])
def test_stages_take_such_grids_too(space: str) -> None:
    from ups.config.stage import OperatorStageConfig

    stepper = awake(small_model())
    stage = build_stage(
        OperatorStageConfig.model_validate({"type": "operator", "space": space, "steps": 1}), stepper, 0
    )
    for task, grid in ((LINE, (30,)), (PLANE, (15, 9))):
        loss = loss_of(stage, batch_of(task, 2, space=grid))
        loss.backward()
        assert loss.isfinite()


def test_the_autoencoder_is_judged_on_the_points_of_the_data() -> None:
    from ups.config.stage import AutoencodeStageConfig

    stepper = awake(small_model())
    stage = build_stage(AutoencodeStageConfig.model_validate({"type": "autoencode", "steps": 1}), stepper, 0)
    assert loss_of(stage, batch_of(PLANE, 1, space=(15, 9))).isfinite()
