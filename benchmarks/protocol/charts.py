"""Charts of a result of ups-bench as PNG: ratios between models, and error against the cost of a step.

A model that was trained with several seeds is drawn with its median, and a line from its best to its worst seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.protocol.page import (
    RATIO_METRICS,
    RATIOS,
    Rows,
    geometric_mean,
    mean_ratio,
    number,
    ratios_of,
    values_of,
)
from benchmarks.protocol.recipes import MODELS
from ups.evaluation.figures import LINE_COLORS, Example, draw_panels, png_bytes, pyplot
from ups.solvers.tasks import BENCH_TASKS

MARKERS = ("o", "s", "D", "^", "v", "P", "X")
# The same look for a model in every chart; the joint model is the one to find first.
LOOKS = {
    "ups": {"color": LINE_COLORS[0], "marker": "*", "markersize": 15},
    "ups-alone": {"color": LINE_COLORS[5], "marker": "D", "markersize": 7},
    "fno": {"color": LINE_COLORS[1], "marker": "o", "markersize": 8, "markerfacecolor": "white"},
    "fno+": {"color": LINE_COLORS[1], "marker": "o", "markersize": 8},
    "unet": {"color": LINE_COLORS[2], "marker": "s", "markersize": 7.5, "markerfacecolor": "white"},
    "unet+": {"color": LINE_COLORS[2], "marker": "s", "markersize": 7.5},
    "dilated+": {"color": LINE_COLORS[3], "marker": "^", "markersize": 8},
}
MEAN = "geometric mean"
ROW_INCHES = {1: 1.55, 2: 2.0, 3: 2.0}
COLUMN_INCHES = 6.2


def tasks_and_models(rows: Rows) -> tuple[list[str], list[str]]:
    """Those of the rows, in the order of the protocol; of models those that are drawn."""
    tasks = [task for task in BENCH_TASKS if any(r["task"] == task for r in rows)]
    return tasks, [model for model in MODELS if model in LOOKS and any(r["model"] == model for r in rows)]


def ratio_chart(rows: Rows) -> bytes | None:
    """Error of the joint model relative to that of others: a row for each task; None where there are no others."""
    tasks, models = tasks_and_models(rows)
    kept = [r for r in RATIOS if r[1] in models and any(other in models for other in r[2])]
    if not kept:
        return None
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 0.5 * len(tasks) + 2.1), sharex=True, sharey=True)
    places = {name: place for place, name in enumerate([*tasks, MEAN])}
    for axes, (title, key) in zip(panels, RATIO_METRICS, strict=True):
        worst = 1.0
        for order, (label, model, others) in enumerate(kept):
            found = ratios_of(rows, tasks, model, others, key)
            color, shift = LINE_COLORS[order], 0.2 * (order - (len(kept) - 1) / 2)
            mean = mean_ratio(found)
            means = {} if mean is None else {MEAN: mean}
            shown = {name: v for name, v in (found | means).items() if math.isfinite(v) and v > 0}
            worst = max(worst, *shown.values()) if shown else worst
            for task, low, high in _spreads(rows, tasks, model, others, key):
                axes.plot([low, high], [places[task] + shift] * 2, color=color, linewidth=1.4, alpha=0.6)
            at = [places[name] + shift for name in shown]
            axes.plot(list(shown.values()), at, MARKERS[order], color=color, markersize=7, label=label)
            for name in found:
                if name not in shown:  # no number to draw: one of the two blew up
                    axes.annotate("blew up", (1.0, places[name] + shift), color=color, fontsize=8, va="center")
            if MEAN in shown:
                place = (shown[MEAN], places[MEAN] + shift)
                axes.annotate(
                    number(float(f"{shown[MEAN]:.2g}")),
                    place,
                    (8, 0),
                    textcoords="offset points",
                    color=color,
                    va="center",
                    fontsize=9,
                    weight="bold",
                )
        axes.axvline(1.0, color="#000000", linewidth=1.2)
        axes.axhline(len(tasks) - 0.5, color="#999999", linewidth=0.8)
        axes.set(title=title, xscale="log", xlabel="ratio of errors, below 1 is better; lines span seeds")
        axes.xaxis.set_major_locator(_round_values(plt))
        axes.xaxis.set_major_formatter(plt.matplotlib.ticker.FormatStrFormatter("%g"))
        axes.xaxis.set_minor_formatter(plt.matplotlib.ticker.NullFormatter())
        axes.grid(True, axis="x", which="both", alpha=0.25)
        axes.tick_params(axis="y", length=0)
    panels[0].set_yticks(list(places.values()), list(places))
    panels[0].set_ylim(len(tasks) + 0.6, -0.6)
    _widen(panels[0])
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=len(kept), frameon=False)
    figure.tight_layout(rect=(0, 0.055, 1, 1))
    return png_bytes(figure)


def cost_chart(rows: Rows) -> bytes | None:
    """Geometric means over tasks of the error and of the cost of a step: one panel for each metric."""
    tasks, models = tasks_and_models(rows)
    tasks = [task for task in tasks if all(_cost(rows, task, model) for model in models)]
    if not tasks or not models:
        return None
    plt = pyplot()
    figure, panels = plt.subplots(1, 2, figsize=(10.5, 4.6), sharex=True)
    for axes, (title, key) in zip(panels, RATIO_METRICS, strict=True):
        for model in models:
            errors = [geometric_mean(column) for column in zip(*_by_seed(rows, tasks, model, key), strict=True)]
            cost = geometric_mean(_cost(rows, task, model) for task in tasks)
            _point(axes, model, cost, errors, named=True)
        axes.set_title(title)
        _cost_axes(plt, axes)
        axes.set_ylabel("error relative to the trajectory")
    figure.supxlabel("CPU milliseconds of one step of a rollout, one sample on one thread", fontsize=11)
    figure.suptitle(f"Geometric mean over {len(tasks)} tasks: lower and further left is better", fontsize=12)
    figure.tight_layout()
    return png_bytes(figure)


def cost_chart_by_task(rows: Rows, key: str = "trmse") -> bytes | None:
    """Error of whole rollouts against the cost of a step, a small panel for each task."""
    tasks, models = tasks_and_models(rows)
    tasks = [task for task in tasks if any(_cost(rows, task, model) for model in models)]
    if not tasks:
        return None
    plt = pyplot()
    columns = min(3, len(tasks))
    lines = -(-len(tasks) // columns)
    figure, grid = plt.subplots(lines, columns, figsize=(3.5 * columns, 2.7 * lines + 0.9), squeeze=False)
    panels = list(grid.flat)
    for axes, task in zip(panels, tasks, strict=False):
        for model in models:
            cost = _cost(rows, task, model)
            if cost:
                _point(axes, model, cost, values_of(rows, task, model, key), named=False)
        axes.set_title(task, fontsize=11)
        _cost_axes(plt, axes)
        axes.tick_params(labelsize=8, which="both")
    for axes in panels[len(tasks) :]:
        axes.axis("off")
    shown = {label: handle for p in panels for handle, label in zip(*p.get_legend_handles_labels(), strict=True)}
    ordered = [model for model in models if model in shown]
    figure.legend([shown[m] for m in ordered], ordered, loc="lower center", ncols=len(ordered), frameon=False)
    figure.supxlabel("CPU milliseconds of one step of a rollout", fontsize=11, y=0.055)
    figure.supylabel("rollout error relative to the trajectory", fontsize=11)
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    return png_bytes(figure)


def _spreads(
    rows: Rows, tasks: Sequence[str], model: str, others: Sequence[str], key: str
) -> list[tuple[str, float, float]]:
    """(task, smallest, largest ratio) over the seeds of the model, where it has several."""
    found = []
    for task in tasks:
        mine = values_of(rows, task, model, key)
        theirs = [statistics.median(v) for other in others if (v := values_of(rows, task, other, key))]
        if len(mine) > 1 and theirs and math.isfinite(max(mine)) and 0 < min(theirs) < math.inf:
            found.append((task, min(mine) / min(theirs), max(mine) / min(theirs)))
    return found


def _by_seed(rows: Rows, tasks: Sequence[str], model: str, key: str) -> list[list[float]]:
    """(tasks, seeds): scores; a seed that is missing for one task is left out for all."""
    values = [values_of(rows, task, model, key) for task in tasks]
    return [v[: min(map(len, values))] for v in values]


def _cost(rows: Rows, task: str, model: str) -> float:
    """Milliseconds of a step, the median over seeds; 0 where nothing was measured."""
    found = [float(r["rollout_ms"]) for r in rows if r["task"] == task and r["model"] == model and r.get("rollout_ms")]
    return statistics.median(found) if found else 0.0


def _point(axes: Any, model: str, cost: float, errors: Sequence[float], *, named: bool) -> None:
    finite = [e for e in errors if math.isfinite(e) and e > 0]
    if not finite:
        return
    look = LOOKS[model]
    if len(finite) > 1:
        axes.plot([cost, cost], [min(finite), max(finite)], color=look["color"], linewidth=1.5, alpha=0.6)
    axes.plot([cost], [statistics.median(finite)], linestyle="none", label=model, **look)
    if named:
        # Our two often lie on each other: their names stand on two sides.
        side, end = ((-10, -4), "right") if model == "ups-alone" else ((10, 4), "left")
        place = (cost, statistics.median(finite))
        axes.annotate(model, place, side, textcoords="offset points", color=look["color"], ha=end)


def _cost_axes(plt: Any, axes: Any) -> None:
    ticker = plt.matplotlib.ticker
    axes.set(xscale="log", yscale="log")
    axes.margins(0.18)
    axes.autoscale_view()
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(_round_values(plt))
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_formatter(ticker.NullFormatter())
    # An axis on which all are close would show no value at all.
    for limits, change in ((axes.get_xlim(), axes.set_xlim), (axes.get_ylim(), axes.set_ylim)):
        if limits[1] / limits[0] < 4:
            middle = math.sqrt(limits[0] * limits[1])
            change(middle / 2, middle * 2)
    axes.grid(True, which="both", alpha=0.2)


def _round_values(plt: Any) -> Any:
    """1, 2, 5, 10, ... on a logarithmic axis."""
    return plt.matplotlib.ticker.LogLocator(subs=(1.0, 2.0, 5.0))


def _widen(axes: Any) -> None:
    """Room around the line of 1, and for the numbers next to the last points."""
    low, high = axes.get_xlim()
    axes.set_xlim(min(low, 0.45) / 1.1, max(high, 1.3) * 1.2)


def task_page(examples: Sequence[Example], errors: Sequence[float], title: str) -> bytes:
    """One page that shows a model on many tasks: truth, prediction and error of a trajectory of each.

    A line in space and time is a map of both, a plane is shown at the last time, a steady task by its target. Truth and
    prediction share one color scale; the scale of the error is its own and is written above it. errors: of each
    example, relative to its trajectory. Lines stand left, planes and cubes right.
    """
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
            _draw_example(cell, example, error)
    return png_bytes(figure)


def _height(example: Example) -> float:
    return ROW_INCHES[example.task.num_spatial_dims] + 0.45


def _draw_example(cell: Any, example: Example, error: float) -> None:
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
