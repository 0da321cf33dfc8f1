"""The page of the comparison with APEBench, from the rows of an output directory. No training here."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.apebench.published import EVIDENCE, PUBLISHED, SOURCE, comparable
from benchmarks.apebench.recipes import KEPT, MODELS
from benchmarks.apebench.scenarios import APEBENCH, NETWORKS, SCENARIOS, SCORED_STEPS, UPDATES, same_coefficients
from benchmarks.protocol.page import number
from ups.errors import DataError

Rows = Sequence[Mapping[str, Any]]

_INTRODUCTION = f"""# APEBench

APEBench ([arXiv 2411.00180](https://arxiv.org/abs/2411.00180), version {APEBENCH}) makes the data of its scenarios
from fixed seeds, so that figures of others and ours are of the same trajectories. Here our network, at the size of
theirs, is trained on its scenarios in 1D, by its protocol, and scored by its metric.

The score is the geometric mean over the first {SCORED_STEPS} steps of the mean nRMSE of a rollout, over 30 test
trajectories; smaller is better. The nRMSE of a step is relative to the true frame at that step.
"""

_PROTOCOL = f"""
## What the protocol fixes

A scenario of APEBench fixes, for every network:

| what | value |
|---|---|
| training data | 50 trajectories of 51 frames on 160 points, seed 0: 2,500 pairs of frames, as they are |
| test data | 30 trajectories of 201 frames, seed 773 |
| batches | 20 pairs, drawn in passes over all of them; {UPDATES:,} updates, so 80 passes |
| loss | mean square error of one step (training `one`) |
| optimizer | Adam, betas 0.9 and 0.999; 2,000 updates of linear warm-up to 1e-3, then a cosine to 0 |
| what is scored | the last weights |

A network's own are its layers, its initial weights and how it scales its inputs and outputs. Ours divides fields by the
deviations of the training data and predicts the scaled change. That changes the loss by a constant factor, which Adam
does not see. Each model below keeps of these:
"""

_LIMITS = """
## Limits

- Our network is told what APEBench's are not: that the mean of a field is conserved, where the data keep it. It also
  has a linear law in Fourier space, which can represent the solution of `disp` exactly.
- `ups+training` and `ups-large` are not trained by APEBench's loss and optimizer. Its networks were not given theirs.
- `ups` gets no noise in training, as the protocol has none. Where the shortest waves are weak in the data, little
  teaches it to damp them, and a rollout may grow without end.
- The published figures are rounded, and the rows behind them were not read again. Where a network trained here has the
  published score, the coefficients of that row are confirmed.
- Nothing was tuned on these scenarios: the size follows from the number of parameters, and settings are APEBench's or
  those of [ups-bench](benchmark.md).
- Scenarios in 2D and 3D, and trainings over several steps, were not tried.
"""


def read_rows(out: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Our rows, and those of APEBench's networks trained here. Raises DataError if there is none of ours."""

    def read(folder: Path) -> list[dict[str, Any]]:
        found = []
        for path in sorted(folder.glob("*.json")):
            try:
                found.append(json.loads(path.read_text()))
            except ValueError as error:
                raise DataError(f"{path} is damaged: {error}", hint="remove it, and make it again") from error
        return found

    rows = read(out / "results")
    if not rows:
        raise DataError(f"{out / 'results'} has no rows: there is nothing to show yet", hint="train first")
    short = sorted({row["updates"] for row in rows} - {UPDATES})
    if short:
        raise DataError(
            f"{out / 'results'} has rows of {short[0]} updates, and the protocol has {UPDATES}",
            hint="show the rows of another --out",
        )
    return rows, read(out / "networks")


def markdown(rows: Rows, networks: Rows) -> str:
    """The whole page."""
    models = [model for model in MODELS if any(row["model"] == model for row in rows)]
    names = [name for name in SCENARIOS if any(row["scenario"] == name for row in rows)]
    parts = [_INTRODUCTION]
    best = {name: _published(rows, name) | _best(networks, name) for name in names}
    known = [name for name in names if best[name]]
    if known:
        parts.append(f"Next to all of APEBench's networks below: {_summary(rows, models, known, best)}\n")
    for heading, text, others in (
        ("Next to published figures", f"Figures of others: {SOURCE}.", {n: _published(rows, n) for n in names}),
        (
            "Next to APEBench's networks, trained here",
            "By its own program (`benchmarks/apebench/networks.py`), with its seeds from 0 on: median, and the range "
            f"in brackets where there are several. Parameters: {_sizes()}.",
            {n: _medians(networks, n) for n in names},
        ),
    ):
        shown = [name for name in names if others[name]]
        if shown:
            parts += [f"## {heading}\n\n{text}\n", _summary(rows, models, shown, others), ""]
            parts += _table(
                ["scenario", *models, *NETWORKS],
                ([name, *_line(rows, networks, models, name, others[name], heading)] for name in shown),
            )
            parts.append("")
    left = [name for name in names if not _published(rows, name)]
    if left:
        parts.append(f"No published figure is shown for {', '.join(left)}: {_why_not(left)}.\n")
    parts += ["## All scores\n"]
    parts += _table(
        ["scenario", "equation", *models],
        ([name, SCENARIOS[name].title, *(_cell(values_of(rows, model, name)) for model in models)] for name in names),
    )
    parts += [_PROTOCOL]
    parts += _table(["model", "what it is", "keeps"], ([f"`{m}`", MODELS[m], KEPT[m]] for m in models))
    parts += ["\n## What was trained\n"]
    parts += _table(
        ["model", "parameters", "trainings", "CPU-seconds of one (median)"],
        (
            [
                f"`{model}`",
                f"{_of(rows, model)[0]['parameters']:,}",
                str(len(_of(rows, model))),
                f"{statistics.median(row['cpu_seconds'] for row in _of(rows, model)):.0f}",
            ]
            for model in models
        ),
    )
    parts += [
        f"\nData: {_versions(rows)}.\n",
        f"Coefficients of the published figures: {EVIDENCE}\n",
        "Repeat it:\n\n```bash\npython -m benchmarks.apebench --help\n```",
        _LIMITS,
    ]
    return "\n".join(parts).rstrip() + "\n"


def values_of(rows: Rows, model: str, scenario: str) -> list[float]:
    """The scores of a model on a scenario, one for each seed; infinite for a rollout that grew without end."""
    found = [row["score"] for row in rows if (row["model"], row["scenario"]) == (model, scenario)]
    return [math.inf if value is None else float(value) for value in found]


def _published(rows: Rows, scenario: str) -> dict[str, float]:
    """Published scores, if they are of the equation of every row here."""
    ours = [row["coefficients"] for row in rows if row["scenario"] == scenario]
    found = comparable(scenario, ours[0])
    return dict(found) if all(same_coefficients(ours[0], other) for other in ours) else {}


def _medians(networks: Rows, scenario: str) -> dict[str, float]:
    found = {name: values_of(networks, name, scenario) for name in NETWORKS}
    return {name: statistics.median(values) for name, values in found.items() if values}


def _best(networks: Rows, scenario: str) -> dict[str, float]:
    """The medians under names of their own, so that a published figure of the same network stays next to them."""
    return {f"{name} here": value for name, value in _medians(networks, scenario).items()}


def _summary(rows: Rows, models: Sequence[str], names: Sequence[str], others: Mapping[str, Mapping[str, float]]) -> str:
    """How often the median of each model is below the best of the others."""
    words = []
    for model in models:
        ours = {name: values for name in names if (values := values_of(rows, model, name))}
        if not ours:
            continue
        won = [name for name, values in ours.items() if statistics.median(values) < min(others[name].values())]
        words.append(f"`{model}` is better than the best of them on {len(won)} of {len(ours)}")
    return "; ".join(words) + "."


def _line(
    rows: Rows, networks: Rows, models: Sequence[str], name: str, others: Mapping[str, float], heading: str
) -> list[str]:
    ours = [_cell(values_of(rows, model, name)) for model in models]
    if "published" in heading:
        return [*ours, *(number(others[n]) if n in others else "-" for n in NETWORKS)]
    return [*ours, *(_cell(values_of(networks, n, name)) for n in NETWORKS)]


def _cell(values: Sequence[float]) -> str:
    """The median, and the range in brackets."""
    if not values:
        return "-"
    middle = number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({number(min(values))} to {number(max(values))})"


def _why_not(names: Sequence[str]) -> str:
    other = [name for name in names if name in PUBLISHED]
    words = ["no row of these coefficients is at hand"]
    if other:
        words.append(f"those of {', '.join(other)} had other coefficients than {APEBENCH} generates")
    return "; ".join(words)


def _sizes() -> str:
    return ", ".join(f"{name} {count:,}" for name, (_, count) in NETWORKS.items())


def _versions(rows: Rows) -> str:
    found = sorted({json.dumps(row["data"]["versions"], sort_keys=True) for row in rows})
    shown = [", ".join(f"{name} {version}" for name, version in json.loads(text).items()) for text in found]
    return "; ".join(shown)


def _of(rows: Rows, model: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["model"] == model]


def _table(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads), *(f"| {' | '.join(line)} |" for line in lines)]
