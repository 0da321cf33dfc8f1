"""Runs one check program of the doctor in forked ranks, with or without a planted bug: seconds instead of a cold start.

The probe itself, its output and the judgment of it are the real ones; only the way its processes start is shorter.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.checkout import path_with
from tests.support.faults.plants.at_check import VARIABLE, plant_at_check
from ups.doctor.checks import CHECK_PROGRAMS, CheckProgram
from ups.doctor.examine import Examination, Processes, Verdict, judge
from ups.testing.ranks import Launched

PLANTS = Path(__file__).with_name("plants")


def planted(plant: str, folder: Path = PLANTS) -> dict[str, str]:
    """Variables by which every probe of the doctor plants a fault, a file of the folder; '' is none."""
    return {VARIABLE: plant, **path_with(folder, PLANTS)} if plant else {}


def run_probe(arguments: dict[str, Any]) -> None:
    """What a rank does: the main function of a probe."""
    if arguments["plant"]:
        sys.path.insert(0, str(PLANTS))
        plant_at_check(arguments["plant"])
    if not arguments["ranks"]:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    sys.argv = ["probe", arguments["module"], arguments["work_dir"]]
    from ups.doctor.probes.__main__ import main  # after the plant has changed `begin_check`

    main()


def run_checks(module: str, work_dir: Path, plant: str = "", ranks: int = 2) -> list[Verdict]:
    """The verdicts of one check program."""
    program = next(program for program in CHECK_PROGRAMS if program.module == module)
    examination = Examination(ranks, work_dir / "run", environment=planted(plant))
    return list(judge(program, run_forked(program, examination, work_dir), 0.0))


def run_forked(program: CheckProgram, examination: Examination, work_dir: Path) -> Processes:
    """`ups.doctor.examine.run_program` with processes that are forked from one that has imported torch."""
    count = examination.ranks if program.ranks else 1
    plant = examination.environment.get(VARIABLE, "")
    arguments = {"module": program.module, "work_dir": str(work_dir), "plant": plant, "ranks": program.ranks}
    before: set[int] = set()
    with Launched(run_probe, count, arguments) as launched:
        deadline, settled = time.monotonic() + min(program.seconds, 200.0), float("inf")
        while len(before) < count and time.monotonic() < min(deadline, settled):
            before = {rank for rank, process in enumerate(launched.processes) if process.exitcode is not None}
            if settled == float("inf") and any(launched.processes[rank].exitcode for rank in before):
                settled = time.monotonic() + 2.0
            time.sleep(0.05)
        for process in launched.processes:
            process.kill()
            process.join(10)
        codes = [process.exitcode for process in launched.processes]
        texts = {rank: (launched.folder / f"rank_{rank}.log").read_text() for rank in range(count)}
    exits = {
        rank: {"code": code, "time_monotonic_ns": 2**62, "ended_by_us": rank not in before}
        for rank, code in enumerate(codes)
    }
    timed_out = len(before) < count and settled == float("inf")
    return Processes(texts, texts, exits, timed_out, work_dir)


def write_assignment(work_dir: Path, recipe: Path, ranks: int = 2) -> None:
    """What the doctor writes for its probes."""
    document = {
        "recipe": str(recipe),
        "run_dir": str(work_dir / "run"),
        "ranks": ranks,
    }
    (work_dir / "assignment.json").write_text(json.dumps(document))


# plant -> program, check that must fail, what its words must hold
SILENT_BUGS = {
    "unused_parameter": ("model", "backward", "no gradient", "stepper.networks.operator.forgotten"),
    "same_data": ("samples", "samples", "all 2 ranks read the same windows"),
    "same_order": ("samples", "samples", "same order in every pass"),
    "cloned_noise": ("samples", "samples", "ranks 0 and 1 draw the same random numbers"),
    "bypassed_ddp": ("parity", "parity", "different gradients"),
    "unscaled_accumulation": ("parity", "parity", "is 2 times", "micro-batches of a rank in a block"),
    "scaled_learning_rate": ("parity", "parity", "learning rates of 2 ranks"),
    "scaled_batch": ("samples", "samples", "16 windows", "batch_size is 8"),
    "padded_scores": ("parity", "evaluation", "5 trajectories to score, and 6 were", "[0] twice"),
    "unreduced_scores": ("parity", "evaluation", "valid/wave/one_step", "on one rank"),
    "local_batch_norm": ("parity", "equal", "different buffers", "stepper.norm.running_mean"),
    "forked_handle": ("data", "loader", "a worker read other 'state'"),
}
