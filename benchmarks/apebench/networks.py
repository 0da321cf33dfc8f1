"""APEBench's own networks of similar size, trained by its own program on the same scenarios: rows to compare with.

Runs in the environment of `generate.py`, as that does:

    /tmp/apeenv/bin/python -m benchmarks.apebench.networks --scenario fisher --out apebench

A row is OUT/networks/NETWORK-SCENARIO-SEED.json. What is finished is not repeated, and a seed gives the same row again.
With a published row of the same network and seed it also shows whether that was made with these coefficients.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.apebench.generate import build, check_version, coefficients_of, versions
from benchmarks.apebench.metric import score
from benchmarks.apebench.scenarios import NETWORKS, SCENARIOS, SCORED_STEPS, UPDATES


def train(network: str, scenario: str, seed: int) -> dict[str, Any]:
    """One training by APEBench: its network, trainer, test and metric."""
    import jax

    settings, _ = NETWORKS[network]
    found = build(SCENARIOS[scenario])
    started = time.process_time()
    # Not `scenario()`: a table of all it knows is built there, by a pandas that may be too new for it.
    _, _, _, metrics, _, _ = found.run_raw(
        task_config="predict", network_config=settings, train_config="one", start_seed=seed, num_seeds=1
    )
    errors = np.asarray(jax.device_get(metrics["mean_nRMSE"]), np.float64).reshape(-1)[:SCORED_STEPS]
    total = score(errors)
    return {
        "model": network,
        "network": settings,
        "scenario": scenario,
        "seed": seed,
        "coefficients": coefficients_of(found),
        "parameters": int(found.get_parameter_count(settings)),
        "updates": UPDATES,
        "score": total if np.isfinite(total) else None,
        "errors": [float(e) if np.isfinite(e) else None for e in errors],
        "cpu_seconds": time.process_time() - started,
        "versions": versions(),
    }


def main() -> None:
    """Train what is asked for and not there, every scenario with one seed first."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, default=Path("apebench"), help="directory of the trainings")
    options.add_argument("--network", action="append", choices=list(NETWORKS), help="may be repeated [default: all]")
    options.add_argument("--scenario", action="append", choices=list(SCENARIOS), help="may be repeated [default: all]")
    options.add_argument("--seed", action="append", type=int, help="may be repeated [default: 0]")
    chosen = options.parse_args()
    check_version()
    folder = chosen.out / "networks"
    folder.mkdir(parents=True, exist_ok=True)
    for seed in chosen.seed or [0]:
        for scenario in chosen.scenario or SCENARIOS:
            for network in chosen.network or NETWORKS:
                path = folder / f"{network}-{scenario}-{seed}.json"
                if path.is_file():
                    continue
                row = train(network, scenario, seed)
                temporary = path.with_suffix(".tmp")
                temporary.write_text(json.dumps(row, indent=1) + "\n")
                temporary.replace(path)
                print(f"{path}: {row['score']}, {row['cpu_seconds']:.0f} CPU-seconds", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
