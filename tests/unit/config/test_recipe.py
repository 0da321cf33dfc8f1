"""A recipe means what is written in it: whatever the order, the comments, the includes and the way it was changed."""

from __future__ import annotations

import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ups.config.recipe import (
    _without_empty,
    apply_override,
    dump_brief_recipe,
    dump_recipe,
    recipe_file,
    resolve,
    text_hash,
)
from ups.config.schema import Recipe
from ups.config.yaml_subset import Document, dump, parse, paths_in
from ups.errors import ConfigError

from .recipes import recipes

MINIMAL = "run: {name: demo}\ndata: {tasks: [{name: heat, path: heat.zarr}]}\nstages: [{type: operator, steps: 10}]\n"


def resolved(text: str, *overrides: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "r.yaml")
        path.write_bytes(text.encode())
        return resolve(path, overrides)


def shuffled(value: Any, order: random.Random) -> Any:
    if isinstance(value, dict):
        keys = list(value)
        order.shuffle(keys)
        return {key: shuffled(value[key], order) for key in keys}
    return [shuffled(item, order) for item in value] if isinstance(value, list) else value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value


@given(recipes)
@settings(max_examples=30, deadline=None)
def test_the_resolved_form_round_trips_byte_for_byte(data: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(data, strict=True)
    text = dump_recipe(recipe)
    again = resolved(text)
    assert again.recipe == recipe
    assert again.text == text
    assert again.hash == text_hash(text)


@given(recipes)
@settings(max_examples=30, deadline=None)
def test_the_brief_form_is_the_same_recipe(data: dict[str, Any]) -> None:
    recipe = Recipe.model_validate(data, strict=True)
    assert resolved(dump_brief_recipe(recipe)).recipe == recipe


@given(recipes, st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_the_hash_ignores_key_order_and_comments(data: dict[str, Any], order: random.Random) -> None:
    lines = dump(shuffled(data, order)).splitlines()
    notes = ["# note: [\n" if order.random() < 0.3 else "" for _ in lines]
    commented = "".join(f"{note}{line}   # why\n\n" for note, line in zip(notes, lines, strict=True))
    assert resolved(commented).hash == resolved(dump(data)).hash


@given(recipes, recipes)
@settings(max_examples=30, deadline=None)
def test_an_override_equals_editing_the_file(before: dict[str, Any], after: dict[str, Any]) -> None:
    after["data"]["tasks"] = after["data"]["tasks"][:1]
    after["stages"] = after["stages"][:1]
    before["data"]["tasks"], before["stages"] = after["data"]["tasks"], after["stages"]
    changes = {k: v for k, v in after.items() if k in ("run", "engine")} | {"data": after["data"]}
    overrides = [f"{path}={dump(value).rstrip(chr(10))}" for path, value in leaves(changes)]
    edited = parse(dump(before), "r.yaml").value
    for section, values in changes.items():
        merge_by_hand(edited, {section: values})
    assert resolved(dump(before), *overrides).text == resolved(dump(edited)).text


def merge_by_hand(low: dict[str, Any], high: dict[str, Any]) -> None:
    for key, value in high.items():
        if isinstance(value, dict) and value and isinstance(low.get(key), dict):
            merge_by_hand(low[key], value)
        else:
            low[key] = value


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("run.name=no", "no"),
        ("run.seed=7", 7),
        ("data.tasks.0.path=[a.h5, b.h5]", ["a.h5", "b.h5"]),
        ("stages.0.optim.learning_rate=1e-3", 1e-3),
        ("engine.micro_batch_size=null", None),
        ("engine.micro_batch_size=", None),
        ("run.dir='7'", "7"),
        ("run.dir=a=b", "a=b"),
    ],
)
def test_an_override_is_typed_as_in_a_file(override: str, value: Any) -> None:
    here: Any = resolved(MINIMAL, override).recipe
    for part in override.partition("=")[0].split("."):
        here = here[int(part)] if part.isdigit() else getattr(here, part)
    assert here == value
    assert type(here) is type(value)


def test_the_last_override_wins_and_a_section_is_replaced_as_a_whole() -> None:
    recipe = resolved(MINIMAL, "engine.precision=float64", "engine={compile: true}", "run.seed=1", "run.seed=2").recipe
    assert (recipe.engine.precision, recipe.engine.compile, recipe.run.seed) == ("float32", True, 2)


def test_places_follow_every_override() -> None:
    document = parse(MINIMAL, "r.yaml")
    apply_override(document, "data={tasks: [{name: x}]}")
    apply_override(document, "engine.ema.decay=0.5")
    assert set(document.origins) == set(paths_in(document.value))


