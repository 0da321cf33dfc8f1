"""Explains a run: the one line, what it means, what to do, then the evidence. Only reads the run directory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ups.record.location import frames_of_text
from ups.record.run_dir import RunDir
from ups.record.untrusted_files import inside, printable, read_object
from ups.supervise.advice import meaning, what_to_do
from ups.supervise.fault import KEYS, Fault
from ups.supervise.launcher import FLIGHT_PREFIX
from ups.supervise.rank_view import tail
from ups.supervise.run_file import GATE_FAILED, faults_of

_MAX_RANKS_SHOWN = 8
_MAX_NOTICES_SHOWN = 5
_LOG_LINES = 15
_STACK_LINES = 14


def faults_as_json(document: dict[str, Any]) -> list[dict[str, Any]]:
    """One object per fault in the order of time; the documented keys come first."""
    faults = []
    for fault in faults_of(document):
        ordered = {key: fault[key] for key in KEYS}
        faults.append({**ordered, **{key: value for key, value in fault.items() if key not in ordered}})
    return faults


def explain(run_dir: Path, document: dict[str, Any], *, number: int | None = None) -> str:
    """The whole explanation as text. `number` chooses a fault (0 is the first); default the one that ended the run."""
    faults = [Fault.from_document(fault) for fault in faults_of(document)]
    if not faults:
        return _text([*_without_fault(document, 0), *_notices(document)])
    chosen = faults[number if number is not None and 0 <= number < len(faults) else -1]
    lines = [fault.one_line() for fault in faults]
    if number is None and chosen.action.startswith("restart"):
        # It was healed: what the run does now, or what ended it, comes first.
        lines += [*_without_fault(document, len(faults)), "", "The last fault, after which the run was started again:"]
    elif document["verdict"]:
        lines += [document["verdict"], ""]
    else:
        lines.append("")
    lines += _of_fault(run_dir, chosen, several=len(faults) > 1)
    return _text([*lines, *_notices(document)])


def _notices(document: dict[str, Any]) -> list[str]:
    """What was no fault and somebody should know, the newest."""
    lines = [f"  {notice['line']}" for notice in document["notices"][-_MAX_NOTICES_SHOWN:]]
    return ["", "Notices:", *lines] if lines else []


def _text(lines: Iterable[str]) -> str:
    """One line for each: a line break in what a file says must not make a second one, which may look like a verdict."""
    return "\n".join(printable(line, keep="\t") for line in lines)


def _without_fault(document: dict[str, Any], healed: int) -> Iterator[str]:
    state = document["state"]
    yield document["verdict"] or f"state={state}"
    yield ""
    if state == "died":
        yield f"What it means: {meaning('supervisor_died')}."
        yield f"What to do: {what_to_do('supervisor_died')}"
    elif state == "running":
        known = f"{healed} faults so far, each restarted" if healed else "no fault so far"
        yield f"The run goes on; {known}. `ups status` shows what it is doing."
    elif state == GATE_FAILED:
        yield f"What it means: {meaning(document['cause'])}. The training itself is complete and proven."
        yield f"What to do: {what_to_do(document['cause'])}"
        yield ""
        yield from gate_lines(document)
    elif state == "failed":
        # Refused by the supervisor itself, before ranks were started.
        yield f"What it means: {meaning(document['cause'])}."
        yield f"What to do: {what_to_do(document['cause'])}"
    elif healed:
        yield f"{'One fault' if healed == 1 else f'{healed} faults'}, restarted each time; none of them ended the run."
    else:
        yield "No rank failed in this run."


def gate_lines(document: dict[str, Any]) -> Iterator[str]:
    """Each condition of the gate that was judged, those that do not hold first."""
    for one in sorted(document.get("gate", {}).get("conditions", []), key=lambda one: one["holds"]):
        mark = "holds" if one["holds"] else "FAILED"
        yield f"  {mark:<6}  {one['task'] or 'all tasks'}: {one['condition']}: {one['says']}"


def _of_fault(run_dir: Path, fault: Fault, *, several: bool) -> Iterator[str]:
    if several:
        yield f"About the fault of attempt {fault.attempt}:"
    message = " ".join(fault.message.split())
    yield f"What it means: {meaning(fault.cause)}." + (f" {message}" if message else "")
    yield f"What to do: {fault.hint + '. ' if fault.hint else ''}{what_to_do(fault.cause)}"
    yield f"More: docs/failures.md#{fault.cause.partition('(')[0]}"
    path = inside(run_dir, fault.evidence) if fault.evidence else None
    evidence = None if path is None else read_object(path)
    own_log = ""
    try:
        reported, own_log = _ranks(fault, [] if evidence is None else evidence["ranks"])
        yield from reported
    except (KeyError, TypeError, AttributeError, IndexError, ValueError):
        yield f"The evidence in {fault.evidence} is not what a supervisor of this version writes."
    yield from _stacks(run_dir, fault)
    yield from _worker_stacks(run_dir, fault)
    yield from _flight_dumps(run_dir, fault)
    log = inside(run_dir, fault.log)
    text = own_log or (tail(log, 4000) if log is not None else "")
    if text.strip():
        yield from ("", f"Last lines of {fault.log}:")
        yield from (f"  {line}" for line in text.rstrip().splitlines()[-_LOG_LINES:])


def _ranks(fault: Fault, ranks: list[dict[str, Any]]) -> tuple[list[str], str]:
    """What each rank did around the fault, and the end of the log of the one that failed."""
    shown = sorted(ranks, key=lambda entry: entry["rank"] != fault.rank)[:_MAX_RANKS_SHOWN]
    lines = []
    if shown:
        lines += ["", "Time line (seconds from the last sign of life of the failed rank):"]
        lines += _timeline(shown, fault.rank)
        lines += ["", "Ranks:"]
        lines += [f"  rank {entry['rank']}: {_exit_text(entry['exit'])}{_memory_text(entry)}" for entry in shown]
        if len(ranks) > len(shown):
            lines.append(f"  and {len(ranks) - len(shown)} more in {fault.evidence}")
    for other in fault.consequences[:_MAX_RANKS_SHOWN]:
        lines.append(f"  consequence on rank {other['rank']}: {other['cause']} at {other['at']}")
    own = next((entry.get("log_tail", "") for entry in shown if entry["rank"] == fault.rank), "")
    return lines, str(own)


def _timeline(ranks: list[dict[str, Any]], first: int) -> Iterator[str]:
    ends = [r["timeline"][-1]["time_monotonic_ns"] for r in ranks if r["rank"] == first and r["timeline"]]
    for entry in ranks:
        zero = ends[0] if ends else (entry["timeline"][-1]["time_monotonic_ns"] if entry["timeline"] else 0)
        parts = []
        for record in entry["timeline"][-5:]:
            seconds = (record["time_monotonic_ns"] - zero) / 1e9
            operation = f" {record['operation']}" if record["operation"] else ""
            parts.append(f"{seconds:+.2f} step {record['step']} {record['phase']}{operation}")
        mark = "*" if entry["rank"] == first else " "
        yield f" {mark}rank {entry['rank']}: " + (" | ".join(parts) or "never opened its black box")


def _exit_text(ended: dict[str, Any] | None) -> str:
    if ended is None:
        return "ended by the supervisor"
    peak = ended.get("peak_resident_bytes")
    return f"exit code {ended['code']}" + (f", peak {peak / 2**20:.0f} MiB" if peak else "")


def _memory_text(entry: dict[str, Any]) -> str:
    resident = entry["memory"].get("resident")
    return "" if resident is None else f", resident {resident / 2**20:.0f} MiB"


def _stacks(run_dir: Path, fault: Fault) -> Iterator[str]:
    """The most telling stack there is: the traceback, the crash dump, or the answer to SIGUSR1."""
    stem = RunDir(run_dir).failure_stem(fault.attempt, fault.rank)
    record = read_object(stem.with_name(stem.name + ".json"))
    if record is not None and isinstance(record.get("traceback"), str):
        yield from ("", f"Traceback of rank {fault.rank}:")
        yield from (f"  {line}" for line in record["traceback"].rstrip().splitlines()[-_STACK_LINES:])
        return
    for suffix, title in ((".crash.txt", "Crash"), (".stacks.txt", "Stack"), (".py-spy.txt", "Stack (py-spy)")):
        text = tail(stem.with_name(stem.name + suffix))
        if frames_of_text(text) or (suffix == ".py-spy.txt" and text.strip()):
            yield from ("", f"{title} of rank {fault.rank} ({stem.name}{suffix}):")
            start = max(text.rfind("Fatal Python error"), text.rfind("Current thread"), text.rfind("Process "), 0)
            yield from (f"  {line}" for line in text[start:].rstrip().splitlines()[:_STACK_LINES])
            return


def _worker_stacks(run_dir: Path, fault: Fault) -> Iterator[str]:
    """The crash of a loader worker of the rank, if one left a dump."""
    stem = RunDir(run_dir).failure_stem(fault.attempt, fault.rank)
    for path in sorted(stem.parent.glob(f"{stem.name}.worker_*.crash.txt")):
        text = tail(path)
        if "Fatal Python error" in text:
            yield from ("", f"Crash in a loader worker of rank {fault.rank} ({path.name}):")
            lines = text[text.rindex("Fatal Python error") :].rstrip().splitlines()
            yield from (f"  {line}" for line in lines[:_STACK_LINES])


def _flight_dumps(run_dir: Path, fault: Fault) -> Iterator[str]:
    """Dumps of torch's flight recorder are pickles: listed here, opened only by torch's own program."""
    folder = RunDir(run_dir).failures_of(fault.attempt)
    dumps = sorted(path for path in folder.glob(f"{FLIGHT_PREFIX}*") if path.is_file())
    if not dumps:
        return
    yield from ("", f"Dumps of torch's flight recorder, from {len(dumps)} of {fault.world} ranks:")
    yield from (f"  {path.name}  {path.stat().st_size} bytes" for path in dumps[:_MAX_RANKS_SHOWN])
    if len(dumps) > _MAX_RANKS_SHOWN:
        yield f"  and {len(dumps) - _MAX_RANKS_SHOWN} more"
    yield f"  read them (pickles: only of your own runs) with: torchfrtrace --prefix {FLIGHT_PREFIX} {folder}"
