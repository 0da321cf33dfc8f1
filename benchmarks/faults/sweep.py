"""A sweep of planted faults: `python benchmarks/faults/sweep.py --minutes 90` (bars at the end; exit code 1 below one).

Cells are drawn at random from rank {first, second, last} x phase x {2, 4} ranks x fault x {toy, real} ranks. Several
cells share a run: attempt after attempt meets the next fault, and the run must still complete, with the bytes of a run
that met none. What concerns a whole run (a request to leave, a crash loop, a clean run) is a scene of its own. The seed
is printed; results are appended to a file, and a second call goes on where the first stopped.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from benchmarks.faults.scenes import SCENES
from tests.support.checkout import ROOT
from tests.support.faults.small_run import weights, write_recipe
from tests.support.faults.supervised import Result, run
from tests.support.mixture import write_mixture
from ups.supervise.standstill import Deadlines

STEPS, INTERVAL, CELLS_PER_RUN = 40, 5, 8
LOOP = ("data", "forward", "backward", "sync", "optimizer")
PHASES = ("init", *LOOP, "save", "evaluate", "teardown")
# kind -> (what the injector needs, the cause that must be reported, phases in which it makes sense)
FAULTS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "exception": ({"kind": "exception"}, "exception(FileNotFoundError)", PHASES),
    "sigkill": ({"kind": "kill", "signal": "SIGKILL"}, "killed(SIGKILL)", PHASES),
    "sigsegv": ({"kind": "crash", "signal": "SIGSEGV"}, "signal(SIGSEGV)", PHASES),
    "sigabrt": ({"kind": "crash", "signal": "SIGABRT"}, "signal(SIGABRT)", PHASES),
    "sigbus": ({"kind": "crash", "signal": "SIGBUS"}, "signal(SIGBUS)", PHASES),
    "os_exit_0": ({"kind": "os_exit"}, "early_exit(0)", (*LOOP, "init", "save", "evaluate")),
    "os_exit_3": ({"kind": "os_exit", "code": 3}, "exit(3)", PHASES),
    "sys_exit_0": ({"kind": "sys_exit"}, "early_exit(0)", (*LOOP, "save", "evaluate")),
    "sigstop": ({"kind": "kill", "signal": "SIGSTOP"}, "stopped(SIGSTOP)", (*LOOP, "save", "evaluate")),
    "interpreter_lock": ({"kind": "hold_the_lock"}, "stalled", LOOP),
    "stalled": ({"kind": "sleep", "seconds": 3600}, "stalled", LOOP),
    "out_of_memory": ({"kind": "out_of_memory", "fits": 0}, "out_of_memory", ("forward", "backward", "optimizer")),
    "stopped_worker": ({"kind": "stop_worker"}, "stopped(SIGSTOP)", ("data",)),
    "skipped_collective": ({"kind": "skip_collective"}, "collective_mismatch", ("backward",)),
    "wrong_shape": ({"kind": "wrong_shape"}, "collective_mismatch", ("forward",)),
    "worker_killed": ({"kind": "kill_worker"}, "worker_killed(SIGKILL)", ("data",)),
    "loader_ended": ({"kind": "end_of_data"}, "data", ("data",)),
    "damaged_checkpoint": ({"kind": "damage", "signal": "SIGKILL"}, "killed(SIGKILL)", LOOP),
    "wrapper_killed": ({"kind": "kill_wrapper"}, "killed(SIGKILL)", LOOP),
    "wedged_teardown": ({"kind": "sleep", "seconds": 3600}, "deadline(teardown)", ("teardown",)),
    "slow_save": ({"kind": "sleep", "seconds": 15}, "", ("save",)),
    "straggler": ({"kind": "sleep", "seconds": 12}, "", LOOP),
}
# fault -> row of the matrix in docs/fault-matrix.md
ROWS = {
    **dict.fromkeys(("exception",), "M1"),
    **dict.fromkeys(("sigkill",), "M2"),
    **dict.fromkeys(("sigsegv", "sigabrt", "sigbus"), "M3"),
    **dict.fromkeys(("os_exit_0", "os_exit_3", "sys_exit_0"), "M4"),
    **dict.fromkeys(("sigstop", "stopped_worker", "stalled"), "M5"),
    "interpreter_lock": "M6",
    **dict.fromkeys(("skipped_collective", "wrong_shape"), "M7"),
    "loader_ended": "M8",
    "out_of_memory": "M9b",
    "damaged_checkpoint": "M11",
    "worker_killed": "M12",
    **dict.fromkeys(("slow_save", "straggler"), "M15"),
    **dict.fromkeys(("wrapper_killed", "wedged_teardown"), "M17"),
    **{name: rows for name, (rows, _) in SCENES.items()},
}
# What happens to a real rank after its last record is a notice and no fault: only the toy has a teardown before it.
ONLY_TOY = frozenset({"skipped_collective", "wrong_shape", "wedged_teardown"})
ONLY_REAL = frozenset({"worker_killed", "loader_ended", "damaged_checkpoint"})
SCENE_EVERY = 2  # runs
# What is not a death is noticed by silence: the floor for naming is that of real runs.
BY_SILENCE = frozenset({"sigstop", "interpreter_lock", "stalled", "stopped_worker", "wedged_teardown"})
DEADLINES = {
    "name_floor_seconds": Deadlines().name_floor_seconds,
    "kill_floor_seconds": 20.0,
    "teardown_seconds": 30.0,
    "unseen_seconds": 60.0,
}


def draw(seed: int, number: int) -> dict[str, Any]:
    """The run with this number: its ranks, its program and its cells, in the order in which they are met."""
    dice = random.Random(f"{seed}/{number}")
    ranks, real = dice.choice((2, 2, 4)), dice.random() < 0.6
    other = ONLY_TOY if real else ONLY_REAL
    names = [name for name, (_, cause, _) in FAULTS.items() if cause and name not in other]
    cells: list[dict[str, Any]] = []
    step = 0
    for position in range(CELLS_PER_RUN - 1):
        # Every other fault comes from a rotation, so that none is left out by chance.
        turn = names[(number * CELLS_PER_RUN + position) % len(names)]
        name = turn if position % 2 else dice.choice(names)
        phase = dice.choice([phase for phase in FAULTS[name][2] if not (real and phase == "teardown")])
        if phase not in ("init", "teardown"):
            step += dice.randint(2, 4)
            if name == "damaged_checkpoint":
                step = max(step, 2 * INTERVAL + 3)  # an older one must be there
            if phase in ("save", "evaluate"):
                step = -(-step // INTERVAL) * INTERVAL
            if step >= STEPS:
                break
        at = {"init": 0, "teardown": STEPS}.get(phase, step)
        cells.append(_cell_of(name, phase, at, dice.choice((0, 1, ranks - 1))))
    # What happens at the very end comes last, or what would happen before it is never reached.
    cells.sort(key=lambda cell: cell["plant"]["phase"] == "teardown")
    if step + 4 < STEPS and not any(cell["plant"]["phase"] == "teardown" for cell in cells):
        name = dice.choice([name for name, (_, cause, _) in FAULTS.items() if not cause])
        phase = dice.choice(FAULTS[name][2])
        at = -(-(step + 2) // INTERVAL) * INTERVAL if phase == "save" else step + 2
        if at < STEPS:
            cells.append(_cell_of(name, phase, at, dice.choice((0, 1, ranks - 1))))
    return {"number": number, "ranks": ranks, "real": real, "cells": cells}


def scene(seed: int, number: int, folder: Path, recipe: Path) -> dict[str, Any]:
    """Play one of the scenes, in turn; a row like those of `play`."""
    dice = random.Random(f"{seed}/scene/{number}")
    name = list(SCENES)[number // SCENE_EVERY % len(SCENES)]
    ranks = dice.choice((2, 2, 4))
    rank, result, wrong = SCENES[name][1](folder / f"scene_{number}", recipe, ranks, dice)
    good = not wrong
    return {
        "run": number,
        "ranks": ranks,
        "program": "scene",
        "fault": name,
        "rank": rank,
        "phase": "any",
        "step": -1,
        "expected": "",
        "lines": 0 if good else len(result.failed_lines),
        "orphans": len(result.orphans),
        "right_rank": good,
        "right_phase": good,
        "right_cause": good,
        "completed": good,
        "same_bytes": good,
        "wrong": wrong,
    }


def _cell_of(name: str, phase: str, step: int, rank: int) -> dict[str, Any]:
    planted, cause, _ = FAULTS[name]
    return {"fault": name, "cause": cause, "plant": {**planted, "rank": rank, "step": step, "phase": phase}}


def play(plan: dict[str, Any], folder: Path, recipe: Path, clean: dict[str, Any]) -> list[dict[str, Any]]:
    """Run one plan; a row per cell with what was planted and what was reported."""
    plants = [cell["plant"] for cell in plan["cells"]]
    options: dict[str, Any] = (
        {"recipe": recipe} if plan["real"] else {"steps": STEPS, "workers": 1, "interval": INTERVAL}
    )
    result = run(
        folder / f"run_{plan['number']}",
        *plants,
        ranks=plan["ranks"],
        restarts=CELLS_PER_RUN + 1,
        deadlines=DEADLINES,
        timeout_seconds=1200,
        **options,
    )
    attempts = result.document["attempts"]
    rows = []
    for index, cell in enumerate(plan["cells"]):
        reported = attempts[index]["faults"] if index < len(attempts) else []
        rows.append(_row(plan, cell, reported, attempts, index, result))
    same = _bytes_of(result, plan["real"]) == clean[f"{'real' if plan['real'] else 'toy'}_{plan['ranks']}"]
    for row in rows:
        row["completed"], row["same_bytes"] = result.code == 0, same
    return rows


def _row(
    plan: dict[str, Any],
    cell: dict[str, Any],
    reported: list[dict[str, Any]],
    attempts: list[Any],
    index: int,
    result: Result,
) -> dict[str, Any]:
    plant = cell["plant"]
    row = {
        "run": plan["number"],
        "ranks": plan["ranks"],
        "program": "real" if plan["real"] else "toy",
        "fault": cell["fault"],
        "rank": plant["rank"],
        "phase": plant["phase"],
        "step": plant["step"],
        "expected": cell["cause"],
        "lines": len(reported),
        "orphans": len(result.orphans),
    }
    if not cell["cause"]:
        row["right_rank"] = row["right_phase"] = row["right_cause"] = not reported
        return row
    found = reported[0] if reported else {}
    # A mismatch is reported where the collective was issued: the phase after the one in which the rank went wrong.
    phases = {plant["phase"], "sync"} if cell["fault"] in ONLY_TOY else {plant["phase"]}
    row |= {
        "told_rank": found.get("rank"),
        "told_phase": found.get("phase"),
        "told_cause": found.get("cause"),
        "right_rank": found.get("rank") == plant["rank"],
        "right_phase": found.get("phase") in phases,
        "right_cause": str(found.get("cause", "")).startswith(cell["cause"]),
        "noticed_seconds": found.get("noticed_after_seconds"),
        "down_seconds": found.get("down_after_seconds"),
        "lost_steps": found.get("lost_steps"),
    }
    after = attempts[index + 1].get("training") if index + 1 < len(attempts) else None
    if after and found:
        row["training_again_seconds"] = round(after - found["time_wall"], 3)
    return row


def _bytes_of(result: Result, real: bool) -> Any:
    return weights(result) if real else sorted(result.digests)


def report(rows: list[dict[str, Any]], out: Path | None, seed: int) -> dict[str, Any]:
    """Figures over all cells and, with `out`, a table for the documentation."""
    faults = [row for row in rows if row["expected"]]
    healthy = [row for row in rows if not row["expected"] and row["program"] != "scene"]
    scenes = [row for row in rows if row["program"] == "scene"]
    deaths = [row for row in faults if row["fault"] not in BY_SILENCE]
    # A wedged end has a deadline of its own.
    in_time = [row for row in faults if row["fault"] in BY_SILENCE and row["fault"] != "wedged_teardown"]

    def seconds(of: list[dict[str, Any]], key: str) -> list[float]:
        return [row[key] for row in of if row.get(key) is not None]

    summary = {
        "cells": len(rows),
        "faults": len(faults),
        "right_rank": _share(faults, "right_rank"),
        "right_phase": _share(faults, "right_phase"),
        "right_cause": _share(faults, "right_cause"),
        "one_line_per_fault": _share([{"ok": row["lines"] == 1} for row in faults], "ok"),
        "false_alarms": sum(row["lines"] for row in healthy),
        "death_noticed_seconds": _spread(seconds(deaths, "noticed_seconds")),
        "standstill_named_seconds": _spread(seconds(in_time, "noticed_seconds")),
        "down_seconds": _spread(seconds(faults, "down_seconds")),
        "training_again_seconds": _spread(seconds(deaths, "training_again_seconds")),
        "lost_steps_worst": int(max(seconds(faults, "lost_steps"), default=0)),
        "scenes_as_asked": _share(scenes, "right_cause"),
        "orphans": sum(row["orphans"] for row in rows),
        "completed": _share(rows, "completed"),
        "same_bytes": _share([row for row in rows if row["completed"]], "same_bytes"),
    }
    if out is not None:
        out.write_text(_page(rows, summary, seed))
    return summary


def _share(rows: list[dict[str, Any]], key: str) -> float:
    return round(sum(bool(row[key]) for row in rows) / len(rows), 4) if rows else 1.0


def _right(rows: list[dict[str, Any]]) -> float:
    return _share([{"ok": row["right_rank"] and row["right_phase"] and row["right_cause"]} for row in rows], "ok")


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {"median": 0.0, "worst": 0.0}
    return {"median": round(statistics.median(values), 3), "worst": round(max(values), 3)}


def _page(rows: list[dict[str, Any]], summary: dict[str, Any], seed: int) -> str:
    runs = len({row["run"] for row in rows})
    lines = [
        "# Planted faults: the sweep",
        "",
        f"{_right(rows):.0%} of {len(rows)} cells were reported with the right rank, phase and cause.",
        "",
        f"Written by `python benchmarks/faults/sweep.py --minutes 90 --write-docs` (seed {seed}, the first {runs}",
        "runs) on two CPU cores with gloo. A cell is one fault of [the matrix](fault-matrix.md) on one rank in one",
        "phase. Seven or eight cells share a run, which must end with the bytes of a run that met none. Draws",
        "depend on the seed and the number of the run.",
        "",
        "Cells on 2 and on 4 ranks: " + _cells_by_program(rows) + ".",
        "",
        "| | |",
        "|---|---|",
        *(f"| {_label(key, value)} | {_cell(value)} |" for key, value in summary.items()),
        "",
        "A standstill is named after 9 s by default. A rank that stands still without being stopped is ended after",
        "20 s here (60 s by default), a wedged end after 30 s (60 s). Times are in seconds, median and worst; `lost`",
        "is the most steps that one fault cost (a checkpoint every 5 steps); wrong cells are given in parentheses.",
        "",
        "| fault | row | cells | noticed | training again | lost |",
        "|---|---|---|---|---|---|",
    ]
    for name in (*FAULTS, *SCENES):
        own = [row for row in rows if row["fault"] == name]
        if own:
            noticed = _spread([row["noticed_seconds"] for row in own if row.get("noticed_seconds") is not None])
            again = _spread([row["training_again_seconds"] for row in own if row.get("training_again_seconds")])
            lines.append(
                f"| {name} | {ROWS[name]} | {_cells(own)} "
                f"| {_cell(noticed)} | {_cell(again)} | {max((row.get('lost_steps') or 0 for row in own), default=0)} |"
            )
    phases = {phase: [row for row in rows if row["phase"] == phase] for phase in PHASES}
    by_phase = ", ".join(f"{phase} {_cells(own)}" for phase, own in phases.items() if own)
    lines += ["", f"Cells by phase: {by_phase}.", "", "Nothing here was tried on CUDA."]
    return "\n".join(lines) + "\n"


def _cells(rows: list[dict[str, Any]]) -> str:
    wrong = round(len(rows) * (1 - _right(rows)))
    return f"{len(rows)} ({wrong} wrong)" if wrong else str(len(rows))


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        return f"{value['median']:.2f}, {value['worst']:.2f}" if value["worst"] else "-"
    return f"{value:.1%}" if isinstance(value, float) else str(value)


def _label(key: str, value: Any) -> str:
    name = key.removesuffix("_seconds").replace("_", " ")
    return f"{name}, seconds (median, worst)" if isinstance(value, dict) else name


def _cells_by_program(rows: list[dict[str, Any]]) -> str:
    programs = {
        "toy": "of a minimal rank program",
        "real": "of the training loop that users run",
        "scene": "of whole runs",
    }
    counts = {name: [sum((r["program"], r["ranks"]) == (name, n) for r in rows) for n in (2, 4)] for name in programs}
    return ", ".join(f"{two} and {four} {programs[name]}" for name, (two, four) in counts.items())


def main() -> int:
    """Draw, play, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "faults.jsonl")
    parser.add_argument("--write-docs", action="store_true", help="write docs/fault-sweep.md")
    arguments = parser.parse_args()
    end = time.monotonic() + 60 * arguments.minutes
    arguments.results.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        [json.loads(line) for line in arguments.results.read_text().splitlines()] if arguments.results.exists() else []
    )
    print(f"seed {arguments.seed}, {len(rows)} cells from before")
    number = max((row["run"] for row in rows), default=-1) + 1
    with tempfile.TemporaryDirectory(prefix="ups-faults-") as name:
        folder = Path(name)
        recipe = write_recipe(folder, write_mixture(folder), steps=STEPS, evaluate_every=INTERVAL)
        clean: dict[str, Any] = {}
        while time.monotonic() < end:
            plan = draw(arguments.seed, number)
            key = f"{'real' if plan['real'] else 'toy'}_{plan['ranks']}"
            if key not in clean:
                options = {"recipe": recipe} if plan["real"] else {"steps": STEPS, "interval": INTERVAL}
                free = run(folder / f"clean_{key}", ranks=plan["ranks"], timeout_seconds=300, **options)
                assert free.code == 0, free.output
                clean[key] = _bytes_of(free, plan["real"])
            fresh = play(plan, folder, recipe, clean)
            if number % SCENE_EVERY == 0:
                fresh.append(scene(arguments.seed, number, folder, recipe))
            with arguments.results.open("a") as file:
                file.writelines(json.dumps(row) + "\n" for row in fresh)
            rows += fresh
            wrong = [row for row in fresh if not (row["right_rank"] and row["right_cause"] and row["right_phase"])]
            print(f"run {number}: {len(fresh)} cells, {len(wrong)} not right" + "".join(f"\n  {row}" for row in wrong))
            number += 1
    summary = report(rows, ROOT / "docs" / "fault-sweep.md" if arguments.write_docs else None, arguments.seed)
    good = (
        summary["right_rank"] == 1.0
        and summary["right_cause"] >= 0.95
        and summary["death_noticed_seconds"]["worst"] <= 2.0
        and summary["standstill_named_seconds"]["worst"] <= 10.0
        and summary["orphans"] == 0
        and summary["false_alarms"] == 0
        and summary["scenes_as_asked"] == 1.0
        and summary["completed"] == 1.0
        and summary["same_bytes"] == 1.0
    )
    print(json.dumps(summary))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
