"""Pages of scores: the report of one model and the comparison of several, with charts as SVG.

Each is one self-contained HTML file, legible on a phone, that opens from disk. Its text is in `templates/`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np

from ups.evaluation.comparison import TaskComparison
from ups.evaluation.figures import (
    LINE_COLORS,
    LINE_STYLES,
    Example,
    data_address,
    fields_png,
    film,
    film_suffix,
    pyplot,
    svg_text,
)
from ups.evaluation.metrics import metric_columns
from ups.evaluation.results import MODEL, best_predictor, headlines, leak_words, significant
from ups.record.text import counted

# Columns of the score table: heading, summary key, what it is.
COLUMNS = (
    ("one step", "one_step_trmse", "each frame from the true ones before it; RMSE relative to the trajectory's RMS"),
    ("rollout", "trmse", "RMSE relative to the trajectory's RMS, mean over all predicted frames"),
    ("rollout nRMSE", "nrmse", "mean over all predicted frames, samples and channels"),
    ("median", "nrmse_median", "median over trajectories of their mean nRMSE"),
    ("rollout VRMSE", "vrmse", "error relative to the truth's spatial standard deviation"),
    ("median", "vrmse_median", "median over trajectories of their mean VRMSE"),
    ("correlation time", "correlation_time", "first step with correlation below 0.8 (higher is better)"),
    ("blown up", "num_blown_up", "trajectories with a value that is not finite, or an error of ten times the fields"),
    ("diverged", "num_diverged", "trajectories with a value that is not finite, or ten times the training data"),
)

# Inches of a chart.
SIZE = (5.6, 3.6)
# Below this part of the whole energy (amplitudes of 1e-5) lines leave the picture of a spectrum: next is the round-off
# of float32 fields and of networks, and an axis down to it squeezes all that matters.
LEAST_ENERGY = 1e-10
# Words and key of each row about an ensemble.
ENSEMBLE_ROWS = (
    ("CRPS of the members", "crps"),
    ("absolute error of the central member, which is the CRPS of one prediction", "absolute_error"),
    ("CRPS of Gaussian noise of equal spread around the central member", "gaussian"),
    ("rollout error of the mean of the members", "mean_rmse"),
    ("spread / skill, where 1 is right", "spread_skill"),
    ("spread / skill in the second half of the rollout", "spread_skill_second_half"),
)
_BANDS = (("low, k < 4", "frmse_low"), ("middle, 4 to 11", "frmse_mid"), ("high, k ≥ 12", "frmse_high"))
_CONTROL = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if code not in (9, 10))


def number(value: float) -> str:
    """Three significant digits, or what can not be written so."""
    if not math.isfinite(value):
        return "∞"
    if value == int(value) and abs(value) < 1e5:
        return str(int(value))
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e4 else f"{value:.2e}"


def write_report(
    results: Sequence[Mapping[str, Any]],
    pictures: Mapping[str, Sequence[Example]],
    *,
    title: str,
    identity: Mapping[str, str],
    config_text: str,
    seconds: float = math.inf,
) -> str:
    """The page as text. results: one per task; pictures: task -> examples, worst first; identity: label -> value.

    seconds: how long to draw. Tables, curves and one picture of each task come whatever that takes.
    """
    ends = time.monotonic() + seconds
    tasks = []
    for number_left, result in zip(range(len(results), 0, -1), results, strict=True):
        now = time.monotonic()
        tasks.append(_task(result, pictures.get(result["task"], ()), now + (ends - now) / number_left))
    shown = {"tasks": tasks, "identity": identity, "config_text": config_text}
    return _render("report.html", title=title, ensemble_rows=ENSEMBLE_ROWS, **shown)


def write_comparison(
    tasks: Sequence[TaskComparison],
    notes: Sequence[str],
    *,
    title: str,
    changes: Mapping[str, Sequence[tuple[str, str, str]]],
    seeds: Mapping[str, str] | None = None,
    costs: Mapping[str, Mapping[str, float]] | None = None,
) -> str:
    """The page as text. changes: label -> (field, value in the first, value in this one) of each differing field.

    seeds: task -> a table of means over seeds. costs: label -> what its training took, by name.
    """
    labels = ("Rollout error over time", "error relative to the trajectory", "predicted step")
    return _render(
        "comparison.html",
        title=title,
        notes=notes,
        tasks=tasks,
        charts={task.task: curve_figure(task.curves(), *labels) for task in tasks if not task.first["steady"]},
        best={task.task: {key: task.winner(key)[0] for _, key in task.scores()} for task in tasks},
        seeds=seeds or {},
        changes=changes,
        costs=costs or {},
        cost_names=list(next(iter((costs or {}).values()), {})),
    )


def _render(template: str, **values: Any) -> str:
    """A page from a template. Every text in it is escaped but charts, in which matplotlib has escaped all texts."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("ups.evaluation"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": lambda value: number(float(value)), "difference": difference_words}
    text = environment.get_template(template).render(**values)
    # Names in it may be untrusted. Whoever looks at the file in a terminal is safe, too.
    return text.translate(_CONTROL).encode("utf-8", "backslashreplace").decode()


