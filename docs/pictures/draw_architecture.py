"""Draws the pictures of docs/architecture.md: `python docs/pictures/draw_architecture.py` (extra `report`).

The modules and their order are read from the import rules in pyproject.toml, so the first picture cannot differ from
what is checked. Writes architecture-modules.png and architecture-step-and-fault.png next to this file.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

HERE = Path(__file__).resolve().parent
INK = "#1f2933"
NO_TORCH = "#dbeafe"
TORCH = "#fde7c8"
PLAIN = "#eef1f4"
OWNS = {
    "cli": "one file per\ncommand",
    "testing": "helpers for tests,\nours and yours",
    "library": "import ups:\ntrain, fit, Run, ...",
    "integrations": "our stages in\npipelines of others",
    "serve": "simulators\nover HTTP",
    "doctor": "checks a machine with a recipe;\nits probes are programs of their own and may import torch",
    "run": "one run assembled:\ndirectory, rank entry, scores",
    "launch": "start runs\nelsewhere",
    "supervise": "start, watch, restart\nranks; the verdict",
    "plan": "what a run will need: a rehearsal without data",
    "training": "the loop, its stages,\ncheckpoints",
    "evaluation": "metrics, references,\nreports",
    "inference": "bundles and\nsimulators",
    "models": "networks",
    "data": "windows to\nbatches",
    "solvers": "reference\nsolvers",
    "distributed": "ranks and\ncollectives",
    "tracking": "where metrics\ngo",
    "formats": "files of data: the contract of a reader, one module per format",
    "spec": "what a task and\na batch are",
    "config": "what a recipe is",
    "buckets": "buckets of object stores: opening one, the copy of a run in one",
    "record": "black box, failure record,\nmanifests, checkpoints",
    "registry": "parts by name",
    "errors": "one tree of exceptions",
}
# As the import rules have it: these work when torch is what is broken.
WITHOUT_TORCH = {"launch", "supervise", "doctor", "tracking", "config", "buckets", "record", "registry", "errors"}


def layers() -> list[list[str]]:
    """The modules of each layer, the topmost first; a module that may be absent only if it is there."""
    rules = tomllib.loads((HERE.parents[1] / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    found = next(rule["layers"] for rule in rules if rule["type"] == "layers")
    rows = [[name.strip(" ()") for name in layer.split("|")] for layer in found]
    source = HERE.parents[1] / "src" / "ups"
    return [[n for n in row if (source / n).is_dir() or (source / f"{n}.py").is_file()] for row in rows]


def box(axes: Any, x: float, y: float, width: float, height: float, title: str, text: str, color: str) -> None:
    """A box with a title and a few words."""
    style = "round,pad=0,rounding_size=0.06"
    axes.add_patch(FancyBboxPatch((x, y), width, height, boxstyle=style, facecolor=color, edgecolor=INK, linewidth=0.8))
    lines = text.count("\n") + 1 if text else 0
    middle, line = y + height / 2, 0.125  # inches of a line of the smaller letters
    top = middle + line * lines / 2
    axes.text(x + width / 2, top, title, ha="center", va="center", fontsize=10, weight="bold", color=INK)
    axes.text(x + width / 2, top - 0.12, text, ha="center", va="top", fontsize=7.5, color=INK)


def arrow(axes: Any, begin: tuple[float, float], end: tuple[float, float], color: str = INK, bend: float = 0.0) -> None:
    """An arrow between two points."""
    style = f"arc3,rad={bend}"
    axes.add_patch(
        FancyArrowPatch(
            begin, end, arrowstyle="-|>", mutation_scale=11, linewidth=1.1, color=color, connectionstyle=style
        )
    )


def canvas(width: float, height: float) -> tuple[Any, Any]:
    """A figure whose axes are in inches and show nothing of their own."""
    figure = plt.figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, width)
    axes.set_ylim(0, height)
    axes.axis("off")
    return figure, axes


def modules() -> None:
    """Layers from the top; imports go downward only."""
    rows = layers()
    height, step, left, width = 0.66, 0.78, 0.25, 8.6
    figure, axes = canvas(9.6, step * len(rows) + 0.75)
    for number, row in enumerate(rows):
        y = 0.6 + (len(rows) - 1 - number) * step
        each = (width - 0.14 * (len(row) - 1)) / len(row)
        for place, name in enumerate(row):
            color = NO_TORCH if name in WITHOUT_TORCH else TORCH
            text = OWNS.get(name, "") if len(row) > 2 else OWNS.get(name, "").replace("\n", " ")
            box(axes, left + place * (each + 0.14), y, each, height, name, text, color)
    top, bottom = 0.6 + step * len(rows) - 0.14, 0.6
    arrow(axes, (9.2, top), (9.2, bottom))
    axes.text(9.36, (top + bottom) / 2, "imports", rotation=270, ha="center", va="center", fontsize=9, color=INK)
    box(axes, left, 0.18, 0.3, 0.22, "", "", NO_TORCH)
    axes.text(left + 0.4, 0.29, "imports no torch: works when torch is what is broken", va="center", fontsize=8)
    box(axes, left + 4.1, 0.18, 0.3, 0.22, "", "", TORCH)
    text = "may import torch;   modules in one row never import each other"
    axes.text(left + 4.5, 0.29, text, va="center", fontsize=8)
    figure.savefig(HERE / "architecture-modules.png", dpi=110)


def step_and_fault() -> None:
    """Left: one training step inside a rank. Right: what happens when a rank dies."""
    figure, axes = canvas(11.0, 6.5)
    red, blue = "#b42318", "#1d4ed8"
    axes.text(0.3, 6.2, "One step, on every rank", fontsize=12, weight="bold", color=blue)
    axes.text(6.15, 6.2, "One fault", fontsize=12, weight="bold", color=red)
    steps = [
        ("data", "reader -> windows of this rank -> micro-batch"),
        ("forward", "stage computes the loss of the batch with the model"),
        ("backward", "gradients; the last micro-batch reduces them over ranks"),
        ("sync", "one gradient norm, equal on all ranks: clip or skip together"),
        ("optimizer", "weights, learning rate, moving average"),
        ("hooks", "save, evaluate, log: in this order"),
    ]
    for number, (name, text) in enumerate(steps):
        y = 5.3 - number * 0.84
        box(axes, 0.3, y, 3.9, 0.64, name, text, TORCH)
        if number:
            arrow(axes, (2.25, y + 0.84), (2.25, y + 0.64))
    axes.text(0.3, 0.72, "Requests to stop or save travel with the step: issued at its start, read at", fontsize=8)
    axes.text(0.3, 0.52, "its end, so that all ranks decide alike and no accelerator waits for it.", fontsize=8)
    box(axes, 4.62, 1.1, 1.15, 4.84, "black box", "phase and step\nof each rank,\nin shared\nmemory", PLAIN)
    for number in range(len(steps)):
        arrow(axes, (4.2, 5.62 - number * 0.84), (4.62, 5.62 - number * 0.84), blue)
    faults = [
        ("a rank dies", "signal, exception, standstill, lack of memory", "#fde2e0"),
        ("its wrapper and its recorder", "exit code and time; traceback, place, cause", "#fde2e0"),
        ("attempt", "notices within 0.1 s, takes stacks, ends the other ranks", NO_TORCH),
        ("first cause", "first by one clock; lost connections are consequences", NO_TORCH),
        ("supervisor", "restart from the last commit, or stop: the verdict", NO_TORCH),
        ("run.json", "one FAILED line per fault, one VERDICT at the end", PLAIN),
    ]
    for number, (name, text, color) in enumerate(faults):
        y = 5.3 - number * 0.84
        box(axes, 6.15, y, 4.1, 0.64, name, text, color)
        if number:
            arrow(axes, (8.2, y + 0.84), (8.2, y + 0.64), red)
    arrow(axes, (5.77, 3.94), (6.15, 3.94), red)
    box(axes, 6.15, 0.25, 4.1, 0.6, "ups why RUN", "which rank, where, why, what was lost, what to do", PLAIN)
    arrow(axes, (8.2, 1.1), (8.2, 0.85), red)
    arrow(axes, (10.25, 2.1), (10.25, 3.9), blue, bend=0.6)
    axes.text(10.9, 3.0, "restart", rotation=270, ha="center", va="center", fontsize=8, color=blue)
    figure.savefig(HERE / "architecture-step-and-fault.png", dpi=110)


if __name__ == "__main__":
    modules()
    step_and_fault()
