"""Judges cells from their raw logs, by `rules.md` and `expected.json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from benchmarks.stacks.cell import read_lines
from benchmarks.stacks.stacks import STACKS, Stack

STEPS, RANK_SAMPLES, FROZEN_SECONDS, START_SECONDS = 40, 8, 20.0, 90.0
# A line that states a problem. Words of warnings that a run without a fault prints are not in it.
PROBLEM = re.compile(
    r"Traceback|\b\w*(Error|Exception)\b|\bfailed\b|FAILED|fatal|\bkilled\b|SIG(KILL|SEGV|STOP|TERM|ABRT)|SLOW|NOTICE"
    r"|timed? ?out|left out steps|No space left|preempted|exitcode",
)
Lines = list[tuple[float, str]]


def score_all(cells: Path, expected: dict[str, Any], results: Path, environments: Path) -> None:
    """Write a file of scored cells for each stack; a cell that the rules do not score is left out, and said."""
    results.mkdir(parents=True, exist_ok=True)
    for name, stack in STACKS.items():
        free = read_finals(cells / f"{name}.none.0")
        rows = []
        for folder in sorted(cells.glob(f"{name}.*")):
            if not (folder / "cell.json").exists():
                continue
            row = score(folder, stack, expected, free[-1]["sha256"] if free else None)
            if row.get("not_scored"):
                print(f"{folder.name}: not scored: {row['not_scored']}")
            rows.append(row)
        if rows:
            packages = environments / name / "packages.txt"
            document: dict[str, Any] = {"stack": name, "title": stack.title, "settings": stack.settings}
            document |= {"variables": stack.variables, "cells": rows}
            if packages.exists():
                kept = re.compile(r"(torch|numpy|h5py|lightning|pytorch-lightning|accelerate|ray|nvidia-resil\S*)==")
                document["packages"] = [line for line in packages.read_text().split() if kept.match(line)]
            (results / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")


def score(folder: Path, stack: Stack, expected: dict[str, Any], free: str | None) -> dict[str, Any]:
    """One scored cell; `free` is the hash of the final weights of the run without a fault."""
    facts = json.loads((folder / "cell.json").read_text())
    fault = facts["fault"]
    progress = [read_lines(folder / f"progress_{rank}.jsonl") for rank in (0, 1)]
    finals = read_finals(folder)
    row: dict[str, Any] = {
        "fault": fault,
        "repetition": facts["name"].split(".")[2],
        "timeout": facts["timeout"],
        "load": round(max(facts["load"][0], facts["load_end"][0]), 1),
        "exit_code": facts["exit_code"],
        "start_seconds": round(progress[0][0]["time"] - facts["started"], 1) if progress[0] else None,
        "seconds": round(facts["ended"] - facts["started"], 1),
    }
    if reason := not_scored(folder, facts):
        return row | {"not_scored": reason}
    if fault == "none":
        good = facts["exit_code"] == 0 and bool(finals) and not facts["left_over"]
        return row | {"right": good, "steps": sum(note["samples"] for note in progress[0]) / RANK_SAMPLES}

    rule, begin = expected["faults"][fault], facts["acted"]
    lines = read_log(folder / "output.log")
    after = [(time, line) for time, line in lines if time >= begin - 0.5]
    report = (folder / "report.log").read_text() if (folder / "report.log").exists() else ""
    row |= judge_words(stack, rule, after, report)
    row["detected_seconds"] = detected(after, begin, facts, progress)

    steps = [sum(note["samples"] for note in notes) / RANK_SAMPLES for notes in progress]
    finished = bool(finals) and min(steps) >= STEPS
    code = facts["exit_code"]
    last_code = facts.get("again_exit_code", code)
    equal = bool(finals) and finals[-1]["sha256"] == free
    row["equal_weights"] = equal
    row["continues"] = last_code == 0 and finished
    row["lost_steps"] = round(steps[0] - STEPS) if row["continues"] else None
    row["left_behind"] = [process["command"] for process in facts["left_over"] or []]
    row["does_not_end"] = code is None
    row["restarts"] = len({note["pid"] for note in progress[1]}) - 1
    row["false_success"] = 0 in (code, last_code) and (
        not finished
        or not finals[-1]["finite"]
        or (rule["equal"] and not equal)
        or fault == "full_disk"
        or (fault in ("launcher", "sigterm") and code == 0 and not row["continues"])
    )
    row["ending"] = {
        "completes": row["continues"],
        "finite": code is not None and (code != 0 or (finished and finals[-1]["finite"])),
        "stops": code not in (0, None),
        "again": code is not None and row["continues"] and equal,
        "undisturbed": row["continues"] and row["restarts"] == 0,
    }[rule["ending"]]
    row["right"] = (
        (row["rank"] == "right" or not rule["rank"])
        and (row["cause"] or rule["cause"] is None)
        and row["ending"]
        and not row["false_success"]
        and not row["left_behind"]
        and not row["does_not_end"]
    )
    return row


def not_scored(folder: Path, facts: dict[str, Any]) -> str:
    """Why the rules do not score this cell, and it is played again; '' if they do."""
    first = read_lines(folder / "progress_0.jsonl")[:1]
    if facts["frozen"] > FROZEN_SECONDS:
        return f"frozen for {facts['frozen']} s"
    if not first or (facts["fault"] != "none" and "acted" not in facts):
        return "step 18 was not reached"
    start = first[0]["time"] - facts["started"]
    return f"the machine was too busy: first step after {start:.0f} s" if start > START_SECONDS else ""


def is_finished(folder: Path) -> bool:
    """Whether there is a cell that the rules score."""
    facts = folder / "cell.json"
    return facts.exists() and not not_scored(folder, json.loads(facts.read_text()))


def judge_words(stack: Stack, rule: dict[str, Any], after: Lines, report: str) -> dict[str, Any]:
    """Whom the stack blames first, and whether its words hold the cause."""
    statements = [(line, found[1]) for _, line in after if (found := re.search(stack.accuses, line))]
    blamed: list[str] = [statements[0][1]] if statements else []
    error = block(after, statements[0][0]) if stack.lists_ranks and statements else []
    if error:  # one text that may hold errors of several ranks, or of "0,1"
        blamed = sorted({rank for line, ranks in statements if line in error for rank in ranks.split(",")})
    said = "none" if not blamed else "listed" if len(blamed) > 1 else "right" if blamed[0] == "1" else "wrong"
    text = [line for line, _ in statements] + error + [line for line in report.splitlines() if PROBLEM.search(line)]
    for rank in blamed:
        text += [line for _, line in after if re.search(stack.own_line.replace("RANK", rank), line)]
    if not rule["rank"]:
        text += [line for _, line in after]
    cause = rule["cause"] is not None and any(re.search(rule["cause"], words) for words in text)
    return {"rank": said, "cause": cause, "statement": statements[0][0][:300] if statements else ""}


def block(after: Lines, first: str) -> list[str]:
    """The lines of an error that came with `first`, within half a second."""
    begin = next(time for time, line in after if line == first)
    return [line for time, line in after if begin <= time <= begin + 0.5]


def detected(after: Lines, begin: float, facts: dict[str, Any], progress: list[list[dict[str, Any]]]) -> float | None:
    """Seconds until a problem was stated, a rank started again, or the launcher ended; None: undetected."""
    times = [time for time, line in after if time >= begin and PROBLEM.search(line)]
    for notes in progress:
        first = notes[0]["pid"]
        times += [note["time"] for note in notes if note["pid"] != first and note["time"] > begin][:1]
    if facts["exit_code"] not in (0, None):
        times.append(facts["ended"])
    limit = facts["ended"]  # what only the second start says does not count
    times = [time for time in times if time <= limit]
    return round(min(times) - begin, 1) if times else None


def read_finals(folder: Path) -> list[dict[str, Any]]:
    """What rank 0 noted of the final weights."""
    return read_lines(folder / "final.jsonl")


def read_log(path: Path) -> Lines:
    """Lines of output with the time at which they came."""
    rows = [line.split(" ", 1) for line in path.read_text(errors="replace").splitlines()] if path.exists() else []
    return [(float(row[0]), row[1] if len(row) > 1 else "") for row in rows]
