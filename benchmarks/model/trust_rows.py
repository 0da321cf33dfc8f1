"""What `trust.py` counts, judges and prints: arrays and counts in, rows and bars out. No program of its own.

N trajectories, n of them for calibration, L leads, M fields, Q scalar quantities, C channels, S space.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Document = Mapping[str, Any]
LEVEL = 0.9
HARMFUL = 2.0  # times the stated error
STATEMENTS = ("each time", "whole trajectory", "scalars")
# What a rollout doubts, and its two reasons, each alone.
DOUBT, DISTANCE, AS_THEY_ARE = "doubt", "distance alone", "range checks alone"
# Detectors whose limit is set on the calibration trajectories, at the share of false alarms of the distance.
RANGES, NEAREST, SECOND = "range checks, same limit", "nearest neighbor", "second model"
OURS, OURS_WHOLE, PER_CELL = "error model", "error model, whole trajectory", "per cell (AER)"

MEAN_COVERAGE, TASK_COVERAGE = (0.88, 0.92), (0.82, 0.97)
CELL, LEAST_CELL, SHARE_OF_CELLS = 0.80, 0.72, 0.95
MOST_WIDTH = 0.8
POOLED_ALARMS, TASK_ALARMS = 34 / 2304, 6 / 256
SOME = 1e-9  # more than nothing
LEAST_FLAGGED, LEAST_IN_TIME, LEAST_ANSWERED = 0.9, 0.8, 0.85
MOST_STEP_TIME, MOST_WEIGHTS, MOST_CALIBRATION = 1.3, 0.1, 0.05


@dataclass(frozen=True)
class Rolled:
    """Rollouts next to their truth. What is not stated is NaN; an error that is not finite is infinite.

    errors, stated, band, difference (N, L, M): RMS error, the error stated at this time, that of whole trajectories,
    and the RMS difference of the second model (no fields without one). apart, apart_stated (N, L, Q). outside_at (N,):
    the step at which it doubts, 0 if it does not; far_at (N,): of the distance alone. distance (N,): the largest.
    warned (N,): by a range check.
    beyond (N,): how far out of the ranges. numbers (N, F): of what is given. parameters (N, P). size (N, M): RMS of the
    true fields. cells (N, L, C, *S): absolute residuals, where they are kept.
    """

    errors: Float64
    stated: Float64
    band: Float64
    apart: Float64
    apart_stated: Float64
    difference: Float64
    outside_at: Int64
    far_at: Int64
    distance: Float64
    warned: Bool
    beyond: Float64
    numbers: Float64
    parameters: Float64
    size: Float64
    cells: npt.NDArray[np.float32]

    @classmethod
    def joined(cls, batches: Iterable[Rolled]) -> Rolled:
        return cls(*(np.concatenate(parts) for parts in zip(*(vars(one).values() for one in batches), strict=True)))


def conformal(scores: npt.NDArray[Any], level: float = LEVEL) -> Float64:
    """(n, ...) -> (...): the k-th smallest, k = ceil((n + 1) level); infinite with too few."""
    rank = math.ceil((len(scores) + 1) * level - 1e-9)
    if rank > len(scores):
        return np.full(scores.shape[1:], np.inf)
    return np.asarray(np.partition(scores, rank - 1, axis=0)[rank - 1], np.float64)


def covered(rolled: Rolled) -> dict[str, Float64]:
    """Statement -> (N,): the share of it that holds for each trajectory."""
    return {
        "each time": (rolled.errors <= rolled.stated).mean((1, 2)),
        "whole trajectory": (rolled.errors <= rolled.band).all((1, 2)).astype(np.float64),
        "scalars": (rolled.apart <= rolled.apart_stated).mean((1, 2)),
    }


def in_thirds(values: Float64, low: float, high: float, scale: str, held: Mapping[str, Float64]) -> dict[str, Any]:
    """Statement -> coverage in each third of a parameter's range, which is cut as the parameter is drawn."""
    to = np.log if scale == "log" else np.asarray
    share = (to(values) - to(low)) / (to(high) - to(low))
    third = np.clip((3 * share).astype(int), 0, 2)
    return {
        name: [float(each[third == n].mean()) if (third == n).any() else 0.0 for n in range(3)]
        for name, each in held.items()
    }


