"""A task.yaml is checked as a recipe is: every mistake with its line, and what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ups.config.description import TaskDescription, check_description, description_next_to, read_description
from ups.config.explain import RecipeError
from ups.config.recipe import resolve
from ups.config.yaml_subset import parse
from ups.errors import ConfigError

SOUND = """\
name: waves
fields:
  - name: u
    unit: m/s
axes:
  - name: x
    boundary: periodic
dims: [trajectory, time, x]
dt: 0.5
parameters:
  - name: nu
    attribute: Nu
conserved: [u]
"""
RECIPE = """\
version: 1
run: { name: waves }
data:
  tasks:
    - name: waves
      path: waves.npy
      description: task.yaml
model: { type: multiscale }
stages:
  - { type: operator, steps: 4 }
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "task.yaml"
    path.write_text(text)
    return path


def test_a_sound_description_is_read(tmp_path: Path) -> None:
    sound = read_description(write(tmp_path, SOUND))
    assert (sound.name, sound.fields[0].unit, sound.axes[0].boundary, sound.dt) == ("waves", "m/s", "periodic", 0.5)
    assert sound.equation == ""


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("periodic", "periodc", 7, "did you mean 'periodic'"),
        ("dt: 0.5", "dt: '0.5'", 9, "write 0.5, without quotes"),
        ("dt: 0.5", "dt: 0", 9, "above 0"),
        ("  - name: u\n", "  - nmae: u\n", 3, "did you mean 'name'"),
        ("name: u\n", "name: 1u\n", 3, "must start with a letter"),
        ("[trajectory, time, x]", "[trajectory, time, y]", 8, "dims has 'y', which is no axis"),
        ("[trajectory, time, x]", "[trajectory, x]", 8, "lacks 'time'"),
        ("[trajectory, time, x]", "[time, time, x]", 8, "'time' twice"),
        ("[trajectory, time, x]", "[trajectory, time, channel, x]", 8, "give its channel"),
        ("conserved: [u]", "conserved: [v]", 13, "no state field"),
        ("    attribute: Nu", "    attribute: Nu\n    value: 1.0", 13, "keep one"),
        ("    unit: m/s", "    role: target", 2, "has a state field and no target"),
        ("name: x\n", "name: time\n", 6, "kept for something else"),
        ("boundary: periodic", "boundary: wall\n    repeated_end: true", 8, "repeated_end is true"),
        ("boundary: periodic", "boundary: wall\n    ends: [wall, open]", 8, "keep one"),
        ("boundary: periodic", "ends: [wall]", 7, "at least 2 entries"),
    ],
)
def test_a_mistake_has_its_line_and_a_hint(tmp_path: Path, old: str, new: str, line: int, words: str) -> None:
    assert old in SOUND
    path = write(tmp_path, SOUND.replace(old, new, 1))
    with pytest.raises(RecipeError) as caught:
        read_description(path)
    assert f"task.yaml:{line}: " in caught.value.message
    assert words in " ".join([caught.value.one_line(), *caught.value.others])


def test_a_recipe_takes_the_description_in_and_points_at_its_mistakes(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    write(tmp_path, SOUND)
    resolved = resolve(tmp_path / "recipe.yaml")
    description = resolved.recipe.data.tasks[0].description
    assert description is not None
    assert not isinstance(description, str)
    assert description.fields[0].unit == "m/s"
    assert "boundary: periodic" in resolved.text, "a run keeps what it was told"
    write(tmp_path, SOUND.replace("periodic", "periodc"))
    with pytest.raises(ConfigError, match=r'task.yaml:7: data.tasks.0.description.axes.0.boundary = "periodc"'):
        resolve(tmp_path / "recipe.yaml")


def test_a_recipe_holds_the_description_itself(tmp_path: Path) -> None:
    inside = "".join(f"        {line}\n" for line in SOUND.splitlines())
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace(" task.yaml", f"\n{inside}"))
    (tmp_path / "config.yaml").write_text(resolve(tmp_path / "recipe.yaml").text)
    first, again = resolve(tmp_path / "recipe.yaml"), resolve(tmp_path / "config.yaml")
    assert first.hash == again.hash


@pytest.mark.parametrize("name", ["task.txt", "/etc/passwd", "none.yaml"])
def test_other_files_are_not_taken_for_a_description(tmp_path: Path, name: str) -> None:
    (tmp_path / "task.txt").write_text(SOUND)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("task.yaml", name))
    with pytest.raises(ConfigError, match=r"ends in .yaml|no such file"):
        resolve(tmp_path / "recipe.yaml")


def test_a_description_is_found_next_to_the_data(tmp_path: Path) -> None:
    data = tmp_path / "waves.npy"
    assert description_next_to([data]) is None
    task = write(tmp_path, SOUND)
    assert description_next_to([data]) == str(task)
    own = tmp_path / "waves.task.yaml"
    own.write_text(SOUND)
    assert description_next_to([data]) == str(own)


def test_the_description_on_the_page_is_sound() -> None:
    page = (Path(__file__).parents[3] / "docs" / "task-yaml.md").read_text()
    block = next(b for b in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S) if b.startswith("name: "))
    description = check_description(parse(block, "docs/task-yaml.md"))
    assert [field.name for field in description.fields] == ["temperature", "conductivity"]
    for name in TaskDescription.model_fields:
        assert name in page, name
