"""Pages of scores: the report of one model and the comparison of several, with charts as SVG.

Each is one self-contained HTML file, legible on a phone, that opens from disk.
"""

from __future__ import annotations

import html
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ups.evaluation.comparison import TaskComparison
from ups.evaluation.figures import LINE_COLORS, LINE_STYLES, Example, data_address, fields_png, film, pyplot, svg_text
from ups.evaluation.results import best_predictor, headlines, leak_words, significant
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

STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --soft: #5b6570; --line: #d8dee4; --blue: #0072B2; }
* { box-sizing: border-box; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); margin: 0 auto; max-width: 68rem; padding: 1rem; }
h1 { font-size: 1.6rem; margin: .5rem 0; }
h2 { margin-top: 2.5rem; border-top: 2px solid var(--line); padding-top: 1rem; }
h3 { margin-bottom: .3rem; } .soft { color: var(--soft); font-size: .9rem; }
/* A table that goes on beyond the edge has a shadow there, which what is drawn on its own end covers. */
.wide { overflow-x: auto; background:
  linear-gradient(to left, #fff 2rem, transparent) right / 3rem 100% no-repeat local,
  linear-gradient(to left, rgba(27, 31, 36, .28), transparent) right / 1rem 100% no-repeat scroll; }
table { border-collapse: separate; border-spacing: 0; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .6rem; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff; }
th { font-weight: 600; font-size: .85rem; color: var(--soft); white-space: normal; vertical-align: bottom; }
td.long { white-space: normal; min-width: 9rem; }
tr.model td:first-child { color: var(--blue); font-weight: 600; }
.warning { border-left: 4px solid #D55E00; padding-left: .8rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }
.words td { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 6rem; vertical-align: top; }
.words th { text-align: left; }
.plots svg, img, video { width: 100%; height: auto; } video { max-width: 46rem; }
.stack td:last-child { white-space: normal; }
@media (max-width: 44rem) {
  .many::before { content: "more columns: scroll sideways \\2192"; position: sticky; left: 0; color: var(--soft);
    font-size: .85rem; }
  .stack tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .stack tr:first-child { display: none; }
  .stack td { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; border: 0;
    white-space: normal; overflow-wrap: anywhere; }
  .stack td:not(:first-child) { text-align: right; }
  .stack td::before { content: attr(data-head); color: var(--soft); font-size: .85rem; white-space: nowrap; }
}
figure { margin: 1rem 0; } figcaption { color: var(--soft); font-size: .9rem; }
pre { background: #f6f8fa; padding: .8rem; overflow-x: auto; font-size: .8rem; } details summary { cursor: pointer; }
"""


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
    model: str,
    identity: Mapping[str, str],
    config_text: str,
    seconds: float = math.inf,
) -> str:
    """The page as text. results: one per task; pictures: task -> examples, worst first; identity: label -> value.

    seconds: how long to draw. Tables, curves and one picture of each task come whatever that takes.
    """
    ends = time.monotonic() + seconds
    parts = [
        "<p>Scores on held-out trajectories, in physical units. Given frames are never scored. "
        "Lower is better except where said; the best of a column is <b>bold</b>.</p>",
        _contents(results, model),
    ]
    for number_left, result in zip(range(len(results), 0, -1), results, strict=True):
        now = time.monotonic()
        parts.append(_task(result, pictures.get(result["task"], ()), model, now + (ends - now) / number_left))
    parts.append(_identity(identity, config_text))
    return whole_page(title, parts)


_CONTROL = dict.fromkeys(code for code in (*range(32), *range(127, 160)) if code not in (9, 10))


def whole_page(title: str, parts: Sequence[str]) -> str:
    """One self-contained file: head with the style of all our pages, title, then `parts`."""
    head = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
    ]
    text = "\n".join([*head, *parts, "</body></html>"])
    # Names in it may be untrusted. Whoever looks at the file in a terminal is safe, too.
    return text.translate(_CONTROL).encode("utf-8", "backslashreplace").decode()


def _contents(results: Sequence[Mapping[str, Any]], model: str) -> str:
    heads = ("task", "error", "model", "best reference", "ratio", "the model is")
    rows = []
    for result in results:
        task = html.escape(result["task"])
        for line in headlines(result, model)[: 1 if result["steady"] else 2]:
            cells = (
                f"<a href='#{task}'>{task}</a>",
                html.escape(line.score),
                number(line.model),
                f"{number(line.reference)} {html.escape(line.reference_name)}",
                f"{number(line.ratio)}x",
                html.escape(line.verdict),
            )
            # Where the window is narrow each row is a block, and its cells name their columns.
            shown = (f"<td data-head='{head}'>{cell}</td>" for head, cell in zip(heads, cells, strict=True))
            rows.append(f"<tr>{''.join(shown)}</tr>")
    first = "".join(f"<th>{head}</th>" for head in heads)
    return f"<table class='stack'><tr>{first}</tr>{''.join(rows)}</table>"


def columns_of(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Heading, summary key and meaning of each column of the score table: ours, then those of added metrics."""
    added = [
        (metric["heading"], name, "added metric" + (" (higher is better)" if metric["higher_is_better"] else ""))
        for name, metric in result.get("metrics", {}).items()
    ]
    return [*COLUMNS, *added]


def _task(result: Mapping[str, Any], pictures: Sequence[Example], model: str, ends: float) -> str:
    plan = result["protocol"]
    space = " x ".join(str(n) for n in result["space"])
    protocol = f"{result['split']} split, {plan['num_trajectories']} trajectories, grid {space}"
    if not result["steady"]:
        protocol += (
            f", dt {result['dt']:.4g}, {counted(plan['context_frames'], 'given frame')}, "
            f"last given frame {plan['start_frame']}, {plan['num_steps']} predicted"
        )
    name = html.escape(result["task"])
    parts = [
        f"<h2 id='{name}'>{name}</h2><p class='soft'>{html.escape(result['equation'])}<br>{protocol}</p>",
        _scores(result, model),
    ]
    if result.get("in_train"):
        parts.insert(1, f"<p class='warning'>Warning: {html.escape(leak_words(result))}.</p>")
    parts.append(f"<div class='plots'>{''.join(_plots(result))}</div>")
    if "ensemble" in result:
        parts.append(_ensemble(result["ensemble"]))
    if "solver_cost" in result:
        parts.append(_solver_cost(result, model))
    parts.append(_bands(result))
    if pictures:
        parts.append(f"<h3>Worst trajectories of {html.escape(model)}, worst first</h3>")
        parts += _examples(pictures, ends)
    return "\n".join(parts)


def _scores(result: Mapping[str, Any], model: str) -> str:
    columns = columns_of(result)
    heads = "".join(f"<th title='{html.escape(what)}'>{html.escape(head)}</th>" for head, _, what in columns)
    best = {key: best_predictor(result, key) for _, key, _ in columns}
    rows = []
    for name, predictor in result["predictors"].items():
        cells = []
        for _, key, _ in columns:
            text = number(float(predictor["summary"][key]))
            cells.append(
                f"<td><b>{text}</b></td>" if best[key] == name and not key.startswith("num_") else f"<td>{text}</td>"
            )
        difference = result["differences"].get(name)
        cells.append(f"<td class='long'>{difference_words(difference)}</td>")
        kind = " class='model'" if name == model else ""
        rows.append(f"<tr{kind}><td>{html.escape(name)}</td>{''.join(cells)}</tr>")
    words = "rollout errors, paired over trajectories, with 95 % bootstrap interval"
    last = f"<th title='{words}'>rollout of {html.escape(model)} minus this</th>"
    return f"<div class='wide many'><table><tr><th>predictor</th>{heads}{last}</tr>{''.join(rows)}</table></div>"


def difference_words(difference: Mapping[str, float] | None) -> str:
    """Mean and interval of a paired difference, and a word if it may be chance; a dash when compared with itself."""
    if difference is None:
        return "-"
    text = f"{number(difference['mean'])} [{number(difference['low'])}, {number(difference['high'])}]"
    return text if significant(difference) else f"{text}, not significant"


def _curves(result: Mapping[str, Any], metric: str, title: str, only: Sequence[str] | None = None) -> str:
    channels = [i for i, c in enumerate(result["channels"]) if only is None or c in only]
    curves = {
        name: [sum(step[c] for c in channels) / len(channels) for step in predictor["curves"][metric]]
        for name, predictor in result["predictors"].items()
        if metric in predictor["curves"] and channels
    }
    return f"<div>{curve_figure(curves, title, 'mean over trajectories', 'predicted step')}</div>" if curves else ""


def _plots(result: Mapping[str, Any]) -> list[str]:
    """Errors over time, relative to the trajectory first: relative to a frame they explode as frames decay."""
    plots = []
    if not result["steady"]:
        plots += [
            _curves(result, "trmse", "Error relative to the trajectory"),
            _curves(result, "nrmse", "nRMSE"),
            _curves(result, "vrmse", "VRMSE"),
        ]
        if result["conserved"]:
            plots.append(_curves(result, "drift", "Drift of conserved fields", result["conserved"]))
    return plots + _spectra(result)


def _spectra(result: Mapping[str, Any]) -> list[str]:
    """Spectra of the last step for each channel, at most three; of the first step, too, where there is one channel."""
    steps, channels = result["spectrum_steps"], result["channels"]
    if not steps:  # a grid that is not uniform has no waves
        return []
    last = len(steps) - 1
    chosen = [(k, 0) for k in range(len(steps))] if len(channels) == 1 else [(last, c) for c in range(len(channels))]
    shells = min(result["space"]) // 2 + 1  # beyond that shells have only corners
    plots = []
    for place, channel in chosen[:3]:
        predicted = {name: p["spectra"][place][channel][:shells] for name, p in result["predictors"].items()}
        truth = result["truth"]["spectra"][place][channel][:shells]
        title = f"Spectrum of {channels[channel]}" + ("" if result["steady"] else f", step {steps[place]}")
        plots.append(f"<div>{spectrum_figure(truth, predicted, title)}</div>")
    return plots


def _ensemble(ensemble: Mapping[str, Any]) -> str:
    """Members scored together: CRPS next to what has to be beaten, spread against skill, ranks of the truth."""
    summary, curves, count = ensemble["summary"], ensemble["curves"], ensemble["members"]
    rows = "".join(
        f"<tr><td>{words}</td><td>{number(float(summary[key]))}</td></tr>"
        for words, key in (
            ("CRPS of the members", "crps"),
            ("absolute error of the central member, which is the CRPS of one prediction", "absolute_error"),
            ("CRPS of Gaussian noise of equal spread around the central member", "gaussian"),
            ("rollout error of the mean of the members", "mean_rmse"),
            ("spread / skill, where 1 is right", "spread_skill"),
            ("spread / skill in the second half of the rollout", "spread_skill_second_half"),
        )
    )
    scores = {"members": curves["crps"], "central member": curves["absolute_error"], "Gaussian": curves["gaussian"]}
    skill = {"spread": curves["spread"], "error of the mean": curves["error"]}
    plots = [
        curve_figure(scores, "CRPS", "relative to the trajectory", "predicted step"),
        curve_figure(skill, "Spread and skill", "relative to the trajectory", "predicted step"),
        rank_figure(ensemble["ranks"], "Rank of the truth among the members"),
    ]
    return (
        f"<h3>Ensemble of {count} members</h3><div class='wide'><table>{rows}</table></div>"
        "<p class='soft'>Relative to the trajectory's RMS. Spread with the factor of so many members, "
        "&radic;((M + 1) / M), in the ratio alone. Ranks are flat where members cover the truth; a hollow is too "
        "little spread.</p>"
        f"<div class='plots'>{''.join(f'<div>{plot}</div>' for plot in plots)}</div>"
    )


def _solver_cost(result: Mapping[str, Any], model: str) -> str:
    cost = result["solver_cost"]
    head = "<h3>What the same error costs a solver</h3>"
    if "settings" not in cost:
        return f"{head}<p>{html.escape(cost['reason'])}</p>"
    ours = cost["model"]
    points = [(s["milliseconds"], s["error"], f"{s['points']} points") for s in cost["settings"]]
    chart = cost_figure(points, (ours["milliseconds"], ours["error"]), model, "Solver and model: error against cost")
    rows = "".join(
        f"<tr><td>{s['points']}</td><td>{s['substeps'] or '-'}</td><td>{number(s['error'])}</td>"
        f"<td>{number(s['milliseconds'])}</td></tr>"
        for s in cost["settings"]
    )
    grids = ", ".join(str(points) for points in cost["left_out"])
    left_out = f" Left out, because they would take too long: {grids} points." if grids else ""
    heads = "<th>points per axis</th><th>steps per frame</th><th>rollout error</th><th>CPU ms</th>"
    return (
        f"{head}<p>{html.escape(cost['sentence'])}</p>"
        "<p class='soft'>The solver that made the data, from the same stored frames and scored on the same grid; CPU "
        f"time of one thread, {cost['batch_size']} trajectories at once. On the grid on which the data was made "
        f"a solver only repeats it.{left_out}</p>"
        f"<div class='plots'><div>{chart}</div><details><summary>All solver settings</summary><div class='wide'>"
        f"<table><tr>{heads}</tr>{rows}</table></div></details></div>"
    )


def _bands(result: Mapping[str, Any]) -> str:
    keys = (("low, k < 4", "frmse_low"), ("middle, 4 to 11", "frmse_mid"), ("high, k ≥ 12", "frmse_high"))
    shown = keys if result["spectrum_steps"] else ()
    heads = "".join(f"<th>{head}</th>" for head, _ in shown) + "<th>cRMSE</th><th>bRMSE</th><th>maxE</th>"
    rows = []
    for name, predictor in result["predictors"].items():
        summary = predictor["summary"]
        columns = [*(k for _, k in shown), "crmse", "brmse", "max_error"]
        cells = "".join(f"<td>{number(float(summary[key]))}</td>" for key in columns)
        rows.append(f"<tr><td>{html.escape(name)}</td>{cells}</tr>")
    return (
        "<details><summary>Error by wave number band, of the integral, on the boundary, and the largest</summary>"
        "<div class='wide many'><table>"
        f"<tr><th>predictor (RMSE, physical units)</th>{heads}</tr>{''.join(rows)}</table></div>"
        "</details>"
    )


def _examples(pictures: Sequence[Example], ends: float) -> list[str]:
    """A picture of each example and channel, and a film of the first: as many as can be drawn until `ends`."""
    wanted = [(example, channel) for example in pictures for channel in range(min(len(example.channels), 3))]
    parts: list[str] = []
    longest = 0.0
    for drawn, (example, channel) in enumerate(wanted):
        began = time.monotonic()
        if drawn and began + longest > ends:
            parts.append(f"<p class='soft'>{drawn} of {len(wanted)} pictures are drawn, in the time of scoring.</p>")
            break
        name = f"{example.task.name}, {example.channels[channel]}, {example.source}"
        alt = html.escape(f"{name}: truth, prediction, error")
        address = data_address("image/png", fields_png(example, channel))
        parts.append(f"<figure><img alt='{alt}' src='{address}'></figure>")
        longest = max(longest, time.monotonic() - began)
        if not drawn:
            # Half of what is left: the other half is for pictures.
            moving = film(example, channel, (ends - time.monotonic()) / 2)
            if moving is not None:
                address = data_address("video/mp4", moving)
                parts.append(f"<figure><video controls loop muted playsinline src='{address}'></video></figure>")
    return parts


def _identity(identity: Mapping[str, str], config_text: str) -> str:
    rows = "".join(f"<tr><td>{html.escape(k)}</td><td>{html.escape(v)}</td></tr>" for k, v in identity.items())
    return (
        f"<h2>What was scored</h2><div class='wide'><table>{rows}</table></div>"
        f"<details><summary>Resolved recipe</summary><pre>{html.escape(config_text)}</pre></details>"
    )


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
    parts = [
        "<p>Scores on the same held-out trajectories, in physical units; lower is better. The best model of a column "
        "is <b>bold</b> if it is significantly better than the others and than every predictor that learned nothing; "
        "these stand below the models. A difference is of rollout errors, paired over trajectories, with its 95 % "
        "bootstrap interval; below 0 it is better than the first.</p>",
    ]
    parts += [f"<p class='soft'>{html.escape(note)}</p>" for note in notes]
    parts += [_compared(task, _pre((seeds or {}).get(task.task, "")), costs or {}) for task in tasks]
    parts += [_changes(label, rows, next(iter(tasks[0].results))) for label, rows in changes.items()]
    return whole_page(title, parts)


def _pre(text: str) -> str:
    return f"<pre>{html.escape(text)}</pre>" if text else ""


def _compared(task: TaskComparison, seeds: str, costs: Mapping[str, Mapping[str, float]]) -> str:
    names = list(next(iter(costs.values()), {}))
    scores = task.scores()
    best = {key: task.winner(key)[0] for _, key in scores}
    rows = []
    for label in task.results:
        cells = []
        for _, key in scores:
            text = number(float(task.summary(label)[key]))
            cells.append(f"<td><b>{text}</b></td>" if best[key] == label else f"<td>{text}</td>")
        cells += [f"<td>{costs[label][name]:.4g}</td>" for name in names]
        cells += [f"<td>{difference_words(task.differences.get(label))}</td>"]
        cells += [f"<td>{html.escape(task.rollout_verdict(label))}</td>"]
        rows.append(f"<tr class='model'><td>{html.escape(label)}</td>{''.join(cells)}</tr>")
    for reference, summary in task.references().items():
        cells = [f"<td>{number(float(summary[key]))}</td>" for _, key in scores] + ["<td>0</td>"] * len(names)
        rows.append(f"<tr><td>{html.escape(reference)}</td>{''.join(cells)}<td></td><td>reference</td></tr>")
    heads = "".join(f"<th>{head}</th>" for head in [*dict(scores), *names])
    name = html.escape(task.task)
    first = task.first
    plan = first["protocol"]
    protocol = f"{first['split']} split, {plan['num_trajectories']} trajectories"
    chart = ""
    if not first["steady"]:
        protocol += f", {plan['num_steps']} steps from frame {plan['start_frame']}"
        figure = curve_figure(
            task.curves(), "Rollout error over time", "error relative to the trajectory", "predicted step"
        )
        chart = f"<div class='plots'><div>{figure}</div></div>"
    return (
        f"<h2>{name}</h2><p class='soft'>{html.escape(protocol)}</p>{seeds}"
        f"<div class='wide many'><table><tr><th>model</th>{heads}"
        f"<th>rollout minus {html.escape(next(iter(task.results)))}</th><th>rollout</th></tr>"
        f"{''.join(rows)}</table></div>{chart}"
    )


def _changes(label: str, rows: Sequence[tuple[str, str, str]], first: str) -> str:
    cells = "".join(
        f"<tr><td>{html.escape(field)}</td><td>{html.escape(old)}</td><td>{html.escape(new)}</td></tr>"
        for field, old, new in rows
    )
    heads = f"<tr><th>field</th><th>{html.escape(first)}</th><th>{html.escape(label)}</th></tr>"
    body = f"<div class='wide'><table class='words'>{heads}{cells}</table></div>" if rows else "<p>none known</p>"
    return f"<h2>Recipe: {html.escape(label)} against {html.escape(first)}</h2>{body}"


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