def width_row(width: Float64, constant: Float64, errors: Float64, whole: bool = False) -> dict[str, float]:
    """A band (N or 1, L, M) next to one that is constant over trajectories (L, M): its geometric mean, and coverage.

    `equal`: both are first widened or narrowed by one factor for each field and lead (of whole trajectories: by one)
    with which they cover the same share of these very trajectories. Without that, chance in what a band covers would
    count as its width.
    """

    def factor(band: Float64) -> Float64:
        ratios = errors / np.maximum(band, 1e-300)
        ratios = ratios.max((1, 2)) if whole else ratios
        return np.asarray(np.partition(ratios, (rank := math.ceil(len(ratios) * LEVEL - 1e-9)) - 1, axis=0)[rank - 1])

    inside = errors <= width
    return {
        "coverage": float(inside.all((1, 2)).mean() if whole else inside.mean()),
        "width": _geometric_mean(width / constant),
        "equal": _geometric_mean(width / constant * factor(width) / factor(constant)),
    }


def width_rows(calibration: Rolled, test: Rolled, components: Sequence[int]) -> dict[str, dict[str, float]]:
    """Band -> coverage and width relative to the constant one. components: channels of each field."""
    constant = conformal(calibration.errors)
    whole = constant * conformal((calibration.errors / constant).max((1, 2)))
    rows = {
        OURS: width_row(test.stated, constant, test.errors),
        OURS_WHOLE: width_row(test.band, whole, test.errors, whole=True),
        "constant": width_row(constant[None], constant, test.errors),
        "constant, whole trajectory": width_row(whole[None], whole, test.errors, whole=True),
    }
    if test.difference.size:
        # Two models that agree to rounding say nothing: no scale below a thousandth of the usual one.
        usual = 1e-3 * np.median(calibration.difference, axis=0)
        scales = [np.maximum(rolled.difference, usual) for rolled in (calibration, test)]
        rows[SECOND] = width_row(scales[1] * conformal(calibration.errors / scales[0]), constant, test.errors)
    cell = conformal(calibration.cells)  # (L, C, *S)
    inside = test.cells <= cell
    squares = np.square(cell).reshape(*cell.shape[:2], -1).mean(2)
    field = np.sqrt(np.add.reduceat(squares, np.cumsum([0, *components[:-1]]), axis=1))
    per_cell = width_row(field[None], constant, test.errors)
    everywhere = inside.reshape(len(inside), -1).all(1)
    rows[PER_CELL] = per_cell | {"cells": float(inside.mean()), "whole field": float(everywhere.mean())}
    return rows


def first_flag(calibration: Float64, scores: Float64, alarm: float) -> Int64:
    """(n,) largest scores and (N, L) scores -> (N,): the first step that so few calibration trajectories reach, or 0.

    A conformal p-value of at most `alarm`, as that of the distance: equal false alarms for whatever is scored.
    """
    ranked = np.sort(calibration)[::-1]
    allowed = math.floor(alarm * (len(ranked) + 1) + 1e-9) - 1
    flagged = scores > ranked[max(allowed, 0)]
    return np.where(flagged.any(1), flagged.argmax(1) + 1, 0)


def differences(calibration: Rolled, rolled: Rolled) -> Float64:
    """(N, L): the largest difference of the second model over fields, in units of the usual one at that lead."""
    usual = np.maximum(np.median(calibration.difference, axis=0), 1e-300)
    leads = np.minimum(np.arange(rolled.difference.shape[1]), len(usual) - 1)
    return np.asarray((rolled.difference / usual[leads]).max(2))


def nearest(train: Float64, numbers: Float64) -> Float64:
    """(N, 1): the distance of what is given to that of the nearest train trajectory, numbers in train deviations."""
    scale = np.maximum(train.std(0), 1e-3)
    apart = [np.square((train - row) / scale).sum(1).min() for row in numbers]
    return np.sqrt(apart)[:, None]


