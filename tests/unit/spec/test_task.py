"""A task specification survives JSON, names its channels, and refuses what makes no sense."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from ups.errors import DataError
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

FLOW: dict[str, Any] = {
    "name": "flow",
    "fields": (FieldSpec("rho", unit="kg/m3"), FieldSpec("v", tensor_rank=1), FieldSpec("a", role="static")),
    "axes": (AxisSpec("x"), AxisSpec("y", boundary="wall", extent=2.0)),
    "parameters": (ParameterSpec("nu", minimum=0.01, maximum=1.0, scale="log"),),
    "dt": 0.1,
    "conserved": ("rho",),
    "symmetries": ("translation",),
}


def test_json_brings_back_the_same_task() -> None:
    task = TaskSpec(**FLOW)
    assert TaskSpec.from_json(json.loads(json.dumps(task.to_json()))) == task


def test_channels_of_vectors_and_tensors_are_named_by_axis() -> None:
    task = TaskSpec(
        **{**FLOW, "fields": (FieldSpec("rho"), FieldSpec("v", tensor_rank=1), FieldSpec("s", tensor_rank=2))}
    )
    assert task.channel_names("state") == ("rho", "v_x", "v_y", "s_x_x", "s_x_y", "s_y_x", "s_y_y")
    assert task.num_channels("state") == 7
    assert task.num_channels("target") == 0


@pytest.mark.parametrize(
    "change",
    [
        {"name": "a b"},
        {"name": "../x"},
        {"name": "x" * 65},
        {"fields": ()},
        {"fields": (FieldSpec("u"), FieldSpec("u"))},
        {"fields": (FieldSpec("u", role="static"),)},
        {"fields": (FieldSpec("u"), FieldSpec("w", role="target"))},
        {"axes": ()},
        {"axes": tuple(AxisSpec(n) for n in "wxyz")},
        {"dt": 0.0},
        {"dt": float("nan")},
        {"dt": -1.0},
        {"steady": True},
        {"conserved": ("nothing",)},
        {"conserved": ("a",)},
        {"symmetries": ("time",)},
        {"equation": "x" * 1001},
        {"parameters": (ParameterSpec("x"),)},
        {"parameters": (ParameterSpec("rho"),)},
        {"parameters": (ParameterSpec("time"),)},
    ],
)
def test_a_task_that_makes_no_sense_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(DataError):
        TaskSpec(**{**FLOW, **change})


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        {},
        {"name": "a", "fields": 3, "axes": []},
        {"name": "a", "fields": [{"name": "u"}] * 65, "axes": [{"name": "x"}], "dt": 1.0},
        {"name": "a", "fields": [{"name": "u", "color": "red"}], "axes": [{"name": "x"}], "dt": 1.0},
        {"name": "a", "fields": [{"name": "u", "tensor_rank": 9}], "axes": [{"name": "x"}], "dt": 1.0},
        {"name": "a", "fields": [{"name": ["u"]}], "axes": [{"name": "x"}], "dt": 1.0},
        {"name": "a", "fields": [3], "axes": [{"name": "x"}], "dt": 1.0},
        {"name": "a", "fields": [{"name": "u", "role": ["state"]}], "axes": [{"name": "x"}], "dt": 1.0},
        {"name": "a", "fields": [{"name": "u"}], "axes": [{"name": "x", "extent": -1}], "dt": 1.0},
        {"name": "a", "fields": [{"name": "u"}], "axes": [{"name": "x"}], "dt": "soon"},
        {"name": "a", "fields": [{"name": "u"}], "axes": [{"name": "x"}], "dt": 1.0, "conserved": [["u"]]},
    ],
)
def test_a_untrusted_document_is_refused_with_a_data_error(document: object) -> None:
    with pytest.raises(DataError):
        TaskSpec.from_json(document)


def test_the_two_ends_of_an_axis_may_differ() -> None:
    axis = AxisSpec("x", ("wall", "open"))
    assert (axis.ends, axis.periodic, axis.boundary_text) == (("wall", "open"), False, "wall to open")
    assert AxisSpec("x", ("wall", "wall")) == AxisSpec("x", "wall")
    task = TaskSpec("a", (FieldSpec("u"),), (axis,), dt=0.1)
    assert TaskSpec.from_json(json.loads(json.dumps(task.to_json()))) == task
    for wrong in (("periodic", "wall"), ("wall",), ("wall", "open", "wall"), ("wall", "nowhere"), (["wall"], "open")):
        with pytest.raises(DataError):
            AxisSpec("x", wrong)


def test_a_task_without_a_range_of_steps_is_written_as_before() -> None:
    task = TaskSpec("a", (FieldSpec("u"),), (AxisSpec("x"),), dt=0.1)
    assert "dt_range" not in task.to_json()
    ranged = replace(task, dt_range=(0.05, 0.2))
    assert TaskSpec.from_json(json.loads(json.dumps(ranged.to_json()))) == ranged
    for wrong in ((0.2, 0.1), (0.0, 0.1), (0.1,), "ab", (0.1, float("inf"))):
        with pytest.raises(DataError):
            replace(task, dt_range=wrong)
