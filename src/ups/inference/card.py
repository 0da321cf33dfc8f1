"""The card of a bundle: what it was trained on, how it scores beside references, and where not to trust it."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from ups.inference.bundle import BundleInfo
from ups.record.foreign import printable

LIMITS = (
    "- Parameters outside the trained ranges, other grids, boundaries or time steps were never tested. A result "
    "says so in its `warnings` attribute.",
    "- Rollouts longer than the scored ones: errors grow, and nothing here bounds them.",
    "- Initial states unlike the training data: the simulator can not know, and answers all the same.",
)


def write_card(name: str, info: BundleInfo) -> str:
    """The card as Markdown. Everything in it comes from the bundle's own data."""
    lines = [
        "---",
        "library_name: universal-simulator",
        "license: other",
        "tags: [physics, pde, simulation]",
        "---",
        f"# {name}",
        "",
        f"A neural simulator for {', '.join(t.name for t in info.tasks)}. Model type `{info.model.type}`, "
        f"{info.context_frames} given frame(s). It predicts on a grid.",
        "",
        "```python",
        "import ups",
        'simulator = ups.Simulator.load("PATH")',
        _example(info),
        "```",
        "",
        "## Trained on",
        "",
        "| task | equation | fields | grid | dt | parameters (trained range) | boundaries |",
        "|---|---|---|---|---|---|---|",
    ]
    for task in info.tasks:
        fields = ", ".join(f"{f.name} ({f.role})" for f in task.fields)
        ranges = ", ".join(f"{p.name} [{p.minimum:g}, {p.maximum:g}]" for p in task.parameters) or "none"
        boundaries = ", ".join(f"{a.name} {a.boundary}" for a in task.axes)
        grid = " x ".join(str(n) for n in info.space(task.name))
        dt = "steady" if task.steady else f"{task.dt:g}"
        equation = task.equation.replace("|", "\\|") or "not known"
        lines.append(f"| {task.name} | {equation} | {fields} | {grid} | {dt} | {ranges} | {boundaries} |")
    lines += _assumptions(info.assumptions)
    lines += ["", "## Scores", "", *_scores(info.scores), "", "## Where not to trust it", "", *LIMITS]
    lines += ["", "## Provenance", "", *(f"- {label}: `{value}`" for label, value in info.provenance.items()), ""]
    return "\n".join(lines)


def _example(info: BundleInfo) -> str:
    task = info.tasks[0]
    values = ", ".join(f'"{p.name}": {(p.minimum + p.maximum) / 2:.4g}' for p in task.parameters)
    given = "static=fields" if task.steady else "state, steps=20"
    parameters = f", parameters={{{values}}}" if values else ""
    return f'result = simulator.rollout({given}{parameters}, task="{task.name}")  # xarray.Dataset'


def _assumptions(assumptions: Mapping[str, tuple[str, ...]]) -> list[str]:
    """A section about what was assumed about the data; empty where nothing was."""
    pairs = [(task, text) for task, texts in assumptions.items() for text in texts]
    rows = [f"- {task}: {html.escape(printable(text), quote=False)}" for task, text in pairs]
    head = ["", "## Assumed about the data", "", "The data do not contain the following, or it was not used.", ""]
    return [*head, *rows] if rows else []


def _scores(scores: Mapping[str, Any]) -> list[str]:
    if not scores:
        return ["Not scored. Run `ups eval` before you believe it."]
    lines = [
        "Errors in physical units on held-out trajectories; given frames are not scored. One step and rollout: RMSE "
        "relative to the RMS of the trajectory; nRMSE: to that of the frame; VRMSE: to its deviation.",
        "",
        "| task | protocol | predictor | one step | rollout | median nRMSE | median VRMSE | blown up |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for task, result in scores.items():
        for name, values in result["predictors"].items():
            numbers = (values[k] for k in ("one_step_trmse", "trmse", "nrmse_median", "vrmse_median"))
            cells = " | ".join(_number(n) for n in numbers)
            blown = f"{_number(values['num_blown_up'])} of {_number(values['num_samples'])}"
            lines.append(f"| {task} | {result['protocol']} | {name} | {cells} | {blown} |")
    return lines


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)