def _task(result: Mapping[str, Any], pictures: Sequence[Example], ends: float) -> dict[str, Any]:
    """What the report shows of one task."""
    plan = result["protocol"]
    space = " x ".join(str(n) for n in result["space"])
    protocol = f"{result['split']} split, {plan['num_trajectories']} trajectories, grid {space}"
    if not result["steady"]:
        protocol += (
            f", dt {result['dt']:.4g}, {counted(plan['context_frames'], 'given frame')}, "
            f"last given frame {plan['start_frame']}, {plan['num_steps']} predicted"
        )
    added = [
        (metric["heading"], name, "added metric" + (" (higher is better)" if metric["higher_is_better"] else ""))
        for name, metric in result.get("metrics", {}).items()
    ]
    columns = [*COLUMNS, *added]
    return {
        **{key: result[key] for key in ("task", "equation", "predictors", "differences")},
        "headlines": headlines(result)[: 1 if result["steady"] else 2],
        "protocol": protocol,
        "leak": leak_words(result) if result.get("in_train") else "",
        "columns": columns,
        "best": {key: "" if key.startswith("num_") else best_predictor(result, key) for _, key, _ in columns},
        "plots": [*_curves_over_time(result), *_spectra(result)],
        "ensemble": _ensemble(result["ensemble"]) if "ensemble" in result else None,
        "cost": _break_even(result["break_even"]) if "break_even" in result else None,
        "details": _details(result),
        "pictures": _examples(pictures, ends),
    }


def difference_words(difference: Mapping[str, float] | None) -> str:
    """Mean and interval of a paired difference, and a word if it may be chance; a dash when compared with itself."""
    if difference is None:
        return "-"
    text = f"{number(difference['mean'])} [{number(difference['low'])}, {number(difference['high'])}]"
    return text if significant(difference) else f"{text}, not significant"


def _curves_over_time(result: Mapping[str, Any]) -> list[str]:
    """Errors over time, relative to the trajectory first: relative to a frame they explode as frames decay."""
    if result["steady"]:
        return []
    every, conserved = range(len(result["channels"])), result["conserved"]
    indices = [i for i, name in enumerate(result["channels"]) if name in conserved]
    plots = []
    for metric, title, channels in (
        ("trmse", "Error relative to the trajectory", every),
        ("nrmse", "nRMSE", every),
        ("vrmse", "VRMSE", every),
        ("drift", "Drift of conserved fields", indices),
    ):
        curves = {
            name: [sum(step[c] for c in channels) / len(channels) for step in predictor["curves"][metric]]
            for name, predictor in result["predictors"].items()
            if metric in predictor["curves"] and channels
        }
        if curves:
            plots.append(curve_figure(curves, title, "mean over trajectories", "predicted step"))
    return plots


def _spectra(result: Mapping[str, Any]) -> list[str]:
    """Spectra of the last step for each channel, at most three; of the first step, too, where there is one channel."""
    steps, channels = result["spectrum_steps"], result["channels"]
    if not steps:  # a grid that is not uniform has no waves
        return []
    last = len(steps) - 1
    chosen = [(k, 0) for k in range(len(steps))] if len(channels) == 1 else [(last, c) for c in range(len(channels))]
    shells = min(result["space"]) // 2 + 1  # beyond that shells have only corners
    plots = []
    for step, channel in chosen[:3]:
        predicted = {name: p["spectra"][step][channel][:shells] for name, p in result["predictors"].items()}
        truth = result["truth"]["spectra"][step][channel][:shells]
        title = f"Spectrum of {channels[channel]}" + ("" if result["steady"] else f", step {steps[step]}")
        plots.append(spectrum_figure(truth, predicted, title))
    return plots


