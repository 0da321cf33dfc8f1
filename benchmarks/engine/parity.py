"""The same global batch gives the same weights, whoever computes it; and a killed run resumes bitwise. The full sweep.

    python benchmarks/engine/parity.py             a few arrangements, one kind of arithmetic
    python benchmarks/engine/parity.py --full      every arrangement, arithmetic and optimizer; ten kills per strategy

Prints a table and, as last line, one JSON object. Exit code 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from ups.testing.ranks import Launched, launch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support.mixture import write_mixture
from tests.support.parity import LIMITS, Arrangement, distance, global_windows, run_variants
from tests.support.toy_training import train

STEPS = 20
REFERENCE = Arrangement(1, "single", 1)


def arrangements(full: bool) -> list[Arrangement]:
    """Ranks x strategy x accumulation; one window per micro-batch is the smallest cut."""
    if not full:
        return [Arrangement(2, "ddp", 2), Arrangement(2, "fsdp", 1)]
    found = [Arrangement(1, "single", n) for n in (2, 4, 8)]
    found += [Arrangement(2, "ddp", n) for n in (1, 2, 4)]
    found += [Arrangement(4, "ddp", n) for n in (1, 2)]
    found += [Arrangement(2, "fsdp", n) for n in (1, 2, 4)]
    return found + [Arrangement(4, "fsdp", n) for n in (1, 2)]


def parity(full: bool) -> tuple[list[dict[str, Any]], bool]:
    """One row per arrangement and kind: distance to one rank with one micro-batch, and the bar."""
    kinds = list(LIMITS) if full else [("float64", "adamw"), ("float32", "adamw")]
    rows, good = [], True
    with tempfile.TemporaryDirectory(prefix="ups-parity-") as name:
        folder = Path(name)
        tasks = write_mixture(folder)

        def run(arrangement: Arrangement) -> list[Any]:
            variants = [
                {"precision": p, "optimizer": o, "micro_batch_size": arrangement.micro_batch_size} for p, o in kinds
            ]
            label = f"{arrangement.strategy}_{arrangement.ranks}_{arrangement.accumulation}"
            common = {"tasks": tasks, "folder": name, "strategy": arrangement.strategy, "steps": STEPS}
            arguments = common | {"label": label, "variants": variants}
            return launch(run_variants, arrangement.ranks, deadline=900, arguments=arguments)

        reference = run(REFERENCE)
        for arrangement in arrangements(full):
            results = run(arrangement)
            for number, kind in enumerate(kinds):
                same = global_windows(results, number, STEPS) == global_windows(reference, number, STEPS)
                apart = distance(reference[0][number]["weights"], results[0][number]["weights"])
                good &= same and apart <= LIMITS[kind]
                row = {
                    "ranks": arrangement.ranks,
                    "strategy": arrangement.strategy,
                    "accumulation": arrangement.accumulation,
                    "precision": kind[0],
                    "optimizer": kind[1],
                    "same_windows": same,
                    "distance": apart,
                    "moved": reference[0][number]["moved"],
                    "limit": LIMITS[kind],
                }
                rows.append(row)
                print(
                    f"{row['ranks']} {row['strategy']:6} x{row['accumulation']}  {kind[0]} {kind[1]:5}  "
                    f"windows {'equal' if same else 'DIFFER'}  distance {apart:.1e} (bar {LIMITS[kind]:.0e}, "
                    f"weights moved by {row['moved']:.2f})",
                    flush=True,
                )
    return rows, good


def resume(full: bool) -> tuple[list[dict[str, Any]], bool]:
    """kill -9 after random steps, resume, compare hashes of weights, optimizer and average, and the windows."""
    kills = 10 if full else 2
    rows, good = [], True
    for strategy, ranks in (("single", 1), ("ddp", 2), ("ddp", 4), ("fsdp", 2), ("fsdp", 4)):
        draw = random.Random(f"{strategy} {ranks}")
        base = {"strategy": strategy, "steps": 24, "batch_size": 8, "interval": 3}
        with tempfile.TemporaryDirectory(prefix="ups-resume-") as name:
            whole = launch(train, ranks, deadline=300, arguments=base | {"run_dir": f"{name}/whole"})
            equal = 0
            for number in range(kills):
                step, victim, run_dir = draw.randrange(1, 24), draw.randrange(ranks), f"{name}/{number}"
                broken = base | {"run_dir": run_dir, "kill_at": step, "kill_rank": victim}
                with Launched(train, ranks, broken) as launched:
                    launched.processes[victim].join(120)
                    if launched.processes[victim].exitcode != -9:
                        raise SystemExit(launched.logs())
                resumed = launch(train, ranks, deadline=300, arguments=base | {"run_dir": run_dir})
                start = resumed[0]["resumed"]
                same_state = [r["hash"] for r in resumed] == [r["hash"] for r in whole]
                same_order = all(
                    a["windows"] == [w for w in b["windows"] if w[0] >= start]
                    for a, b in zip(resumed, whole, strict=True)
                )
                equal += same_state and same_order
        good &= equal == kills
        rows.append({"strategy": strategy, "ranks": ranks, "kills": kills, "bitwise_equal": equal})
        print(f"{ranks} {strategy:6}  {equal} of {kills} kills resumed bitwise", flush=True)
    return rows, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="every combination (about ten minutes on two cores)")
    full = parser.parse_args().full
    started = time.monotonic()
    parity_rows, parity_good = parity(full)
    resume_rows, resume_good = resume(full)
    result = {
        "benchmark": "parity",
        "full": full,
        "parity": parity_rows,
        "resume": resume_rows,
        "seconds": round(time.monotonic() - started, 1),
        "passed": parity_good and resume_good,
    }
    print(json.dumps(result))
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
