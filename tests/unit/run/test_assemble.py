"""A stage of a run is put together the same way whoever asks: a rank, a check, a test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.mixture import mixture_recipe, write_mixture
from ups.config.schema import Recipe
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.run.assemble import assemble, open_data
from ups.training.progress import Progress
from ups.training.stages import AutoencodeStage, Stage


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    folder = tmp_path_factory.mktemp("assemble")
    tasks = write_mixture(folder)
    stages = [{"type": "autoencode", "steps": 2}, {"type": "operator", "steps": 2, "unroll_steps": 2}]
    engine = {"device": "cpu", "strategy": "single", "threads": 1}
    return Recipe.model_validate(mixture_recipe(folder, tasks, stages=stages, engine=engine))


def test_every_part_is_of_the_stage_at_which_the_run_stands(recipe: Recipe) -> None:
    numbers = []
    with Runtime.start(recipe.engine, RankEnvironment()) as runtime, open_data(recipe) as opened:
        for index in range(2):
            with assemble(recipe, opened, runtime, Progress(stage_index=index, step=2 * index)) as parts:
                assert parts.engine.loader is parts.loader
                assert parts.engine.strategy is parts.strategy
                assert parts.strategy.stage is parts.stage
                assert parts.engine.length is recipe.stages[index]
                assert isinstance(parts.stage, AutoencodeStage) == (index == 0)
                (batch,) = next(parts.loader)
                assert batch.state.shape[1] in (0, recipe.stages[index].window_frames(recipe.data.context_frames))
                numbers.append([next(parts.loader)[0].numbers.tolist() for _ in range(4)])
                parts.engine.run()
                assert parts.engine.progress.stage_index == index
                assert parts.engine.progress.stage_finished
                assert parts.engine.progress.step == 2 * index + 2
    assert numbers[0] != numbers[1]  # each stage has its own order


def test_a_stage_trains_on_its_own_tasks_with_its_own_blocks(recipe: Recipe) -> None:
    own = recipe.stages[1].model_copy(update={"tasks": ["flow2d"], "batch_size": 6})
    changed = recipe.model_copy(update={"stages": [recipe.stages[0], own]})
    assert changed.data_of(0) is changed.data
    with Runtime.start(recipe.engine, RankEnvironment()) as runtime, open_data(recipe) as opened:
        with assemble(changed, opened, runtime, Progress(stage_index=1)) as parts:
            assert {b.task.name for _ in range(3) for b in next(parts.loader)} == {"flow2d"}
            assert next(parts.loader)[0].num_samples == 6
            parts.engine.run()
        with assemble(changed, opened, runtime, Progress()) as parts:
            assert len({b.task.name for _ in range(4) for b in next(parts.loader)}) == 3
    with pytest.raises(ValueError, match=r"stages\.0\.tasks: data has no task 'moon'"):
        Recipe.model_validate({**recipe.model_dump(), "stages": [{"type": "operator", "steps": 1, "tasks": ["moon"]}]})


def test_weights_are_changed_before_they_are_spread(recipe: Recipe) -> None:
    seen: list[Stage] = []

    def change(stage: Stage) -> None:
        seen.append(stage)
        with torch.no_grad():
            for parameter in stage.parameters():
                parameter.fill_(0.25)

    with (
        Runtime.start(recipe.engine, RankEnvironment()) as runtime,
        open_data(recipe) as opened,
        assemble(recipe, opened, runtime, Progress(), change=change) as parts,
    ):
        assert seen == [parts.stage]
        assert all(bool((p == 0.25).all()) for p in parts.strategy.module.parameters())


def test_one_place_assembles() -> None:
    """Who builds a loader and spreads a stage on their own would train something else than what is checked."""
    source = Path(__file__).resolve().parents[3] / "src" / "ups"
    calling = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        for line in path.read_text().splitlines()
        if ("build_loader(" in line or " build_stage(" in line) and not line.startswith("def ")
    }
    assert calling == {"run/assemble.py"}
