"""Which known task a new one is most like."""

from __future__ import annotations

from dataclasses import replace

from tests.support.small_model import LINE, PLANE, STEADY
from ups.models.transfer import most_alike


def test_dimensions_count_most() -> None:
    renamed = replace(PLANE, name="other", fields=LINE.fields)
    assert most_alike(renamed, [LINE, PLANE]) is PLANE
    assert most_alike(replace(LINE, name="other"), [PLANE, LINE]) is LINE
    assert most_alike(LINE, [PLANE]) is PLANE
    assert most_alike(LINE, []) is None


def test_ends_of_an_axis_count_more_than_names() -> None:
    periodic, ends = (
        replace(LINE, name=name, axes=(replace(LINE.axes[0], boundary=kind),))
        for name, kind in (("periodic", "periodic"), ("ends", "wall"))
    )
    other_fields = replace(ends, fields=tuple(replace(field, name=f"other_{field.name}") for field in LINE.fields))
    asked = replace(LINE, name="asked", axes=(replace(LINE.axes[0], boundary="neumann"),))
    assert most_alike(asked, [periodic, other_fields]) is other_fields
    assert most_alike(asked, [other_fields, ends]) is ends


def test_steady_tasks_are_like_steady_ones() -> None:
    assert most_alike(replace(STEADY, name="other", axes=PLANE.axes), [PLANE, STEADY]) is STEADY