def flags(calibration: Rolled, rolled: Rolled, train: Float64, alarm: float) -> dict[str, Int64]:
    """Detector -> (N,): the step at which each trajectory is flagged, 0 if it is not."""
    warned = rolled.warned.astype(np.int64)
    found = {
        DOUBT: rolled.outside_at,
        DISTANCE: rolled.far_at,
        AS_THEY_ARE: warned,
        RANGES: first_flag(calibration.beyond, rolled.beyond[:, None], alarm),
        NEAREST: first_flag(nearest(train, calibration.numbers)[:, 0], nearest(train, rolled.numbers), alarm),
    }
    if rolled.difference.size:
        limits = differences(calibration, calibration).max(1)
        found[SECOND] = first_flag(limits, differences(calibration, rolled), alarm)
    return found


def harm(rolled: Rolled, off: Float64) -> tuple[Int64, dict[str, int]]:
    """(N,): the first step at which a field is off by more than twice what is stated, 0 if none is.

    And how many are so at `late` steps only, or `unsure`: perhaps because the truth itself is off by this part (N,) of
    its size. Later steps than those calibrated have no statement. Only to tell harm, the last one is held against them.
    """
    known = np.flatnonzero(np.isfinite(rolled.stated).any((0, 2)))
    stated = rolled.stated[:, np.minimum(np.arange(rolled.stated.shape[1]), known.max(initial=0))]
    beyond = np.any(rolled.errors > HARMFUL * stated, axis=2)
    sure = np.any(rolled.errors - (off[:, None] * rolled.size)[:, None] > HARMFUL * stated, axis=(1, 2))
    harmful = beyond.any(1)
    at = np.where(harmful, beyond.argmax(1) + 1, 0)
    return at, {"late": int((at > known.max(initial=0) + 1).sum()), "unsure": int((harmful & ~sure).sum())}


def tally(rolled: Rolled, flagged: Mapping[str, Int64], off: Float64) -> dict[str, Any]:
    """Counts of one kind of shift. `answered`: steps before a doubt that have a statement; `inside`: of these."""
    at, why = harm(rolled, off)
    steps = np.arange(1, rolled.errors.shape[1] + 1)
    doubt = flagged[DOUBT][:, None]
    has = np.isfinite(rolled.stated).all(2)
    answered = has & ((doubt == 0) | (steps < doubt))
    inside = (rolled.errors <= rolled.stated).mean(2)
    bad = at > 0
    return {
        "samples": len(at),
        "harmful": int(bad.sum()),
        **why,
        "steps": int(has.sum()),
        "answered": int(answered.sum()),
        "inside": float(inside[answered].sum()),
        "flagged": {name: int((step[bad] > 0).sum()) for name, step in flagged.items()},
        "in_time": {name: int(((step > 0) & (step <= at) & bad).sum()) for name, step in flagged.items()},
        "flagged_others": {name: int((step[~bad] > 0).sum()) for name, step in flagged.items()},
        "points": points(rolled),
    }


def points(rolled: Rolled) -> list[list[float]]:
    """Of each trajectory its largest distance, and its largest error in units of what is stated at that time."""
    with np.errstate(all="ignore"):
        ratio = np.nanmax(np.where(np.isfinite(rolled.stated), rolled.errors / rolled.stated, np.nan), axis=(1, 2))
    pairs = np.stack([rolled.distance, ratio], axis=1).clip(-1e6, 1e6)
    return [[float(f"{x:.4g}") for x in pair] for pair in pairs]


def is_benign(kind: str) -> bool:
    return "benign" in kind


def shift_sums(documents: Sequence[Document], kinds: Iterable[str] | None = None) -> dict[str, Any]:
    """All counts of these kinds over all tasks; without kinds, of all that are not benign."""
    wanted = None if kinds is None else set(kinds)
    total: dict[str, Any] = {}
    for document in documents:
        for kind, counts in document["shifts"].items():
            if not is_benign(kind) if wanted is None else kind in wanted:
                _add(total, counts)
    return total


@dataclass(frozen=True)
class Bar:
    """What is asked, and what was found; nothing found is not enough."""

    name: str
    value: float
    low: float = -math.inf
    high: float = math.inf

    @property
    def passed(self) -> bool:
        return self.low <= self.value <= self.high

    def row(self) -> list[str]:
        if self.low == SOME:
            return [self.name, f"{self.value:.3g}", "> 0", "yes" if self.passed else "**no**"]
        ends = [f"{'>=' if n == 0 else '<='} {x:.3g}" for n, x in enumerate((self.low, self.high)) if math.isfinite(x)]
        return [self.name, f"{self.value:.3g}", " and ".join(ends), "yes" if self.passed else "**no**"]


