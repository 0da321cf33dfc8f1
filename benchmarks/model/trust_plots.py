"""Pictures of what `trust.py` measured: coverage, reliability, error against distance, and rollouts that were declined.

    python benchmarks/model/trust_plots.py --measured DIR --shifted shifted --out docs/pictures

--measured: the directory --out of `trust.py`, with a file and a calibrated bundle for each task.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from trust import Given, frames_of, rollout_of
from trust_rows import HARMFUL, LEVEL, STATEMENTS, is_benign

import ups
from ups.evaluation.figures import LINE_COLORS, pyplot
from ups.inference.simulator import BundleWarning
from ups.solvers.tasks import BENCH_TASKS

STYLES = ("-", "--", ":")
# Task and kind of the rollouts that are shown; the first sample of each whose error bar was exceeded.
DECLINED = (("burgers1d", "box"), ("ks1d", "short wave"), ("reacdiff1d", "parameters above"))


def look(number: int) -> dict[str, Any]:
    return {"color": LINE_COLORS[number % len(LINE_COLORS)], "linestyle": STYLES[number // len(LINE_COLORS)]}


def by_lead(documents: list[dict[str, Any]]) -> Any:
    figure, panels = pyplot().subplots(1, 3, figsize=(12, 3.6), sharey=True, layout="constrained")
    for axes, statement in zip(panels, STATEMENTS, strict=True):
        for number, document in enumerate(documents):
            covered = document["coverage_by_lead"][statement]
            if len(covered) > 1:
                axes.plot(range(1, len(covered) + 1), covered, label=document["task"], **look(number))
        axes.axhline(LEVEL, color="black", linewidth=0.8)
        axes.set(title=statement, xlabel="step", ylim=(0.7, 1.0))
    panels[0].set_ylabel("share inside its error bar")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def reliability(documents: list[dict[str, Any]]) -> Any:
    figure, panels = pyplot().subplots(1, 3, figsize=(12, 3.9), sharey=True, layout="constrained")
    for axes, statement in zip(panels, STATEMENTS, strict=True):
        axes.plot([0, 1], [0, 1], color="black", linewidth=0.8)
        for number, document in enumerate(documents):
            pairs = [(float(k), v[statement]) for k, v in document["coverage_by_level"].items() if v]
            axes.plot(*zip(*pairs, strict=True), marker=".", label=document["task"], **look(number))
        axes.set(title=statement, xlabel="level asked for", xlim=(0, 1), ylim=(0, 1), aspect="equal")
    panels[0].set_ylabel("share inside")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def against_distance(documents: list[dict[str, Any]]) -> Any:
    figure, grid = pyplot().subplots(3, 3, figsize=(10.5, 8.4), sharex=True, sharey=True, layout="constrained")
    for axes, document in zip(grid.flat, documents, strict=False):
        shifted = [p for kind, c in document["shifts"].items() if not is_benign(kind) for p in c["points"]]
        benign = [p for kind, c in document["shifts"].items() if is_benign(kind) for p in c["points"]]
        groups = (("shifted", shifted, 1), ("moved by a symmetry", benign, 2), ("test", document["points"], 0))
        for label, points, color in groups:
            # Below 0.03 a distance or an error is drawn as that.
            x, y = np.clip(np.array(points or [[np.nan, np.nan]]).T, [[0.03], [0.03]], [[1e3], [1e3]])
            axes.plot(x, y, ".", markersize=4, color=LINE_COLORS[color], alpha=0.6, label=label)
        axes.axhline(HARMFUL, color="black", linewidth=0.8)
        axes.axvline(document["alarm_distance"], color="black", linewidth=0.8, linestyle="--")
        axes.set(title=document["task"], xscale="log", yscale="log")
    figure.supxlabel("largest distance of a rollout (dashed: declined beyond)")
    figure.supylabel(f"largest error, in units of its error bar (line: {HARMFUL:g})")
    figure.legend(*grid.flat[0].get_legend_handles_labels(), loc="outside upper right", ncols=3, frameon=False)
    return figure


def declined(measured: Path, shifted: Path) -> Any:
    figure, grid = pyplot().subplots(len(DECLINED), 3, figsize=(10, 2.3 * len(DECLINED)), layout="constrained")
    for row, (name, kind) in zip(grid, DECLINED, strict=True):
        with np.load(shifted / f"{name}.npz") as arrays:
            parts = ("state", "static", "parameters", "truth")
            given = Given(**{part: arrays[f"{kind}/{part}"] for part in parts})
        simulator = ups.Simulator.load(measured / f"bundle-{name}", "cpu")
        task = simulator.tasks[name]
        result = rollout_of(simulator, task, given, level=LEVEL, on_doubt="ignore")
        frames, field = frames_of(result, task), task.fields_of(task.predicted)[0].name
        error = np.sqrt(np.square(frames - given.truth)[:, :, 0].mean(-1))
        stated, at = result[f"{field}_error"].values, result["outside_at"].values
        harmful = np.flatnonzero((error > HARMFUL * stated).any(1) & (at > 0))
        sample = int(harmful[0]) if len(harmful) else 0
        low, high = given.truth[sample, :, 0].min(), given.truth[sample, :, 0].max()
        for axes, values, title in zip(row, (given.truth, frames), ("truth", "prediction"), strict=False):
            axes.imshow(values[sample, :, 0], aspect="auto", vmin=low, vmax=high, cmap="viridis", origin="lower")
            axes.set_title(f"{name}, {kind}: {title}", fontsize=9)
            axes.set(xlabel="point", ylabel="step")
            axes.axhline(at[sample] - 0.5, color="white", linestyle="--")
        steps = np.arange(1, len(error[sample]) + 1)
        row[2].plot(steps, error[sample], color=LINE_COLORS[1], label="error")
        row[2].plot(steps, stated[sample], color=LINE_COLORS[0], label=f"error bar of {LEVEL:.0%}")
        row[2].axvline(at[sample], color="black", linestyle="--", label="declined from here")
        row[2].set(yscale="log", xlabel="step")
        row[2].set_title("RMS error", fontsize=9)
        row[2].legend(frameon=False, fontsize=8)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("measured", "shifted", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", BundleWarning)
    paths = [options.measured / f"{name}.json" for name in BENCH_TASKS]
    documents = [json.loads(path.read_text()) for path in paths if path.exists()]
    figures = {"coverage": by_lead(documents), "reliability": reliability(documents)}
    figures |= {"distance": against_distance(documents), "declined": declined(options.measured, options.shifted)}
    for name, figure in figures.items():
        path = options.out / f"trust-{name}.png"
        figure.savefig(path, dpi=110)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
