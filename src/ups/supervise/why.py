"""Explains a run: the one line, what it means, what to do, then the evidence. Only reads the run directory.

What to do about a cause is one or two sentences here; docs/failures.md says more under the same name.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ups.record.causes import CAUSES, base_name
from ups.record.failure import frames_of_text
from ups.record.files import MAX_RUN_BYTES, inside, read_object, safe_read
from ups.record.run_dir import RunDir
from ups.record.text import printable
from ups.supervise.attempt import FLIGHT_PREFIX
from ups.supervise.fault import Fault
from ups.supervise.rank_view import tail
from ups.supervise.run_file import GATE_FAILED, RunDocument, faults_of

ADVICE: dict[str, str] = {
    "exception": "Read the traceback below and fix the line that is named; if it lies inside ups, please report it.",
    "out_of_memory": "The run halves engine.micro_batch_size by itself. If it still does not fit: "
    "engine.strategy=fsdp, engine.activation_checkpointing=true, fewer data.loader.workers, or a smaller model.",
    "signal": "Native code crashed at the Python line that is named. Try `ups doctor RECIPE`; typical reasons are "
    "two builds of one library in a process, a file handle used across a fork, or /dev/shm that is too small.",
    "killed": "Something outside the run sent this signal: a scheduler, an administrator, a user. Look at the "
    "scheduler's log. It was not the kernel for lack of memory: its counter did not move.",
    "early_exit": "Something called exit in the middle of the run: look for sys.exit and os._exit in your code.",
    "exit": "The program left with this code by itself: look for sys.exit and os._exit, and at the log.",
    "stopped": "The process received SIGSTOP, or a debugger held it. Find the sender; the run restarts by itself.",
    "stalled": "Look at the stack of the named rank: it shows what it waits for, often a file system or a lock.",
    "deadline": "A first save or evaluation may take an hour, the end of a run a minute; a run that was asked to leave "
    "has less time. Look at the stack: the usual reason is a file system that does not answer.",
    "collective_mismatch": "Code that all ranks must run alike ran differently on the named rank: look for a branch "
    "on the rank or the data, or a caught exception, around the named operation.",
    "worker_killed": "A reader process of the loader died. After a crash the line of the reader is named: check the "
    "file with `ups data validate`. After SIGKILL: fewer data.loader.workers, or a smaller data.loader.prefetch.",
    "connection_lost": "No rank on this host failed by itself. Look at the other hosts, then at the network between.",
    "host_lost": "See whether the host that is named runs, whether it is reached over the network, and what its own "
    "`ups train` has printed. Start the same commands again on all hosts: the run resumes.",
    "head_lost": "See what happened to host 0, then start the same commands again on all hosts: the run resumes.",
    "launcher_failed": "A rank, or the small process that starts it, could not be started or failed: see the message "
    "and the limits on processes and memory of this host.",
    "unproven": "All ranks left without an error, but the last checkpoint is missing or damaged. Do not use the "
    "result; start the run again: it continues from the last complete checkpoint.",
    "supervisor_died": "The supervisor was killed, and all ranks with it. Start the same command again: it resumes.",
    "supervisor_error": "The supervisor itself met an error and ended all ranks; the message is in the verdict. "
    "Start the same command again: it resumes. If it is no lack of space or of processes, please report it.",
    "config": "Correct the recipe; `ups config check RECIPE` tests it without starting anything.",
    "plugin": "Repair or install the package that is named; `ups --version --verbose` lists all parts.",
    "recipe_changed": "Bring config.yaml of the run back as it was, or start a new run with the new recipe: "
    "--set run.dir=PATH. Settings that say how a run is done may change: `ups train RUN --set ...`.",
    "data": "Check the file that is named with `ups data validate`.",
    "data_changed": "Bring the data back as it was, or start a new run on the new data: --set run.dir=PATH. "
    "`ups data validate` reads every byte.",
    "statistics_changed": "Bring statistics.json of the run back as it was, or start a new run: --set run.dir=PATH.",
    "fetch_content": "The server sends something else than the file: try another one with --mirror.",
    "fetch_changed": "The file on the server changed on the way: start the same command again.",
    "fetch_refused": "The server says no: see the address in the message, or name another server with --mirror.",
    "fetch_unavailable": "Start the same command again later, or with --mirror: it continues where it stopped.",
    "store_unavailable": "See whether the server that is named runs and is reached from this host, then start the same "
    "command again: it continues from the last checkpoint.",
    "store_refused": "See whether the address is right, and whether the environment of the run has credentials that "
    "may read it (docs/object_stores.md).",
    "disk_full": "Free some space where the run is written and start the same command again: it continues from the "
    "last checkpoint.",
    "run_held": "Another `ups train` works on this run: wait for it, or see `ups status`. Nothing was changed.",
    "instance_left": "Look for the machine that is named in the console of the provider, and destroy it there.",
    "environment": "The machine lacks something: see the message; `ups doctor` checks all of it before a run.",
    "missing_extra": "Install the extra that the message names.",
    "tracker": "Call `ups track sync RUN` again when the tracker can be reached; the run itself is not touched.",
    "bucket": "Check the network, the address and the credentials; then start the same command again.",
    "distributed": "See the message and the logs of all ranks; `ups doctor` tries each step of the start alone.",
    "training": "Lower the learning rate, use float32, or check the data: the loss became NaN or infinite.",
    "checkpoint": "Check space and permissions where checkpoints are written.",
    "foreign_checkpoint": "A checkpoint in this run directory was copied, renamed or replaced. Remove the one "
    "that is named and start the same command again: it continues from the one before it.",
    "integrity": "Bytes on disk changed after they were written. Check the disk; an older checkpoint is used instead.",
    "run_directory_lost": "Find out who moved or deleted the directory. Put it back where it was and start the run "
    "again: it continues from the last checkpoint in it. What was trained after that checkpoint is lost.",
    "gate": "The result is below the bar that the recipe sets: train longer, or lower the bar on purpose.",
    "bundle": "The bundle is damaged or does not fit: export it again.",
    "limit": "Ask the server for fewer samples or steps.",
    "busy": "Ask the server again later.",
    "server": "Look at the log of the server, and at its address.",
    "job_lost": "Submit the job again; frames that were received are in `partial` of the error.",
    "error": "See the message and the traceback below.",
}


def meaning(cause: str) -> str:
    """What a cause means."""
    return CAUSES.get(base_name(cause), "a cause that this version does not know")


def what_to_do(cause: str) -> str:
    """The next step for the reader."""
    return ADVICE.get(base_name(cause), "See the log and the evidence below.")


_MAX_RANKS_SHOWN = 8
_MAX_NOTICES_SHOWN = 5
_LOG_LINES = 15
_STACK_LINES = 14


def faults_as_json(document: RunDocument) -> list[dict[str, Any]]:
    """One object per fault in the order of time; the documented keys come first."""
    return [{**Fault.from_document(fault).document(), **fault} for fault in faults_of(document)]


def explain(run_dir: Path, document: RunDocument, *, number: int | None = None) -> str:
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


def _notices(document: RunDocument) -> list[str]:
    """The newest notices: events that are no faults."""
    lines = [f"  {notice['line']}" for notice in document["notices"][-_MAX_NOTICES_SHOWN:]]
    return ["", "Notices:", *lines] if lines else []


def _text(lines: Iterable[str]) -> str:
    """One line for each: a line break in what a file says must not make a second one, which may look like a verdict."""
    return "\n".join(printable(line, keep="\t") for line in lines)


def _without_fault(document: RunDocument, healed: int) -> Iterator[str]:
    state = document["state"]
    yield document["verdict"] or f"state={state}"
    yield ""
    if state == "running":
        known = f"{healed} faults so far, each restarted" if healed else "no fault so far"
        yield f"The run continues; {known}. `ups status` shows what it is doing."
    elif state == GATE_FAILED:
        yield f"What it means: {meaning(document['cause'])}. The training itself is complete and proven."
        yield f"What to do: {what_to_do(document['cause'])}"
        yield ""
        yield from gate_lines(document)
    elif state in ("died", "failed"):
        # The supervisor died, or has itself refused the run before ranks were started.
        yield f"What it means: {meaning(document['cause'])}."
        yield f"What to do: {what_to_do(document['cause'])}"
    elif healed:
        yield f"{'One fault' if healed == 1 else f'{healed} faults'}, restarted each time; none of them ended the run."
    else:
        yield "No rank failed in this run."


def gate_lines(document: RunDocument) -> Iterator[str]:
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
    """The last collective of each rank that left a dump of torch's flight recorder, and who did not begin it."""
    folder = RunDir(run_dir).failures_of(fault.attempt)
    dumps = sorted(path for path in folder.glob(f"{FLIGHT_PREFIX}*") if path.is_file())
    if not dumps:
        return
    yield from ("", f"Dumps of torch's flight recorder, from {len(dumps)} of {fault.world} ranks:")
    last = {path.name.removeprefix(FLIGHT_PREFIX): _last_collective(path) for path in dumps}
    for rank, (_, words) in list(last.items())[:_MAX_RANKS_SHOWN]:
        yield f"  rank {rank}  {words}"
    if len(dumps) > _MAX_RANKS_SHOWN:
        yield f"  and {len(dumps) - _MAX_RANKS_SHOWN} more"
    latest = max(number for number, _ in last.values())
    if behind := [rank for rank, (number, _) in last.items() if 0 <= number < latest]:
        yield f"  did not begin collective {latest}: rank {', '.join(behind[:_MAX_RANKS_SHOWN])}"
    yield f"  read all of them (pickles: only of your own runs) with: torchfrtrace --prefix {FLIGHT_PREFIX} {folder}"


class _PlainUnpickler(pickle.Unpickler):
    """Reads dicts, lists, texts and numbers. Whatever a pickle names is neither imported nor called."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _last_collective(path: Path) -> tuple[int, str]:
    """Its number (-1 if the dump cannot be read) and a line about it."""
    try:
        entry = _PlainUnpickler(io.BytesIO(safe_read(path, MAX_RUN_BYTES))).load()["entries"][-1]
        number, name, group = int(entry["collective_seq_id"]), str(entry["profiling_name"]), entry["process_group"]
        is_over = entry["retired"] or entry["state"] == "completed"
        state = "over" if is_over else f"not over ({str(entry['state'])[:20]})"
        return number, printable(f"{name[:60]}, collective {number} of {str(group[-1])[:40]}: {state}")
    except Exception as error:  # noqa: BLE001 - a dump that was cut short may fail in any way
        return -1, printable(f"cannot be read: {type(error).__name__}: {str(error)[:100]}")
