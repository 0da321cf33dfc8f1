"""Charts of results as SVG: errors over time, energy spectra, error against cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ups.evaluation.report.figures import LINE_COLORS, LINE_STYLES, pyplot, svg_text

SIZE = (5.6, 3.6)
# Below this part of the whole energy (amplitudes of 1e-5) lines leave the picture of a spectrum: next is the round-off
# of float32 fields and of networks, and an axis down to it squeezes all that matters.
LEAST_ENERGY = 1e-10


def curve_figure(
    curves: Mapping[str, Sequence[float]], title: str, y_label: str, x_label: str, *, x: Sequence[float] | None = None
) -> str:
    """Lines on a logarithmic scale, one per predictor, as SVG. Steps that blew up are missing from a line."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=SIZE)
    for number, (name, values) in enumerate(curves.items()):
        line = np.asarray(values, np.float64)
        at = np.arange(1, len(line) + 1) if x is None else np.asarray(x, np.float64)
        line = np.where(np.isfinite(line) & (line > 0), line, np.nan)
        axes.plot(at, line, marker="o" if len(line) == 1 else "", **_look(number, name))
    axes.set(xlabel=x_label, ylabel=y_label, title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return _finish(figure, axes, columns=len(curves))


def spectrum_figure(truth: Sequence[float], predicted: Mapping[str, Sequence[float]], title: str) -> str:
    """Energy in each shell of wave numbers, both axes logarithmic, as SVG; the truth in black.

    truth, predicted: energies of the shells 0, 1, 2, ...; shell 0 (the mean) has no place on a logarithmic axis, which
    ends where energies are next to nothing compared with the whole energy of the truth.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=SIZE)
    lines = {"truth": truth, **predicted}
    energies = {name: np.asarray(values, np.float64) for name, values in lines.items()}
    least = max(float(energies["truth"].sum()) * LEAST_ENERGY, np.finfo(np.float64).tiny)
    drawn = {name: np.where(np.isfinite(v) & (v > 0), v, np.nan)[1:] for name, v in energies.items()}
    for number, (name, line) in enumerate(drawn.items()):
        look = {"color": "#000000", "linewidth": 4, "alpha": 0.4, "label": name} if name == "truth" else {}
        axes.plot(np.arange(1, len(line) + 1), line, **(look or _look(number - 1, name)))
    axes.set(xscale="log", xlabel="wave number", ylabel="energy", title=title)
    shown = np.concatenate([line[line > least] for line in drawn.values()])
    if shown.size:
        axes.set_yscale("log")
        axes.set_ylim(bottom=float(shown.min()) / 2, top=float(shown.max()) * 2)
    return _finish(figure, axes, columns=len(lines))


def rank_figure(shares: Sequence[float], title: str) -> str:
    """How often the truth is above so many members, as SVG, with the line that chance would give."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=SIZE)
    axes.bar(np.arange(len(shares)), np.asarray(shares, np.float64), color=LINE_COLORS[0], width=0.9)
    axes.axhline(1 / len(shares), color="#000000", linewidth=1)
    axes.set(xlabel="members below the truth", ylabel="share of the points", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return svg_text(figure)


def cost_figure(
    settings: Sequence[tuple[float, float, str]], model: tuple[float, float], model_name: str, title: str
) -> str:
    """Error against cost, both logarithmic, as SVG. settings: (milliseconds, error, family); model: the same two.

    Settings of one family (one grid) are joined by a line; the model is a star.
    """
    plt = pyplot()
    figure, axes = plt.subplots(figsize=SIZE)
    families = list(dict.fromkeys(family for _, _, family in settings))
    for number, family in enumerate(families):
        points = sorted((c, e) for c, e, f in settings if f == family and np.isfinite(e) and e > 0)
        if points:
            # the first color is the model's; with more than six grids the markers still distinguish them
            look = _look(1 + number % 6, family)
            marker = "osD^vPX<"[number % 8]
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=5, **look)
    if np.isfinite(model[1]) and model[1] > 0:
        axes.plot(*model, "*", color=LINE_COLORS[0], markersize=15, label=model_name, linestyle="none")
        axes.axhline(model[1], color=LINE_COLORS[0], linewidth=0.8, alpha=0.5)
    axes.set(
        xscale="log",
        xlabel="CPU milliseconds per step and trajectory",
        ylabel="rollout error",
        title=title,
    )
    return _finish(figure, axes, columns=3)


def _look(number: int, name: str) -> dict[str, Any]:
    return {
        "linestyle": LINE_STYLES[number % 7],
        "color": LINE_COLORS[number % 7],
        "label": name,
        "linewidth": 2 if number == 0 else 1.5,
    }


def _finish(figure: Any, axes: Any, columns: int) -> str:
    """Logarithmic errors, grid, and the legend below the axes, where it can not cover a line."""
    # matplotlib has no logarithmic axis for nothing: all may have blown up, or all be exact
    if any(np.isfinite(np.asarray(line.get_ydata(), np.float64)).any() for line in axes.lines):
        axes.set_yscale("log")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(frameon=False, fontsize=10, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=min(columns, 3))
    return svg_text(figure)
