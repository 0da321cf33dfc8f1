"""The split `calibration`: what is set aside, and that nothing but `ups calibrate` reads it."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import ups
from ups.config.description import TaskDescription
from ups.config.identity import recipe_identity
from ups.config.recipe import resolve
from ups.config.schema import TaskConfig
from ups.data.open import open_task
from ups.errors import ConfigError, DataError
from ups.evaluation.rollout import RolloutPlan, score_task
from ups.formats.base import Reader
from ups.formats.container import MemoryContainer
from ups.formats.described import DescribedReader
from ups.formats.set_aside import SetAside, level_words, open_calibration
from ups.models.stepper import persistence
from ups.run.calibrate import choose
from ups.spec.batch import RankInfo

SIMPLE = {
    "name": "w",
    "fields": [{"name": "u"}],
    "axes": [{"name": "x", "extent": 1.0}],
    "dims": ["trajectory", "time", "x"],
    "dt": 1.0,
}


@pytest.fixture
def waves(tmp_path: Path) -> Path:
    """60 trajectories; every value of number n is n."""
    path = tmp_path / "waves.npz"
    values = np.broadcast_to(np.arange(60, dtype=np.float32)[:, None, None], (60, 5, 16))
    np.savez(path, u=values, x=np.arange(16.0), t=np.arange(5.0))
    (tmp_path / "task.yaml").write_text(
        "name: waves\nfields: [{name: u}]\naxes: [{name: x, boundary: periodic}]\n"
        "dims: [trajectory, time, x]\ntimes: t\n"
    )
    return path


def numbers(reader: Reader, split: str) -> list[int]:
    return [int(reader.read(split, n, 0, 1).state[0, 0, 0]) for n in range(reader.splits[split])]


def test_trajectories_are_set_aside_from_train_at_equal_distances(waves: Path) -> None:
    reader = open_calibration(open_task(TaskConfig(name="w", path=str(waves), calibration_fraction=0.2)))
    assert dict(reader.splits) == {"train": 38, "valid": 6, "test": 6, "calibration": 10}
    chosen, kept = numbers(reader, "calibration"), numbers(reader, "train")
    assert sorted(chosen + kept) == list(range(48))
    assert set(np.diff(chosen)) <= {4, 5}
    assert numbers(reader, "test") == list(range(54, 60))
    assert "trajectory 2 " in reader.where("calibration", 0)


def test_a_reader_that_was_not_opened_for_calibration_refuses_the_split(waves: Path) -> None:
    reader = open_task(TaskConfig(name="w", path=str(waves), calibration_fraction=0.2))
    assert dict(reader.splits) == {"train": 38, "valid": 6, "test": 6}
    for planted in (reader, pickle.loads(pickle.dumps(reader))):  # as a worker gets it
        with pytest.raises(DataError, match="another reader asked for it"):
            planted.read("calibration", 0, 0, 1)
    plan = RolloutPlan(1, 0, 2)
    with pytest.raises((DataError, KeyError)):  # an early stop, a gate or a sweep that scores on it
        score_task({"model": persistence}, reader, RankInfo(0, 1), plan, split="calibration")


def test_only_the_module_that_calibrates_opens_the_split() -> None:
    sources = Path(ups.__file__).parent
    asking = {str(p.relative_to(sources)) for p in sources.rglob("*.py") if "open_calibration" in p.read_text()}
    # `ups init` counts trajectories without reading one.
    assert asking == {"formats/set_aside.py", "library/own_data.py", "run/calibrate.py"}


def test_identities_stay_as_they_were_without_the_setting(waves: Path, tmp_path: Path) -> None:
    plain, aside = (TaskConfig(name="w", path=str(waves), calibration_fraction=f) for f in (0.0, 0.2))
    assert not isinstance(open_task(plain), SetAside)
    assert open_task(plain).identity() != open_task(aside).identity()
    text = "run: {{name: a}}\ndata: {{tasks: [{{name: w, path: {}{}}}]}}\nstages: [{{type: operator, steps: 5}}]\n"
    recipes = []
    for number, extra in enumerate(("", ", calibration_fraction: 0.0", ", calibration_fraction: 0.2")):
        path = tmp_path / f"r{number}.yaml"
        path.write_text(text.format(waves, extra))
        recipes.append(recipe_identity(resolve(path).recipe))
    assert recipes[0] == recipes[1] != recipes[2]


def test_pieces_of_one_simulation_stay_together() -> None:
    values = np.arange(40, dtype=np.float32)[:, None, None] + np.zeros((40, 12, 8), np.float32)
    description = TaskDescription.model_validate(SIMPLE | {"cut_frames": 4})
    inner = DescribedReader([MemoryContainer({"u": values})], description)
    reader = open_calibration(SetAside(inner, 0.2))
    chosen, kept = set(numbers(reader, "calibration")), set(numbers(reader, "train"))
    assert chosen
    assert not chosen & kept
    assert reader.splits["calibration"] == 3 * len(chosen)


def test_trajectories_that_chose_the_model_do_not_calibrate_it(waves: Path, tmp_path: Path) -> None:
    config = TaskConfig(name="w", path=str(waves))
    trained: Any = SimpleNamespace(
        readers=[open_task(config)], recipe=SimpleNamespace(data=SimpleNamespace(tasks=[config]))
    )
    with pytest.raises(ConfigError, match="no task has trajectories to calibrate on"):
        choose(trained, {})
    with pytest.raises(ConfigError, match="was trained or scored on"):
        choose(trained, {"w": str(waves)})
    other = tmp_path / "other.npz"
    stored = dict(np.load(waves))
    np.savez(other, **(stored | {"u": stored["u"] + 100}))
    reader, split = choose(trained, {"w": str(other)})["w"]
    assert (split, reader.splits["test"]) == ("test", 6)
    np.savez(other, **(stored | {"u": np.roll(stored["u"], 10, axis=0)}))
    aside = config.model_copy(update={"calibration_fraction": 0.2})
    trained.recipe.data.tasks = [aside]
    for own in (open_task(config), open_task(aside)):
        trained.readers = [own]
        with pytest.raises(ConfigError, match="was trained or scored on"):
            choose(trained, {"w": str(other)})
    reader, split = choose(trained, {"w": str(waves)})["w"]  # what was set aside before training
    assert (split, reader.splits[split]) == ("calibration", 10)


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "none set aside"), (5, "up to a level of 83.3%"), (10, "up to a level of 90.9%")],
)
def test_what_can_be_stated_is_said(count: int, words: str) -> None:
    assert words in level_words(count)


def test_a_few_trajectories_leave_one_to_train_on() -> None:
    description = TaskDescription.model_validate(SIMPLE)
    inner = DescribedReader([MemoryContainer({"u": np.zeros((4, 3, 8), np.float32)})], description)
    reader = open_calibration(SetAside(inner, 0.9))
    assert reader.splits["train"] == 1
