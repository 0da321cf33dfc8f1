"""The encoder of several blocks: latents smaller than fields, which commute with shifts by whole patches."""

from __future__ import annotations

import pytest
import torch

from tests.support.small_model import CUBE, DEEP, LINE, PLANE, TASKS, awake, batch_of, small_model
from ups.config.model import LatentOperatorConfig
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec


def latent_of(stepper: Stepper, batch: Batch) -> torch.Tensor:
    return stepper.encode(*stepper.inputs(batch.state, batch.static, batch.task), batch.task)


@pytest.mark.parametrize("task", TASKS, ids=lambda t: t.name)
def test_a_latent_has_the_channels_that_the_settings_say(task: TaskSpec) -> None:
    batch = batch_of(task, 1)
    grid = tuple(points // 4 for points in batch.space)
    assert latent_of(small_model(**DEEP), batch).shape == (3, *grid, 3)
    assert latent_of(small_model(latent_channels=5), batch).shape == (3, *grid, 5)
    assert latent_of(small_model(encoder_blocks=1), batch).shape == (3, *grid, 16)


@pytest.mark.parametrize(("task", "axes"), [(LINE, (0,)), (CUBE, (0, 2)), (PLANE, (1,))], ids=["line", "cube", "plane"])
def test_latents_commute_with_shifts_by_patches_around_periodic_axes(task: TaskSpec, axes: tuple[int, ...]) -> None:
    stepper = awake(small_model(**DEEP)).double()
    assert stepper.latent.patch_size == 4
    batch = batch_of(task, 1, dtype=torch.float64)
    fields, channels = stepper.inputs(batch.state, batch.static, task)
    moved = stepper.encode(fields.roll([4] * len(axes), [axis + 2 for axis in axes]), channels, task)
    expected = stepper.encode(fields, channels, task).roll([1] * len(axes), [axis + 1 for axis in axes])
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-10)


def test_a_block_sees_the_patches_next_to_it_and_not_across_a_wall() -> None:
    stepper = awake(small_model(encoder_blocks=1)).double()
    batch = batch_of(PLANE, 1, dtype=torch.float64)
    before = latent_of(stepper, batch)
    batch.state[..., :4, :] += 1.0  # the first row of patches along x, which ends at walls
    seen = (latent_of(stepper, batch) - before).abs().amax((0, 2, 3)) > 0
    assert seen.tolist() == [True, True, False, False]


def test_only_settings_of_the_encoder_decide_what_a_latent_is() -> None:
    def settings(**changes: object) -> dict[str, object]:
        return LatentOperatorConfig.model_validate(changes).encoder_settings

    assert settings(depth=2, num_heads=2) == settings()
    assert settings(latent_channels=96) == settings()
    assert settings(patch_size=8) != settings()
    assert settings(latent_channels=8, width=64) == settings(latent_channels=8)
    assert settings(latent_channels=8, width=64, encoder_blocks=1) != settings(latent_channels=8, encoder_blocks=1)