def test_sections_merge_lists_are_replaced_and_the_including_file_wins(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/base.yaml").write_text(MINIMAL + "include: more.yaml\nengine: {precision: float64, threads: 2}\n")
    (tmp_path / "sub/more.yaml").write_text("engine: {threads: 9, compile: true}\n")
    top = tmp_path / "r.yaml"
    top.write_text(
        "include: [sub/base.yaml]\nengine: {threads: 3}\n"
        "model: {type: latent_operator}\nstages: [{type: autoencode, steps: 5}]\n"
    )
    merged = resolve(top)
    engine = merged.recipe.engine
    assert (engine.precision, engine.threads, engine.compile) == ("float64", 3, True)
    assert [stage.type for stage in merged.recipe.stages] == ["autoencode"]
    assert [os.path.basename(name) for name in merged.files] == ["r.yaml", "base.yaml", "more.yaml"]
    assert "include" not in merged.text


def test_a_merged_recipe_knows_the_place_of_every_value(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(MINIMAL + "engine: {precision: float32}\n")
    top = tmp_path / "r.yaml"
    top.write_text("include: base.yaml\nstages:\n  - type: operator\n    steps: 0\nengine: {precison: float64}\n")
    with pytest.raises(ConfigError) as caught:
        resolve(top)
    lines = [caught.value.one_line(), *getattr(caught.value, "others", ())]
    assert [line.split(":")[1:3] for line in lines] == [[f" {top}", "4"], [f" {top}", "5"]]


def test_every_mistake_is_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(MINIMAL, "run.seed=-1", "model.width=x", "engine.compile=1")
    assert len(getattr(caught.value, "others", ())) == 2


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.yaml")
    for name, words in [("pipe.yaml", "is not a regular file"), (".", "is a directory"), ("x.yaml", "no such file")]:
        with pytest.raises(ConfigError, match=words):
            resolve(tmp_path / name)
    with pytest.raises(ConfigError, match="not a regular file"):
        resolve("/dev/zero")
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve("a\0b")


@pytest.mark.timeout(10)
def test_a_large_recipe_with_an_include_and_an_override_stays_fast(tmp_path: Path) -> None:
    tasks = "".join(f"    - name: task{i}\n      path: [a{i}, b{i}, c{i}]\n" for i in range(1000))
    (tmp_path / "base.yaml").write_text(f"data:\n  tasks:\n{tasks}")
    (tmp_path / "r.yaml").write_text(f"include: base.yaml\n{MINIMAL.splitlines()[0]}\n{MINIMAL.splitlines()[2]}\n")
    assert len(resolve(tmp_path / "r.yaml", ["data.tasks.999.path=x"]).recipe.data.tasks) == 1000


@pytest.mark.parametrize("run_dir", ["runs/x\\ntouch pwned\\n#", "a\\tb", "a\\x1b[2J", "a\\u2028b"])
def test_a_run_directory_without_line_breaks_and_control_characters(run_dir: str) -> None:
    with pytest.raises(ConfigError, match="control characters"):
        resolved(MINIMAL.replace("name: demo", f'name: demo, dir: "{run_dir}"'))
    assert resolved(MINIMAL, "run.dir=my runs/\u00fc").recipe.run.dir == "my runs/\u00fc"


def test_a_run_directory_stands_for_its_resolved_recipe(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(MINIMAL)
    assert recipe_file(tmp_path) == tmp_path / "config.yaml"
    assert recipe_file(tmp_path / "config.yaml") == tmp_path / "config.yaml"


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
    assert resolve(tmp_path / "r.yaml").hash == resolved(MINIMAL).hash


def test_the_recipes_that_we_ship_are_sound() -> None:
    folder = Path(__file__).parents[3] / "recipes"
    names = [resolve(path).recipe.run.name for path in sorted(folder.glob("*.yaml"))]
    assert "tiny" in names
    assert len(set(names)) == len(names)


def test_the_brief_form_leaves_out_only_what_is_empty() -> None:
    recipe = resolve(Path(__file__).parents[3] / "recipes" / "pdebench_11.yaml").recipe
    brief, whole = dump_brief_recipe(recipe), dump_recipe(recipe)
    assert len(brief) < 0.8 * len(whole)
    left_out = set(whole.splitlines()) - set(brief.splitlines())
    values = {line.partition(": ")[2] for line in left_out}
    assert values <= {"null", "[]", "{}", ""}, "other defaults stay: they may differ where it is read"
    assert _without_empty({"a": None, "b": None}, {"b": None}) == {"b": None}, "emptied on purpose"


def test_an_empty_document_is_not_a_value() -> None:
    assert parse("", "r.yaml") == Document(None)
