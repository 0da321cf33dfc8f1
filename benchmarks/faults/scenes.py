"""Cells of the fault sweep that need a run of their own: what happens to a whole run, not to one attempt of it.

Each scene plants its fault in a real run and returns whether everything that the matrix asks of it held, with the words
of what did not. `benchmarks/faults/sweep.py` draws them next to its other cells.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.faults.doctor_data import write_data
from tests.support.faults.doctor_data import write_recipe as write_doctor_recipe
from tests.support.faults.planted import SILENT_BUGS, run_checks, write_assignment
from tests.support.faults.small_run import rank_is_at_step, weights
from tests.support.faults.supervised import Result, run, start, usual_port_taken

# Returns (rank that was hit or -1, the run, what did not hold).
Scene = Callable[[Path, Path, int, random.Random], tuple[int, Result, list[str]]]
LOOP = ("data", "forward", "backward", "optimizer")


def clean(folder: Path, recipe: Path, ranks: int, dice: random.Random) -> tuple[int, Result, list[str]]:
    """M13, M22: nothing is planted but a taken port, and nothing is reported."""
    with usual_port_taken():
        result = run(folder, ranks=ranks, recipe=recipe, timeout_seconds=300)
    return -1, result, _wrong(code=result.code == 0, silent=not result.failed_lines)


def silent_bug(folder: Path, recipe: Path, ranks: int, dice: random.Random) -> tuple[int, Result, list[str]]:
    """M14: a bug with which training would run to its end is refused by its check of the doctor, in useful words."""
    plant = dice.choice(sorted(SILENT_BUGS))
    module, check, *words = SILENT_BUGS[plant]
    folder.mkdir()
    write_data(folder)
    write_doctor_recipe(folder)
    write_assignment(folder, folder / "recipe.yaml")
    healthy = all(verdict.ok for before in ("data", "model") for verdict in run_checks(before, folder))
    last = run_checks(module, folder, plant)[-1]
    held = _wrong(
        healthy=healthy, refused=(last.check, last.ok) == (check, False), words=all(word in last.says for word in words)
    )
    return -1, Result(folder, 0, "", 0.0, []), [f"{plant}: {word}" for word in held]


def nan(folder: Path, recipe: Path, ranks: int, dice: random.Random) -> tuple[int, Result, list[str]]:
    """M9: a loss that is not a number on one rank is a skipped step on all of them, and no fault."""
    rank, step = dice.randrange(ranks), dice.randint(2, 12)
    result = run(folder, _plant("nan", rank, step, "forward"), ranks=ranks, recipe=recipe, timeout_seconds=300)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    skipped = [row["skipped"] for row in rows if "skipped" in row]
    return (
        rank,
        result,
        _wrong(
            code=result.code == 0, silent=not result.failed_lines, skipped=skipped[-1:] == [1] if skipped else False
        ),
    )


def sigterm(folder: Path, recipe: Path, ranks: int, dice: random.Random) -> tuple[int, Result, list[str]]:
    """M10: SIGTERM to the supervisor or to any rank is a request to save and leave; no step is lost."""
    rank = dice.choice((-1, *range(ranks)))
    started = start(folder, ranks=ranks, steps=100_000, interval=50_000, workers=1)
    started.wait_for(lambda: rank_is_at_step(folder, dice.randint(5, 40)), 120)
    os.kill(started.process.pid if rank < 0 else started.rank_pid(rank), signal.SIGTERM)
    result = started.finish(60)
    return (
        rank,
        result,
        _wrong(code=result.code == 143, silent=not result.failed_lines, nothing_lost=" lost=0" in result.verdict),
    )


def unproven(folder: Path, recipe: Path, ranks: int, dice: random.Random) -> tuple[int, Result, list[str]]:
    """M4, M11: the last checkpoint is damaged before the end; exit codes of 0 do not make it a success."""
    result = run(folder, _plant("damage", 0, 20, "teardown"), ranks=ranks, timeout_seconds=300)
    return (
        0,
        result,
        _wrong(code=result.code == 6, cause=[f["cause"] for f in result.faults] == ["unproven(final_checkpoint)"]),
    )


def late_files(folder: Path, recipe: Path, ranks: int, dice: random.Random) -> tuple[int, Result, list[str]]:
    """M16: all ranks but the first see files seconds late; a kill in between."""
    rank = dice.randrange(ranks)
    result = run(
        folder,
        _plant("kill", rank, dice.randint(11, 14), dice.choice(LOOP), signal="SIGKILL"),
        ranks=ranks,
        restarts=1,
        recipe=recipe,
        late_seconds=dice.choice((1, 3, 5)),
        timeout_seconds=400,
    )
    reported = [(f["rank"], f["cause"]) for f in result.faults]
    return rank, result, _wrong(code=result.code == 0, reported=reported == [(rank, "killed(SIGKILL)")])


def killed_anywhere(folder: Path, recipe: Path, ranks: int, dice: random.Random) -> tuple[int, Result, list[str]]:
    """M19: a run that was killed at a drawn place ends with the bytes of one that was not."""
    rank = dice.randrange(ranks)
    planted = _plant("kill", rank, dice.randint(1, 19), dice.choice(LOOP), signal="SIGKILL")
    result = run(folder, planted, ranks=ranks, restarts=1, recipe=recipe, timeout_seconds=300)
    whole = run(folder.with_name(f"{folder.name}_whole"), ranks=ranks, recipe=recipe, timeout_seconds=300)
    reported = [(f["rank"], f["cause"]) for f in result.faults]
    return (
        rank,
        result,
        _wrong(
            code=result.code == 0,
            reported=reported == [(rank, "killed(SIGKILL)")],
            bytes=weights(result) == weights(whole),
        ),
    )


def crash_loop(folder: Path, recipe: Path, ranks: int, dice: random.Random) -> tuple[int, Result, list[str]]:
    """M20: the same crash at the same step stops the run at the third time."""
    rank = dice.randrange(ranks)
    again = _plant("exception", rank, dice.randint(1, 4), dice.choice(LOOP))
    result = run(folder, again, again, again, again, ranks=ranks, restarts=50, timeout_seconds=400)
    stopped = [f["action"] for f in result.faults][-1:] == ["stop(same_fault_3_times)"]
    return rank, result, _wrong(code=result.code == 6, three=len(result.faults) == 3, stopped=stopped)


# name -> (rows of the matrix, scene)
SCENES: dict[str, tuple[str, Scene]] = {
    "clean run": ("M13, M22", clean),
    "silent bug": ("M14", silent_bug),
    "nan": ("M9", nan),
    "sigterm": ("M10", sigterm),
    "damage at the end": ("M4, M11", unproven),
    "late files": ("M16", late_files),
    "killed anywhere": ("M19", killed_anywhere),
    "crash loop": ("M20", crash_loop),
}


def _plant(kind: str, rank: int, step: int, phase: str, **more: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "step": step, "phase": phase, **more}


def _wrong(**held: bool) -> list[str]:
    return [name for name, good in held.items() if not good]
