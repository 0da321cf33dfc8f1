"""One page that shows a model on many tasks, as PNG: truth, prediction and error of a trajectory of each.

A line in space and time is a map of both, a plane is shown at the last time, a steady task by its target. Truth and
prediction share one color scale; the scale of the error is its own and is written above it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ups.evaluation.bench_page import number
from ups.evaluation.gallery import Example
from ups.evaluation.report.figures import draw_panels, png_bytes, pyplot

ROW_INCHES = {1: 1.55, 2: 2.0, 3: 2.0}
COLUMN_INCHES = 6.2


def task_page(examples: Sequence[Example], errors: Sequence[float], title: str) -> bytes:
    """errors: of each example, relative to its trajectory. Lines stand left, planes and cubes right."""
    plt = pyplot()
    pairs = list(zip(examples, errors, strict=True))
    lines = [pair for pair in pairs if pair[0].task.num_spatial_dims == 1]
    columns = [column for column in (lines, [pair for pair in pairs if pair[0].task.num_spatial_dims > 1]) if column]
    height = max(sum(_height(e) for e, _ in column) for column in columns)
    figure = plt.figure(figsize=(COLUMN_INCHES * len(columns), height + 0.5), layout="constrained")
    figure.suptitle(title, fontsize=13)
    for part, column in zip(figure.subfigures(1, len(columns), squeeze=False)[0], columns, strict=True):
        heights = [_height(example) for example, _ in column]
        cells = part.subfigures(len(column), 1, height_ratios=heights, squeeze=False)[:, 0]
        for cell, (example, error) in zip(cells, column, strict=True):
            _draw(cell, example, error)
    return png_bytes(figure)


def _height(example: Example) -> float:
    return ROW_INCHES[example.task.num_spatial_dims] + 0.45


def _draw(cell: Any, example: Example, error: float) -> None:
    steps, line = len(example.prediction), example.task.num_spatial_dims == 1
    when = "steady" if example.task.steady else f"{steps} steps" if line else f"after {steps} steps"
    name = f"{example.task.name}, {example.channels[0]}" if len(example.channels) > 1 else example.task.name
    cell.suptitle(f"{name}: {when}, error {error:.2g}", fontsize=11, x=0.02, ha="left")
    panels = cell.subplots(1, 3)
    bound = draw_panels(panels, example if line else _last(example), 0)
    panels[2].set_title(f"error, ±{number(float(f'{bound:.2g}'))}", fontsize=9, pad=3)


def _last(example: Example) -> Example:
    """The last frame alone: colors are of what is shown."""
    assert example.truth is not None
    return replace(example, prediction=example.prediction[-1:], truth=example.truth[-1:])
