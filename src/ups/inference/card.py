"""The card of a bundle: what it was trained on, how it scores next to references, and where not to trust it."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ups.inference.bundle import BundleInfo
from ups.inference.stored_scores import bundle_warnings
from ups.record.text import counted, printable

LIMITS = (
    "- Parameters outside the trained ranges, states whose mean, size, slopes or waves are outside those "
    "of the training data, rollouts longer than scored: nothing was measured there, and a result warns of it, for each "
    "sample. A rollout that grows to ten times the training data is marked as diverged. "
    "Another grid is resampled or refused, another domain refused.",
    "- Other boundaries or time steps, and unusual states with usual descriptors: the simulator cannot know, and "
    "answers all the same.",
)


def plain(text: str) -> str:
    """Text that is shown as it is where Markdown is rendered: no HTML, no links, no control characters."""
    escaped = html.escape(printable(" ".join(text.split())), quote=False)
    return re.sub(r"([\\`\[\]|*])", r"\\\1", escaped)


def _code(text: str) -> str:
    """Text in a code span, which no text can end."""
    return f"`{printable(' '.join(text.split())).replace('`', chr(39))}`"


def write_card(name: str, info: BundleInfo) -> str:
    """The card as Markdown. Everything in it comes from the bundle's own data, and its texts may be untrusted."""
    lines = [
        "---",
        "library_name: universal-simulator",
        "license: other",
        "tags: [physics, pde, simulation]",
        "---",
        f"# {plain(name)}",
        "",
        f"A neural simulator for {', '.join(t.name for t in info.tasks)}. Model type `{info.model.type}`, "
        f"{counted(info.context_frames, 'given frame')}. It predicts on a grid.",
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
        fields = ", ".join(f"{f.name}{_in(f.unit)} ({f.role})" for f in task.fields)
        ranges = ", ".join(f"{p.name} [{p.minimum:g}, {p.maximum:g}]{_in(p.unit)}" for p in task.parameters) or "none"
        boundaries = ", ".join(f"{a.name}{_in(a.unit)} {a.boundary_text}" for a in task.axes)
        grid = " x ".join(str(n) for n in info.space(task.name))
        dt = "steady" if task.steady else f"{task.dt:g}"
        dt = dt if task.dt_range is None else f"{task.dt_range[0]:g} to {task.dt_range[1]:g}"
        dt += "" if task.steady else _in(task.time_unit)
        equation = plain(task.equation) or "not known"
        lines.append(f"| {task.name} | {equation} | {fields} | {grid} | {dt} | {ranges} | {boundaries} |")
    if "step" in info.provenance:
        lines += ["", f"Training took {plain(info.provenance['step'])} steps."]
    lines += _assumptions(info.assumptions)
    lines += [
        "",
        "## Scores",
        "",
        *_scores(info.scores),
        *_stages(info.stages),
        "",
        "## Where not to trust it",
        "",
        *(f"- **Warning:** {plain(text)}" for text in bundle_warnings(info.scores, info.provenance)),
        *LIMITS,
    ]
    lines += ["", "## Provenance", "", *(f"- {plain(k)}: {_code(v)}" for k, v in info.provenance.items()), ""]
    return "\n".join(lines)


def _in(unit: str) -> str:
    """A unit behind what is measured in it; nothing where there is none."""
    return "" if unit == "1" else f" in {plain(unit)}"


def _example(info: BundleInfo) -> str:
    task = info.tasks[0]
    values = ", ".join(f'"{p.name}": {(p.minimum + p.maximum) / 2:.4g}' for p in task.parameters)
    given = "static=fields" if task.steady else "state, steps=20"
    parameters = f", parameters={{{values}}}" if values else ""
    return f'result = simulator.rollout({given}{parameters}, task="{task.name}")  # xarray.Dataset'


def _assumptions(assumptions: Mapping[str, tuple[str, ...]]) -> list[str]:
    """A section about what was assumed about the data; empty where nothing was."""
    rows = [f"- {plain(task)}: {plain(text)}" for task, texts in assumptions.items() for text in texts]
    head = ["", "## Assumed about the data", "", "The data do not contain the following, or it was not used.", ""]
    return [*head, *rows] if rows else []


def _scores(scores: Mapping[str, Any]) -> list[str]:
    if not scores:
        return ["Not scored. Run `ups eval` before you believe it."]
    lines = [
        "Errors in physical units on held-out trajectories; given frames are not scored. One step, rollout and "
        "solution: RMSE relative to the RMS of the trajectory; nRMSE: to that of the frame; VRMSE: to its deviation. "
        "Next to each the best predictor that learned nothing.",
        "",
        "| task | protocol | score | model | reference | reference / model | |",
        "|---|---|---|---|---|---|---|",
    ]
    members = [(task, result["ensemble"]) for task, result in scores.items() if "ensemble" in result]
    for task, result in scores.items():
        for line in result.get("headline", ()):
            reference = f"{_number(line['reference'])} ({line['reference_name']})"
            cells = [task, result["protocol"], line["score"], _number(line["model"]), reference]
            cells += [_number(line["ratio"]), line["verdict"]]
            lines.append(f"| {' | '.join(plain(str(cell)) for cell in cells)} |")
        total = result["predictors"]["model"]["num_samples"]
        for key, score in (("num_blown_up", "blown up"), ("num_diverged", "diverged")):
            # Scores of earlier versions do not count divergence.
            counts = {name: values.get(key, 0) for name, values in result["predictors"].items()}
            if counts["model"]:
                others = ", ".join(f"{name} {_number(count)}" for name, count in counts.items() if name != "model")
                ours = f"{_number(counts['model'])} of {_number(total)}"
                words = (task, str(result["protocol"]), score, ours, others)
                lines.append(f"| {' | '.join(plain(word) for word in words)} | | |")
    if members:
        head = "It is an ensemble; scores above are of its central member, without noise (`members=` gives others)."
        lines += ["", head, "", *(f"- {plain(task)}: {plain(str(words))}" for task, words in members)]
    return lines


def _stages(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """A section about what each stage of the run brought; empty where that is not known."""
    if not rows:
        return []
    head = [
        "",
        "## What each stage brought",
        "",
        "Measured on the valid split at the end of each stage, frame by frame from true ones.",
        "",
        "| stage | task | figure | before: | | after |",
        "|---|---|---|---|---|---|",
    ]
    return [
        *head,
        *(
            f"| {plain(row['stage'])} | {plain(row['task'])} | {plain(row['figure'])} | {plain(row['against'])} | "
            f"{_number(row['before'])} | {_number(row['after'])} |"
            for row in rows
        ),
    ]


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else plain(str(value))
