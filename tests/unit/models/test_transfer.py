"""Weights go from one model to another by name, row by row where rows belong to names."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from ups.config.model import LatentOperatorConfig, ModelConfig, MultiscaleConfig, UnetConfig
from ups.errors import ConfigError
from ups.models.build import build_model
from ups.models.stepper import Stepper
from ups.models.transfer import transfer
from ups.spec.task import TaskSpec
from ups.testing.small_model import LINE, PLANE, STEADY, awake, batch_of, statistics_of

LATENT = LatentOperatorConfig(width=16, depth=1, num_heads=2, patch_size=4)
DEEP = LatentOperatorConfig(width=16, depth=1, num_heads=2, patch_size=4, encoder_blocks=2, latent_channels=3)
MULTISCALE = MultiscaleConfig(widths=[8, 8], blocks=[1, 1], num_heads=2)


def model(config: ModelConfig, tasks: Sequence[TaskSpec], seed: int = 0) -> Stepper:
    return build_model(config, tasks, {t.name: statistics_of(t) for t in tasks}, context_frames=1, seed=seed)


@pytest.mark.parametrize("config", [LATENT, DEEP, MULTISCALE], ids=["linear", "deep", "multiscale"])
def test_a_model_that_got_all_weights_answers_like_the_other(config: ModelConfig) -> None:
    source, target = awake(model(config, [LINE, PLANE])), model(config, [PLANE, LINE], seed=1)
    taken = transfer(source, target)
    assert taken.new == ()
    assert taken.num_taken == taken.num_weights
    for task in (LINE, PLANE):
        batch = batch_of(task, 1)
        assert torch.equal(source(batch), target(batch))


@pytest.mark.parametrize("config", [LATENT, MULTISCALE], ids=lambda c: c.type)
def test_another_set_of_tasks_takes_what_is_shared_and_says_what_is_new(config: ModelConfig) -> None:
    source, target = awake(model(config, [LINE, PLANE])), model(config, [PLANE, STEADY], seed=1)
    before = {name: p.detach().clone() for name, p in target.named_parameters()}
    taken = transfer(source, target)
    batch = batch_of(PLANE, 1)
    torch.testing.assert_close(source(batch), target(batch))
    assert 0 < taken.num_taken < taken.num_weights
    assert any("steady" in name for _, new in taken.rows.values() for name in new)
    assert "weights" in taken.describe()
    assert "new rows: " in taken.describe()
    # What is new is what the new model drew.
    for name, rows in target.network.named_rows().items():
        for place, row in enumerate(rows.names):
            if row in taken.rows.get(name, ((), ()))[1]:
                now = dict(target.network.named_parameters())[name].select(rows.dim, place)
                assert torch.equal(now, before[f"networks.operator.{name}"].select(rows.dim, place))


def test_kernels_of_lines_become_kernels_of_planes() -> None:
    source, target = awake(model(MULTISCALE, [LINE])), model(MULTISCALE, [LINE, PLANE], seed=1)
    transfer(source, target)
    batch = batch_of(LINE, 1)
    torch.testing.assert_close(source(batch), target(batch), rtol=1e-5, atol=1e-5)


def test_kernels_of_planes_become_kernels_of_lines() -> None:
    source, target = awake(model(MULTISCALE, [LINE, PLANE])), model(MULTISCALE, [LINE], seed=1)
    taken = transfer(source, target)
    assert taken.new == ()
    batch = batch_of(LINE, 1)
    torch.testing.assert_close(source(batch), target(batch), rtol=1e-5, atol=1e-5)


def test_sizes_that_do_not_fit_are_new_and_not_an_error() -> None:
    deeper = MultiscaleConfig(widths=[8, 8], blocks=[1, 2], num_heads=2)
    wider = MultiscaleConfig(widths=[8, 16], blocks=[1, 1], num_heads=2)
    for config in (deeper, wider):
        taken = transfer(model(MULTISCALE, [LINE]), model(config, [LINE, PLANE], seed=1))
        assert 0 < taken.num_taken < taken.num_weights
        assert any(name.startswith("middle.") for name in taken.new)


def test_the_last_frame_stays_the_last_where_more_are_given() -> None:
    tasks = [LINE]
    statistics = {t.name: statistics_of(t) for t in tasks}
    source = build_model(MULTISCALE, tasks, statistics, context_frames=1)
    target = build_model(MULTISCALE, tasks, statistics, context_frames=2, seed=1)
    taken = transfer(source, target)
    assert taken.rows["lift.table"][1] == ("line/u/-2",)
    names = target.network.named_rows()["lift.table"].names
    theirs = source.network.named_rows()["lift.table"].names
    tables = [dict(s.network.named_parameters())["lift.table"] for s in (source, target)]
    assert torch.equal(tables[1][names.index("line/u/-1")], tables[0][theirs.index("line/u/-1")])


def test_models_of_other_kinds_have_nothing_to_give() -> None:
    unet = model(UnetConfig(width=8, levels=1, blocks=1), [LINE])
    with pytest.raises(ConfigError, match="no weights for one of type 'multiscale'"):
        transfer(unet, model(MULTISCALE, [LINE]))
