"""The supervisor of a run: starts attempts, is the only one who restarts them, and pronounces the verdict.

It never imports torch: it must work when torch is what is broken. Success is proven, not believed: every rank has
marked the same last step as done in its black box, and the bytes of the final checkpoint re-hash. What happens to a
rank after that is a notice. Every other end has a cause.
No process of a run outlives it, on any path: an attempt ends them, and if the supervisor is killed, the kernel does.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ups.errors import RunDirectoryLostError, UpsError, exit_code_of_cause
from ups.record.files import HeldDirectory, read_from
from ups.record.identity import HASHED_VARIABLE, IDENTITY_VARIABLE, read_commits
from ups.record.run_dir import RunDir
from ups.record.text import path_text, printable
from ups.supervise.attempt import Attempt, Outcome, StopRequest, keep_rings
from ups.supervise.checkpoints import UsableCheckpoint, damage_line, find_usable, missing_proof
from ups.supervise.fault import MICRO_BATCH_SIZE, Fault, RestartPolicy
from ups.supervise.head import Head
from ups.supervise.link_endpoints import HeadLink
from ups.supervise.options import Options
from ups.supervise.rank_view import RankView
from ups.supervise.run_file import RunFile, left, machine_mark
from ups.supervise.supervisor_process import supervising

if TYPE_CHECKING:
    from ups.supervise.bucket_mirror import BucketMirror
    from ups.supervise.trackers import Trackers


def supervise(options: Options, say: Callable[[str], None] | None = None, link: HeadLink | None = None) -> int:
    """Run the ranks to their end and return the exit code of the run (see `ups.errors.EXIT_CODES`).

    For who holds the run (`hold_run`); with a `link` as the head of several hosts. Prints one `FAILED` line per fault
    and a `VERDICT` line at the end.
    """
    with (
        contextlib.closing(HeldDirectory(options.run_dir)) as held,
        supervising(options.run_dir, len(options.local_ranks), say or _print) as (stop_request, output, root),
    ):
        return _Supervision(options, stop_request, root, output, held, link).run()


class _Supervision:
    def __init__(
        self,
        options: Options,
        stop_request: StopRequest,
        box_root: Path,
        say: Callable[[str], None],
        held: HeldDirectory,
        link: HeadLink | None = None,
    ) -> None:
        self._options = options
        self._held = held
        self._stop_request = stop_request
        self._box_root = box_root
        self._say = say
        self._file = RunFile(options.run_dir)
        self._policy = RestartPolicy(options.max_restarts, options.micro_batch_size)
        self._shown = _ShownOutput(options)
        self._identity = options.identity
        self._box_dir = box_root
        self._commits_offset = 0
        self._damaged: set[int] = set()
        # What was found after the last attempt; the next one starts from it, so that bytes are read once.
        self._usable: UsableCheckpoint | None = None
        self._head = None if link is None else Head(options, link, stop_request, say, self._find_commit, self._notice)

    def run(self) -> int:
        try:
            return self._run()
        except BaseException as error:
            if not self._file.document:
                raise
            # The ranks are gone by now. The cause is written down before the error is raised.
            cause = error.cause if isinstance(error, UpsError) else f"supervisor_error({type(error).__name__})"
            code = error.exit_code if isinstance(error, UpsError) else 1
            for attempt in self._file.document.get("attempts", [])[-1:]:
                attempt.setdefault("outcome", "supervisor_error")
            text = error.message if isinstance(error, UpsError) else str(error)
            self._verdict("failed", cause, code, f"message={json.dumps(text)}")
            raise

    def _run(self) -> int:
        options = self._options
        self._file.begin(
            ranks=options.ranks, max_restarts=options.max_restarts, box_root=self._box_root, identity=self._identity
        )
        document = self._file.document
        document["overrides"] = {**options.chosen, **document["overrides"]}
        remembered = document["overrides"].get(MICRO_BATCH_SIZE)
        self._policy.micro_batch_size = remembered or self._policy.micro_batch_size
        first = True
        while True:
            if self._head is not None:
                if not self._head.gather(first):
                    # Asked to leave while other hosts were waited for.
                    commit = document["checkpoint"] = self._find_commit()
                    return self._verdict(*left(self._stop_request.number, 0, commit))
                document |= {"hosts": self._head.labels(), "machine": machine_mark()}
            first = False
            state, cause, exit_code, detail = self._judge(self._attempt())
            if state != "again":
                return self._verdict(state, cause, exit_code, detail)

    def _attempt(self) -> Outcome:
        document, options, head = self._file.document, self._options, self._head
        usable = self._usable or self._find()
        if usable.foreign is not None:
            raise usable.foreign
        self._usable = None
        entry, box_dir = self._file.begin_attempt(self._box_root, usable.step)
        number = entry["number"]
        self._box_dir, self._commits_offset = box_dir, 0
        self._file.save()
        self._shown.follow(number)
        reported = self._reported(usable)
        options = replace(options, environment={**options.environment, **reported})
        if head is not None:
            options = replace(options, rendezvous=head.begin(number, document["overrides"], reported))
        attempt = Attempt(
            options,
            number,
            box_dir,
            document["overrides"],
            self._stop_request,
            self._say,
            self._notice,
            self._look,
            self._find_commit if head is None else lambda: None,
            (lambda: False) if head is None else head.over,
        )
        outcome = attempt.run()
        if head is not None:
            outcome = head.join(outcome)
        self._look([])
        keep_rings(options.run_dir, box_dir)
        shutil.rmtree(box_dir, ignore_errors=True)  # shared memory is small, and restarts may be many
        entry.update(ended=time.time(), training=outcome.training_wall, last_step=outcome.last_step)
        entry.update(outcome=outcome.state, orphans=outcome.orphans)
        entry["exits"] = {str(rank): code for rank, code in outcome.exits.items()}
        return outcome

    def _look(self, views: list[RankView]) -> None:
        """Ten times a second: what rank 0 prints, how the trackers are, and what was committed."""
        if self._head is not None:
            self._head.look(self._box_dir if views else None)
        self._shown.look()
        self._look_at("trackers", self._options.trackers)
        self._look_at("mirror", self._options.mirror)
        commits, damaged, notices, self._commits_offset = read_commits(self._box_dir, self._commits_offset)
        self._tell_damaged(damaged)
        for line in notices:
            self._tell(line)
        if commits and self._identity is not None:
            for step, sha256 in commits:
                self._identity = self._identity.with_commit(step, sha256)
                self._damaged.discard(step)  # written again
            self._file.document["identity"] = self._identity.to_json()
            self._file.save()

    def _look_at(self, key: str, companion: Trackers | BucketMirror | None) -> None:
        """Keep what a process that follows the run says, under `key` of run.json, and its notices."""
        looked = None if companion is None else companion.look()
        if looked is None:
            return
        value, warnings = looked
        document = cast(dict[str, Any], self._file.document)
        document["notices"] += [{"time": time.time(), "line": f"NOTICE {text}"} for text in warnings]
        if warnings or value != document.get(key):
            document[key] = value
            self._file.save()

    def _reported(self, usable: UsableCheckpoint) -> dict[str, str]:
        """What ranks must know to check a checkpoint by themselves."""
        if self._identity is None:
            return {}
        return {IDENTITY_VARIABLE: json.dumps(self._identity.to_json()), HASHED_VARIABLE: usable.manifest_sha256}

    def _find(self) -> UsableCheckpoint:
        self._look([])
        self._usable = find_usable(self._options.run_dir, self._identity)
        self._tell_damaged(self._usable.damaged)
        return self._usable

    def _tell_damaged(self, damaged: Mapping[int, str]) -> None:
        """Say once which checkpoints are skipped; a rank finds those whose bytes are too many to be read here."""
        for step in sorted(damaged.keys() - self._damaged):
            self._damaged.add(step)
            self._tell(damage_line(step, damaged[step]))

    def _tell(self, line: str) -> None:
        self._say(line)
        self._notice({"time": time.time(), "line": line})

    def _find_commit(self) -> int | None:
        return self._find().step

    def _judge(self, outcome: Outcome) -> tuple[str, str, int, str]:
        """State ('again' for another attempt), cause, exit code and a detail for the verdict line."""
        gone = self._held.lost()
        if gone:
            return self._lost_directory(outcome, gone)
        run_dir, asked = self._options.run_dir, self._stop_request.number
        fault = outcome.fault
        if outcome.state == "finished":
            fault = self._unproven(outcome)
            if fault is None:
                self._file.document["checkpoint"] = outcome.last_step
                return "completed", "", 0, f"step={outcome.last_step} ckpt={outcome.last_step} verified"
        commit = self._find_commit() if fault is None else fault.checkpoint
        self._file.document["checkpoint"] = commit
        if fault is None:
            return left(asked, outcome.last_step, commit)
        decision = self._policy.decide(fault)
        again = decision.restart and not asked
        fault = fault.with_action(decision.action if not asked else "stop(asked_to_leave)")
        self._file.document["attempts"][-1]["faults"].append(fault.document())
        self._file.document["overrides"].update(decision.overrides if again else {})
        self._file.save()
        self._say(fault.one_line())
        if again:
            if self._options.check_inputs is not None:
                self._options.check_inputs()
            return "again", fault.cause, 0, ""
        if asked:
            state, _, code, detail = left(asked, fault.step, commit)
            return state, fault.cause, code, detail
        return "failed", fault.cause, exit_code_of_cause(fault.cause), f"why='ups why {path_text(run_dir)}'"

    def _lost_directory(self, outcome: Outcome, gone: str) -> tuple[str, str, int, str]:
        """The end of a run whose directory is gone, whatever its ranks made of that: nothing in its place proves it."""
        cause = RunDirectoryLostError.cause
        moved = self._held.current_path()
        commit = None
        if moved is not None:
            # Whoever asks later asks there, and would read that the supervisor died.
            gone += f"; it is now {moved}"
            self._file.path = moved / self._file.path.name
            commit = find_usable(moved, self._identity).step
        fault = outcome.fault or self._fault_at_the_end(outcome, cause, "")
        more = f"; the rank says: {fault.message}" if fault.message and fault.cause != cause else ""
        fault = replace(fault, cause=cause, message=gone + more, exit_code=exit_code_of_cause(cause))
        fault = fault.continued_from(commit)
        fault = fault.with_action(self._policy.decide(fault).action)
        self._file.document["attempts"][-1]["faults"].append(fault.document())
        self._file.document["checkpoint"] = commit
        self._say(fault.one_line())
        return "failed", cause, exit_code_of_cause(cause), f"message={json.dumps(gone)}"

    def _unproven(self, outcome: Outcome) -> Fault | None:
        """None if the success is proven, else the fault that says what is missing."""
        options = self._options
        if outcome.behind is not None:
            cause = "unproven(last_step)"
            problem = f"rank {outcome.behind} says it is done before step {outcome.last_step} of the others"
        else:
            cause, problem = missing_proof(
                options.run_dir, outcome.last_step, options.last_step, self._identity, options.check_inputs
            )
        return self._fault_at_the_end(outcome, cause, problem) if cause else None

    def _fault_at_the_end(self, outcome: Outcome, cause: str, problem: str) -> Fault:
        number = self._file.document["attempts"][-1]["number"]
        return Fault(
            attempt=number,
            rank=outcome.behind or 0,
            world=self._options.ranks,
            host=self._options.host,
            step=outcome.last_step,
            phase="teardown",
            cause=cause,
            log=RunDir.log_name(number, outcome.behind or 0),
            message=problem,
            exit_code=exit_code_of_cause(cause),
            time_wall=time.time(),
        ).continued_from(self._find_commit())

    def _verdict(self, state: str, cause: str, exit_code: int, detail: str) -> int:
        if self._options.trackers is not None:
            self._file.document["trackers"] = self._options.trackers.known()
        if self._options.mirror is not None and (looked := self._options.mirror.look()):
            self._file.document["mirror"] = looked[0]
        line, problem = self._file.pronounce(state, cause, exit_code, detail)
        self._say(line)
        if self._head is not None:
            self._head.pronounce(line, exit_code)
        if problem:
            self._say(f"this verdict could not be written to {path_text(self._file.path)}: {problem}")
        return exit_code

    def _notice(self, entry: dict[str, Any]) -> None:
        self._file.document["notices"].append(entry)
        self._file.save()


class _ShownOutput:
    """Shows the output of one rank as it is written."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._offsets: dict[tuple[Path, Any], int] = {}  # of logs and the streams that show them

    def follow(self, attempt: int) -> None:
        rank = self._options.show_rank
        if rank is not None:
            log = functools.partial(RunDir(self._options.run_dir).log, attempt, rank)
            self._offsets = {(log("out"), sys.stdout): 0, (log("err"), sys.stderr): 0}

    def look(self) -> None:
        for path, stream in self._offsets:
            text = read_from(path, self._offsets[path, stream])
            self._offsets[path, stream] += len(text)
            with contextlib.suppress(OSError, ValueError):
                if text:
                    stream.write(text.decode(errors="replace"))
                    stream.flush()


def _print(line: str) -> None:
    sys.stdout.write(printable(line) + "\n")
    sys.stdout.flush()
