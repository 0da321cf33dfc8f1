"""`ups doctor RECIPE --compare-python PATH`: the same few steps with another Python environment, number by number.

What counts as rounding is measured, not assumed: the same steps in a wider precision, in this environment, show how far
rounding alone moves each number. A number that two environments have further apart than ten times that, and than 100
units in the last place, is a difference. No torch.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

from ups.doctor.examine import Verdict
from ups.doctor.trials import NUMBERS_NAME, TRIAL_SECONDS, Kind, TrialOutcome, Trials, Variant, engine
from ups.errors import MachineError

# A quantity that is no number.
DATA_READ = "the data that was read"
_ASK_SECONDS = 120.0
_MANY_TIMES = 10.0
# Of a gradient tensor: what is smaller than this part of the whole gradient does not count.
_SMALL = 1e-3
_EPSILON = {"bfloat16": 2**-8, "float32": 2**-23, "float64": 2**-52}
_WIDER = {"bfloat16": "float32", "float32": "float64", "float64": "float32"}
_ASK = """
import importlib.metadata, importlib.util, json, platform
def version(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
versions = {name: version(name) for name in ("torch", "numpy", "zarr", "h5py", "safetensors", "pydantic")}
# Packages with parts of ours: models, stages, readers.
for package in importlib.metadata.distributions():
    if any(point.group.startswith("ups.") for point in package.entry_points) and package.name != "universal-simulator":
        versions[package.name] = package.version
spec = importlib.util.find_spec("ups")
versions["python"] = platform.python_version()
versions["ups"] = None if spec is None else version("universal-simulator") or "a checkout"
versions["ups_path"] = None if spec is None else spec.origin
print(json.dumps(versions))
"""


def versions_of(python: str) -> dict[str, Any]:
    """Versions in the environment of a Python. Raises MachineError if it is none, or if ups is not installed there."""
    try:
        safe = {**os.environ, "PYTHONSAFEPATH": "1"}  # not -P: one that is too old to know it is to be named as that
        done = subprocess.run([python, "-c", _ASK], capture_output=True, text=True, timeout=_ASK_SECONDS, env=safe)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise MachineError(
            f"{python} cannot be run: {error}", hint="name the Python of the other environment, such as VENV/bin/python"
        ) from None
    try:
        versions: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise MachineError(f"{python} does not answer as a Python does: {last[:300]}") from None
    if versions["ups"] is None:
        raise MachineError(
            f"ups is not installed in the environment of {python} (Python {versions['python']})",
            hint=f"install the same ups there: {python} -m pip install and the path of your checkout",
        )
    if versions["torch"] is None:
        raise MachineError(f"torch is not installed in the environment of {python}", hint="install it there")
    return versions


@dataclass
class Comparison:
    """Numbers of both environments, and the first that differs beyond rounding.

    failed: the trial that ended without numbers, if one did, with where it ran.
    """

    here: dict[str, Any]
    there: dict[str, Any]
    outcomes: list[TrialOutcome] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    first: dict[str, Any] | None = None
    failed: tuple[str, Verdict] | None = None

    @property
    def ok(self) -> bool:
        return self.first is None and self.failed is None


def compare(trials: Trials, variant: Variant, python: str, seconds: float = TRIAL_SECONDS) -> Comparison:
    """Run the same steps here and there."""
    comparison = Comparison(versions_of(sys.executable), versions_of(python))
    precision = variant.recipe.engine.precision
    wider = _WIDER[precision]
    wide = engine(variant, precision=wider, float32_fraction=0.0)
    assert wide is not None  # a precision of the schema in a recipe that was valid
    numbers: list[list[dict[str, Any]]] = []
    plan: tuple[tuple[str, Kind, Variant, str | None], ...] = (
        ("this environment: data", "opened", variant, None),
        ("this environment", "rehearsal", variant, None),
        ("the other environment", "rehearsal", variant, python),
        (f"this environment in {wider}, to measure rounding", "rehearsal", wide, None),
    )
    for label, kind, what, which in plan:
        outcome = trials.run(kind, what, label, seconds, which)
        comparison.outcomes.append(outcome)
        if outcome.failed is not None:
            comparison.failed = (label, outcome.failed)
            return comparison
        if kind == "rehearsal":
            numbers.append(json.loads((outcome.folder / NUMBERS_NAME).read_text()))
    # A narrower precision shows rounding that is larger by the ratio of both.
    scale = _EPSILON[precision] / _EPSILON[wider] if wider == "float32" and precision == "float64" else 1.0
    comparison.rows, comparison.first = differences(numbers[0], numbers[1], numbers[2], _EPSILON[precision], scale)
    return comparison


def differences(
    here: list[dict[str, Any]],
    there: list[dict[str, Any]],
    wide: list[dict[str, Any]],
    epsilon: float,
    scale: float = 1.0,
) -> tuple[list[dict[str, Any]], dict[str, Any] | None]:
    """Step by step: (rows of loss and gradient norm, the first difference beyond rounding or None)."""
    rows: list[dict[str, Any]] = []
    differing: list[dict[str, Any]] = []
    noise: dict[str, float] = {}

    def compared(name: str, ours: float, theirs: float, wider: float, size: float) -> dict[str, Any]:
        # Rounding grows from step to step: what was seen once stays possible.
        noise[name] = max(noise.get(name, 0.0), scale * _apart(ours, wider, size))
        allowed = _MANY_TIMES * max(noise[name], 10 * epsilon)
        return {"here": ours, "there": theirs, "apart": _apart(ours, theirs, size), "rounding": allowed}

    for ours, theirs, wider in zip(here, there, wide, strict=False):
        at = {"stage": ours["stage"], "step": ours["step"]}
        row: dict[str, Any] = dict(at)
        if ours["batch"] != theirs["batch"]:
            differing.append({**at, "quantity": DATA_READ, "here": ours["batch"], "there": theirs["batch"]})
        for name in ("loss", "gradient_norm"):
            row[name] = compared(name, ours[name], theirs[name], wider[name], abs(wider[name]))
            if row[name]["apart"] > row[name]["rounding"]:
                differing.append({**at, "quantity": name.replace("_", " "), **row[name]})
        floor, worst = _SMALL * wider["gradient_norm"], 1.0
        mine, others, wides = (numbers["gradients"] for numbers in (ours, theirs, wider))
        for name in sorted(mine.keys() & others.keys() & wides.keys()):
            size = max(abs(wides[name]), floor)
            change = compared(f"gradient of {name}", mine[name], others[name], wides[name], size)
            if change["apart"] > worst * change["rounding"]:
                row["tensor"], worst = name, change["apart"] / change["rounding"]
        if "tensor" in row and not differing:
            values = {"here": mine[row["tensor"]], "there": others[row["tensor"]]}
            differing.append({**at, "quantity": f"gradient norm of {row['tensor']}", **values})
        elif "tensor" in row and at.items() <= differing[0].items():
            differing[0]["tensor"] = row["tensor"]
        rows.append(row)
    if len(here) != len(there):
        lengths = {"here": len(here), "there": len(there)}
        differing.append({"stage": 0, "step": len(rows) + 1, "quantity": "the number of steps", **lengths})
    return rows, differing[0] if differing else None


def _apart(a: float, b: float, size: float) -> float:
    return 0.0 if a == b else abs(a - b) / size if size else float("inf")


def to_json(comparison: Comparison) -> dict[str, Any]:
    """The object of `--json`."""
    failed = None if comparison.failed is None else {"where": comparison.failed[0], **comparison.failed[1].to_json()}
    return {
        "ok": comparison.ok,
        "here": comparison.here,
        "there": comparison.there,
        "first_difference": comparison.first,
        "failed": failed,
        "steps": comparison.rows,
        "trials": [outcome.to_json() for outcome in comparison.outcomes],
    }