def bars(documents: Sequence[Document], training_seconds: float) -> list[Bar]:
    """Everything that is asked. training_seconds: CPU time of the training, of these tasks."""
    found = [bar for statement in STATEMENTS for bar in _coverage_bars(documents, statement)]
    found.append(
        Bar(
            "width, at equal coverage",
            _geometric_mean([d["widths"][OURS]["equal"] for d in documents]),
            high=MOST_WIDTH,
        )
    )
    alarms = [d["alarms"][DOUBT] / d["trajectories"]["test"] for d in documents]
    number = sum(d["alarms"][DOUBT] for d in documents), sum(d["trajectories"]["test"] for d in documents)
    found.append(Bar("false alarms, all tasks", number[0] / number[1], high=POOLED_ALARMS))
    found.append(Bar("false alarms, worst task", max(alarms), high=TASK_ALARMS))
    sums = shift_sums(documents)
    share = _share(sums["flagged"][DOUBT], sums["harmful"])
    found.append(Bar("harmful shifts flagged", share, LEAST_FLAGGED))
    found.append(Bar("flagged in time", _share(sums["in_time"][DOUBT], sums["harmful"]), LEAST_IN_TIME))
    found.append(Bar("coverage before a doubt", _share(sums["inside"], sums["answered"]), LEAST_ANSWERED))
    for other in (RANGES, NEAREST, SECOND):
        if other in sums["flagged"]:
            more = share - _share(sums["flagged"][other], sums["harmful"])
            found.append(Bar(f"flagged more than by: {other}", more, SOME))
    found.append(
        Bar("time of a step, worst", max(x for d in documents for x in d["steps"].values()), high=MOST_STEP_TIME)
    )
    weights = sum(d["weights"]["error model"] for d in documents) / documents[0]["weights"]["network"]
    found.append(Bar("weights added", weights, high=MOST_WEIGHTS))
    seconds = sum(d["cpu_seconds"]["calibration"] for d in documents)
    found.append(Bar("CPU time of calibration, of training", seconds / training_seconds, high=MOST_CALIBRATION))
    return found


def _coverage_bars(documents: Sequence[Document], statement: str) -> list[Bar]:
    each = [d["coverage"][statement] for d in documents]
    found = [
        Bar(f"{statement}: coverage, mean", float(np.mean(each)), *MEAN_COVERAGE),
        Bar(f"{statement}: coverage, lowest task", min(each), *TASK_COVERAGE),
        Bar(f"{statement}: coverage, highest task", max(each), *TASK_COVERAGE),
    ]
    cells = np.array([x for d in documents for third in d["thirds"].values() for x in third[statement]])
    if cells.size:
        found.append(Bar(f"{statement}: thirds with {CELL:g}", float((cells >= CELL).mean()), SHARE_OF_CELLS))
        found.append(Bar(f"{statement}: lowest third", float(cells.min()), LEAST_CELL))
    return found


def page(documents: Sequence[Document], judged: Sequence[Bar]) -> str:
    """Markdown tables of everything."""
    parts = [_coverage_table(documents), _width_table(documents), _alarm_table(documents), _shift_table(documents)]
    parts += [_detector_table(documents), _cost_table(documents)]
    parts.append(_table(["bar", "found", "asked", "reached"], [bar.row() for bar in judged]))
    return "\n\n".join(parts)


def _coverage_table(documents: Sequence[Document]) -> str:
    rows = []
    for d in documents:
        rows.append([d["task"], *(f"{d['coverage'][s]:.3f}" for s in STATEMENTS)])
        for name, third in d["thirds"].items():
            cells = (", ".join(f"{x:.2f}" for x in third[s]) for s in STATEMENTS)
            rows.append([f"{d['task']}, thirds of {name}", *cells])
    rows.append(["mean of tasks", *(f"{np.mean([d['coverage'][s] for d in documents]):.3f}" for s in STATEMENTS)])
    return _table([f"coverage of {LEVEL:.0%}", *STATEMENTS], rows)


