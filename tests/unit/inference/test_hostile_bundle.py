"""A bundle from an untrusted source, with hashes that fit: odd types are a `BundleError`, its texts stay texts in a
card.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.small_bundle import make_bundle
from tests.unit.inference.test_bundle import recommit
from ups.errors import BundleError, DataError
from ups.inference.bundle import load_bundle, read_info, write_card
from ups.spec.task import TaskSpec

HUGE = 10**400
NAN = float("nan")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_bundle(tmp_path_factory.mktemp("bundle") / "b")


def at(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        here: Any = document
        for part in path[:-1]:
            here = here[part]
        here[path[-1]] = value

    return change


MANY = {f"n{i}": {} for i in range(99)} | {"operator": {}}
CHANGES = {
    **{f"context_frames {v!r:.9}": at("context_frames", value=v) for v in (True, "1", 1.0, None, HUGE, [1], -1, NAN)},
    **{f"version {v!r:.9}": at("version", value=v) for v in (True, "1", HUGE, NAN)},
    **{
        f"step {v!r:.9}": at("provenance", "step", value=v)
        for v in ("abc", 3, "-1", "1e3", "9" * 30, "", None, "\u0663")
    },
    **{f"provenance {v!r:.9}": at("provenance", value=v) for v in ([], "x", [["step", "1"]], {"a": 1}, {"a": []})},
    **{f"scores {v!r:.9}": at("scores", value=v) for v in ([], "x", 3)},
    **{f"tasks {v!r:.9}": at("tasks", value=v) for v in ({}, [3], [[]], "x", [{}], None)},
    **{f"dt {v!r:.9}": at("tasks", 0, "dt", value=v) for v in (True, "1", HUGE, NAN, None, -1)},
    **{f"extent {v!r:.9}": at("tasks", 0, "axes", 0, "extent", value=v) for v in (True, HUGE, NAN, "x", 0)},
    **{f"steady {v!r:.9}": at("tasks", 0, "steady", value=v) for v in (0, "", None, [])},
    **{f"rank {v!r:.9}": at("tasks", 0, "fields", 0, "tensor_rank", value=v) for v in (True, 1.5, HUGE, [0])},
    **{f"range {v!r:.9}": at("tasks", 0, "parameters", 0, "maximum", value=v) for v in (True, HUGE, NAN, "x")},
    **{f"name {v!r:.9}": at("tasks", 0, "name", value=v) for v in ("a\x1b[31m", "<script>", 3, "", "x" * 99, "flow")},
    **{f"unit {v!r:.9}": at("tasks", 0, "time_unit", value=v) for v in (3, "\ud800", "x" * 33, None)},
    **{f"equation {v!r:.9}": at("tasks", 0, "equation", value=v) for v in (3, "\udfff", "x" * 1001)},
    **{f"statistics {v!r:.9}": at("statistics", value=v) for v in ([], 3, {"advection": []}, {})},
    **{
        f"ranges {v!r:.24}": at("statistics", "advection", "ranges", value=v)
        for v in (3, {"x": []}, {"state": 3}, {"state": [[[0, 0, 0, 0]]]}, {"state": [[[0, 0, 0, NAN]]]}, {"state": []})
    },
    **{
        f"coordinates {v!r:.9}": at("coordinates", "advection", value=v) for v in ([[HUGE, 2]], [[NAN]], {}, [["a"]], 3)
    },
    **{
        f"network {v!r:.9}": at("networks", "operator", value=v)
        for v in ([], "x", {"type": []}, {"type": "fno", "width": HUGE}, None)
    },
    **{f"networks {v!r:.12}": at("networks", value=v) for v in ([], "x", {}, {"other": {}}, None, MANY)},
    **{
        f"called {v!r:.9}": at("networks", v, value={}) for v in ("", "a.b", "A", "values", "forward", "x" * 33, "\x1b")
    },
    "version 1 without a model": at("version", value=1),
    "deep": at("scores", value=json.loads('{"a":' * 300 + "1" + "}" * 300)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_odd_values_are_named_and_not_a_bug(sound: Path, tmp_path: Path, name: str) -> None:
    document = json.loads((sound / "bundle.json").read_text())
    CHANGES[name](document)
    (tmp_path / "bundle.json").write_text(json.dumps(document))
    with pytest.raises(BundleError) as caught:
        read_info(tmp_path)
    assert caught.value.exit_code == 10


@pytest.mark.parametrize("kind", [torch.int32, torch.float64, torch.float16, torch.bool])
def test_weights_of_another_type_are_refused(tmp_path: Path, kind: torch.dtype) -> None:
    path = make_bundle(tmp_path / "b")
    weights = load_file(path / "model.safetensors")
    name = sorted(weights)[0]
    weights[name] = torch.zeros(weights[name].shape, dtype=kind)
    save_file(weights, path / "model.safetensors")
    recommit(path)
    with pytest.raises(BundleError, match=f"'{name}' is .*, expected F32") as caught:
        load_bundle(path)
    assert "export it again" in caught.value.hint


def test_texts_of_a_stranger_are_only_texts_in_a_card(sound: Path) -> None:
    evil = "<script>alert(1)</script>\x1b[31m|`x` ![a](http://h/i)\n# head\n<img src=x onerror=y>\u202e"
    info = read_info(sound)
    tasks = tuple(replace(task, equation=evil) for task in info.tasks)
    line = dict.fromkeys(("score", "model", "reference", "reference_name", "ratio", "verdict"), evil)
    counts = {"num_blown_up": 3, "num_samples": evil}
    scores = {evil: {"protocol": evil, "headline": [line], "predictors": {"model": counts, evil: counts}}}
    card = write_card(evil, replace(info, tasks=tasks, scores=scores, provenance={evil: evil, "step": "`</code><b>`"}))
    outside_code = "".join(part for number, part in enumerate(card.replace("\\`", "").split("`")) if number % 2 == 0)
    assert "<script" not in outside_code
    assert "<img" not in outside_code
    assert "![" not in outside_code
    assert not [c for c in card if not c.isprintable() and c != "\n"]
    assert [line for line in card.splitlines() if line.startswith("# ")] == [card.splitlines()[5]]
    columns = {line.replace("\\|", "").count("|") for line in card.splitlines() if line.startswith("| advection")}
    assert columns == {8}


def test_units_stand_in_a_card(sound: Path) -> None:
    info = read_info(sound)
    moving = next(task for task in info.tasks if not task.steady)
    measured = replace(moving, time_unit="s", fields=tuple(replace(field, unit="K|") for field in moving.fields))
    card = write_card("mine", replace(info, tasks=tuple(measured if t is moving else t for t in info.tasks)))
    assert f"{moving.fields[0].name} in K\\| (state)" in card
    assert f"| {moving.dt:g} in s |" in card


def test_an_equation_reads_as_it_was_written() -> None:
    from ups.inference.bundle import plain

    assert plain("u_t + u u_x = nu u_xx, (0, 1)") == "u_t + u u_x = nu u_xx, (0, 1)"


@pytest.mark.parametrize("text", ["a\x1b[31m", "m\x07"])
def test_control_characters_in_a_unit_are_kept_and_only_shown_escaped(text: str) -> None:
    """Data with such a unit is still data: the output escapes it."""
    spec = TaskSpec.from_json(
        {"name": "t", "fields": [{"name": "u", "unit": text}], "axes": [{"name": "x"}], "dt": 1.0}
    )
    assert spec.fields[0].unit == text
    with pytest.raises(DataError):
        TaskSpec.from_json({"name": text, "fields": [{"name": "u"}], "axes": [{"name": "x"}], "dt": 1.0})