def _ensemble(ensemble: Mapping[str, Any]) -> dict[str, Any]:
    """Members scored together: CRPS next to what has to be beaten, spread against skill, ranks of the truth."""
    curves = ensemble["curves"]
    scores = {"members": curves["crps"], "central member": curves["absolute_error"], "Gaussian": curves["gaussian"]}
    skill = {"spread": curves["spread"], "error of the mean": curves["error"]}
    plots = [
        curve_figure(scores, "CRPS", "relative to the trajectory", "predicted step"),
        curve_figure(skill, "Spread and skill", "relative to the trajectory", "predicted step"),
        rank_figure(ensemble["ranks"], "Rank of the truth among the members"),
    ]
    return {**ensemble, "plots": plots}


def _break_even(cost: Mapping[str, Any]) -> dict[str, Any]:
    if not cost.get("settings"):  # no solver of ours, or one whose cost is stated
        return {"settings": [], "reason": cost.get("sentence") or cost["reason"]}
    ours = cost["model"]
    points = [(s["milliseconds"], s["error"], f"{s['points']} points") for s in cost["settings"]]
    chart = cost_figure(points, (ours["milliseconds"], ours["error"]), "Solver and model: error against cost")
    return {**cost, "chart": chart}


def _details(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Heading and key of the columns that are folded up: bands of wave numbers, integral, boundary, largest error."""
    known = next(iter(result["predictors"].values()))["summary"]
    registered = [(column["heading"], name) for name, column in metric_columns(details=True).items()]
    columns = (*_BANDS, ("cRMSE", "crmse"), *registered, ("maxE", "max_error"))
    return [(heading, key) for heading, key in columns if key in known]


def _examples(pictures: Sequence[Example], ends: float) -> dict[str, Any]:
    """A picture of each example and channel, and a film of the first: as many as can be drawn until `ends`."""
    wanted = [(example, channel) for example in pictures for channel in range(min(len(example.channels), 3))]
    drawn: list[dict[str, str]] = []
    longest, kind = 0.0, {".mp4": "video/mp4", ".gif": "image/gif"}[film_suffix()]
    for example, channel in wanted:
        began = time.monotonic()
        if drawn and began + longest > ends:
            break
        name = f"{example.task.name}, {example.channels[channel]}, {example.source}"
        address = data_address("image/png", fields_png(example, channel))
        longest = max(longest, time.monotonic() - began)
        moving = None
        if not drawn:
            # Half of what is left: the other half is for pictures.
            moving = film(example, channel, (ends - time.monotonic()) / 2, gif=kind == "image/gif")
        drawn.append(
            {
                "alt": f"{name}: truth, prediction, error",
                "address": address,
                "film": "" if moving is None else data_address(kind, moving),
            }
        )
    return {"wanted": len(wanted), "drawn": drawn}


def curve_figure(
    curves: Mapping[str, Sequence[float]], title: str, y_label: str, x_label: str, *, x: Sequence[float] | None = None
) -> str:
    """Lines on a logarithmic scale, one per predictor, as SVG. Steps that blew up are missing from a line."""
    figure, axes = pyplot().subplots(figsize=SIZE)
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
    figure, axes = pyplot().subplots(figsize=SIZE)
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
    figure, axes = pyplot().subplots(figsize=SIZE)
    axes.bar(np.arange(len(shares)), np.asarray(shares, np.float64), color=LINE_COLORS[0], width=0.9)
    axes.axhline(1 / len(shares), color="#000000", linewidth=1)
    axes.set(xlabel="members below the truth", ylabel="share of the points", title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    return svg_text(figure)


def cost_figure(settings: Sequence[tuple[float, float, str]], model: tuple[float, float], title: str) -> str:
    """Error against cost, both logarithmic, as SVG. settings: (milliseconds, error, family); model: the same two.

    Settings of one family (one grid) are joined by a line; the model is a star.
    """
    figure, axes = pyplot().subplots(figsize=SIZE)
    families = list(dict.fromkeys(family for _, _, family in settings))
    for number, family in enumerate(families):
        points = sorted((c, e) for c, e, f in settings if f == family and np.isfinite(e) and e > 0)
        if points:
            # the first color is the model's; with more than six grids the markers still distinguish them
            look = _look(1 + number % 6, family)
            marker = "osD^vPX<"[number % 8]
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=5, **look)
    if np.isfinite(model[1]) and model[1] > 0:
        axes.plot(*model, "*", color=LINE_COLORS[0], markersize=15, label=MODEL, linestyle="none")
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
