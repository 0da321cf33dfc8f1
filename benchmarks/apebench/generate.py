"""The data of APEBench's scenarios, as its own program makes them from its fixed seeds: OUT/SCENARIO.npz.

APEBench pins an exponax that the extra `generate` of ups cannot use, so this runs in an environment of its own:

    python3 -m venv /tmp/apeenv && /tmp/apeenv/bin/pip install apebench==0.1.1
    /tmp/apeenv/bin/python -m benchmarks.apebench.generate --out apebench/data

in a checkout, where it needs nothing of ups. Arrays are (trajectory, frame, channel, x) in float32: `train` and `test`
are the ones that published rows were trained and scored on; `valid` is drawn as `test` is, with another seed. `meta`
holds what was asked for, what came out, and the versions, as JSON. What is there is left as it is.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.apebench.scenarios import (
    APEBENCH,
    BATCH,
    COEFFICIENTS,
    OPTIMIZER,
    SCENARIOS,
    VALID_FRAMES,
    VALID_SEED,
    VALID_TRAJECTORIES,
    Scenario,
    same_coefficients,
)

# Of which the numbers may depend.
_PACKAGES = ("apebench", "exponax", "jax", "jaxlib", "pdequinox", "trainax", "equinox", "optax")


def build(scenario: Scenario, **changes: Any) -> Any:
    """The scenario of APEBench, checked to be the one that is described here."""
    from apebench.scenarios import scenario_dict

    found = scenario_dict[scenario.key](**scenario.kwargs, **changes)
    given = coefficients_of(found)
    if not same_coefficients(given, scenario.coefficients):
        sys.exit(
            f"{scenario.key} has other coefficients: expected {dict(scenario.coefficients)}, got {given}; "
            f"install apebench=={APEBENCH}"
        )
    for name, expected in (("optim_config", OPTIMIZER), ("batch_size", BATCH)):
        if name not in changes and getattr(found, name) != expected:
            sys.exit(f"{scenario.key} has {name} {getattr(found, name)}, not {expected}: install apebench=={APEBENCH}")
    return found


def coefficients_of(found: Any) -> dict[str, Any]:
    """What says which equation a scenario of APEBench is."""
    values = {name: getattr(found, name) for name in COEFFICIENTS if hasattr(found, name)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


def check_version() -> None:
    """Ends the program if another APEBench is installed: its data may be others."""
    version = importlib.metadata.version("apebench")
    if version != APEBENCH:
        sys.exit(f"apebench {version} is installed, and rows are of {APEBENCH}: install apebench=={APEBENCH}")


def versions() -> dict[str, str]:
    """What the numbers may depend on."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def write(scenario: Scenario, path: Path) -> str:
    """Generate one scenario; returns a line about it."""
    started = time.process_time()
    found = build(scenario)
    other = build(
        scenario,
        test_seed=VALID_SEED,
        num_test_samples=VALID_TRAJECTORIES,
        test_temporal_horizon=VALID_FRAMES - 1,
    )
    arrays = {
        "train": np.asarray(found.get_train_data(), np.float32),
        "valid": np.asarray(other.get_test_data(), np.float32),
        "test": np.asarray(found.get_test_data(), np.float32),
    }
    for split, values in arrays.items():
        if not np.isfinite(values).all():
            sys.exit(f"{scenario.key}: {split} has values that are not finite; use another version of jax")
    meta = {
        "scenario": scenario.key,
        "kwargs": dict(scenario.kwargs),
        "coefficients": coefficients_of(found),
        "name": found.get_scenario_name(),
        "seeds": {"train": found.train_seed, "valid": VALID_SEED, "test": found.test_seed},
        "warmup_steps": found.num_warmup_steps,
        "initial_conditions": found.ic_config,
        "optimizer": found.optim_config,
        "batch_size": found.batch_size,
        "versions": versions(),
    }
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, meta=json.dumps(meta), **arrays)  # type: ignore[arg-type]
    temporary.replace(path)
    shapes = ", ".join(f"{split} {values.shape}" for split, values in arrays.items())
    return f"{path}: {shapes}, {time.process_time() - started:.0f} CPU-seconds"


def main() -> None:
    """Generate what is asked for and not there."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("apebench/data"), help="directory of the .npz files")
    options.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="may be repeated [default: all]")
    chosen = options.parse_args()
    check_version()
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in chosen.scenario or SCENARIOS:
        path = chosen.out / f"{name}.npz"
        print(f"{path} is there" if path.is_file() else write(SCENARIOS[name], path), flush=True)


if __name__ == "__main__":
    # Another number of threads may add up in another order, and the data of chaotic scenarios follow every bit.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
