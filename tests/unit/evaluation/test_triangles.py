"""Pictures and films of fields on the points of triangles."""

from __future__ import annotations

import io
import itertools
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from ups.evaluation.figures import Example, even, fields_png, film
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

SPACE = (AxisSpec("x", "unknown", 1.0), AxisSpec("y", "unknown", 1.0))
POINTS = np.array([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
MESH = (POINTS, np.array([[0, 1, 2]]))  # half of the square: the rest stays empty


def example(num_frames: int, **more: object) -> Example:
    task = TaskSpec("t", (FieldSpec("u"),), SPACE, dt=0.1)
    truth = np.arange(1.0, num_frames + 1)[:, None, None, None] * (1 + POINTS[:, 0])[:, None]
    return Example(task, 0, 0.1, 0.1, ("u",), ("1",), (), 0.9 * truth, truth, mesh=MESH, **more)  # type: ignore[arg-type]


def colors(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.mark.parametrize("num_frames", [1, 3])
def test_triangles_are_drawn_and_nothing_beside_them(num_frames: int) -> None:
    one = even(example(num_frames, given={"a": POINTS[:, :1]} if num_frames == 1 else {}, given_units=("1",)))
    half, whole = (
        colors(fields_png(e, 0)) for e in (one, replace(one, mesh=(POINTS, np.array([[0, 1, 2], [0, 2, 3]]))))
    )
    drawn = [
        int((image.max(axis=2) - image.min(axis=2) > 60).sum()) for image in (half, whole)
    ]  # neither white nor gray
    assert half.shape == whole.shape
    assert 1000 < drawn[0] < 0.8 * drawn[1]


def test_a_film_moves_on_triangles() -> None:
    data = film(example(3), 0, gif=True)
    assert data is not None
    with Image.open(io.BytesIO(data)) as moving:
        frames = []
        for number in range(3):
            moving.seek(number)
            frames.append(np.asarray(moving.convert("RGB")).astype(int))
    assert all(np.abs(a - b).max() > 50 for a, b in itertools.pairwise(frames))