def _width_table(documents: Sequence[Document]) -> str:
    names = list(dict.fromkeys(name for d in documents for name in d["widths"]))
    rows = []
    for name in names:
        of = [(d["task"], d["widths"][name]) for d in documents if name in d["widths"]]
        mean = {
            k: float(np.mean([row[k] for _, row in of])) for k in ("coverage", "cells", "whole field") if k in of[0][1]
        }
        widths = {k: _geometric_mean([row[k] for _, row in of]) for k in ("width", "equal")}
        for task, row in [*of, ("all", mean | widths)]:
            extra = [f"{row[k]:.3f}" if k in row else "" for k in ("cells", "whole field")]
            rows.append([name, task, f"{row['coverage']:.3f}", f"{row['width']:.3f}", f"{row['equal']:.3f}", *extra])
    head = ["band", "task", "coverage", "width / constant", "at equal coverage", "cells inside", "whole fields inside"]
    return _table(head, rows)


def _alarm_table(documents: Sequence[Document]) -> str:
    names = list(documents[0]["alarms"])
    rows = [[d["task"], str(d["trajectories"]["test"]), *(str(d["alarms"][n]) for n in names)] for d in documents]
    total = sum(d["trajectories"]["test"] for d in documents)
    rows.append(["all", str(total), *(str(sum(d["alarms"][n] for d in documents)) for n in names)])
    return _table(["false alarms", "trajectories", *names], rows)


def _shift_table(documents: Sequence[Document]) -> str:
    kinds = dict.fromkeys(kind for d in documents for kind in d["shifts"])
    sums = {kind: shift_sums(documents, [kind]) for kind in kinds} | {"all but benign ones": shift_sums(documents)}
    sums |= {f"all but benign ones, {d['task']}": shift_sums([d]) for d in documents}
    rows = [[name, *_shift_cells(counts)] for name, counts in sums.items()]
    head = [
        "shift",
        "samples",
        "harmful",
        "after the calibrated steps",
        "perhaps by the truth's error",
        "harmful flagged",
        "in time",
    ]
    return _table([*head, "others flagged", "steps answered", "of these inside"], rows)


def _shift_cells(sums: Document) -> list[str]:
    harmful, others = sums["harmful"], sums["samples"] - sums["harmful"]
    pairs = ((sums["flagged"], harmful), (sums["in_time"], harmful), (sums["flagged_others"], others))
    shares = [_percent(counts[DOUBT], total) for counts, total in pairs]
    answered = [_percent(sums["answered"], sums["steps"]), _percent(sums["inside"], sums["answered"])]
    return [str(sums["samples"]), str(harmful), str(sums["late"]), str(sums["unsure"]), *shares, *answered]


def _detector_table(documents: Sequence[Document]) -> str:
    sums, rows = shift_sums(documents), []
    total = sum(d["trajectories"]["test"] for d in documents)
    for name in sums["flagged"]:
        alarms = sum(d["alarms"][name] for d in documents)
        others = _percent(sums["flagged_others"][name], sums["samples"] - sums["harmful"])
        shares = [_percent(sums[key][name], sums["harmful"]) for key in ("flagged", "in_time")]
        rows.append([name, f"{alarms} of {total}", *shares, others])
    return _table(["detector", "false alarms", "harmful flagged", "in time", "others flagged"], rows)


def _cost_table(documents: Sequence[Document]) -> str:
    timed = list(documents[0]["steps"])
    rows = [
        [
            d["task"],
            *(f"{d['steps'][name]:.2f}" for name in timed),
            f"{d['weights']['error model'] / d['weights']['network']:.2%}",
            f"{d['cpu_seconds']['scale']:.1f}",
            f"{d['cpu_seconds']['calibration']:.1f}",
        ]
        for d in documents
    ]
    head = [*(f"time of a step, {name}" for name in timed), "weights added", "CPU-seconds of the scale"]
    return _table(["task", *head, "CPU-seconds of calibration"], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _percent(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "-"


def _share(part: float, whole: float) -> float:
    return part / whole if whole else math.nan


def _geometric_mean(values: npt.ArrayLike) -> float:
    return float(np.exp(np.mean(np.log(np.asarray(values, np.float64)))))


def _add(total: dict[str, Any], counts: Document) -> None:
    for name, value in counts.items():
        if name == "points":
            continue
        if isinstance(value, Mapping):
            _add(total.setdefault(name, {}), value)
        else:
            total[name] = total.get(name, 0) + value
