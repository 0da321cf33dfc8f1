"""A run inside this process: the engine of a rank, with the record that a supervisor would keep.

It writes run.json, black box, failure record and verdict like a supervised run, so that `ups status`, `ups why` and a
later `ups train` see no difference. What it cannot do is what needs another process: restart after a death, notice a
standstill.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ups.config.recipe import plain_data, resolve_data
from ups.config.schema import Recipe
from ups.distributed.environment import RankEnvironment
from ups.errors import CheckpointError, UpsError, exit_code_of_cause
from ups.record.blackbox import BlackBox, ring_path
from ups.record.causes import cause_of_error
from ups.record.failure import Recorder, read_failure
from ups.record.identity import RunIdentity
from ups.record.processes import handling
from ups.record.run_dir import RunDir
from ups.record.text import path_text
from ups.run.assemble import run_stages
from ups.run.directory import check_inputs, last_step_of
from ups.supervise.attempt import keep_rings
from ups.supervise.checkpoints import damage_line, find_usable, last_commit, missing_proof
from ups.supervise.fault import Fault
from ups.supervise.run_file import RunFile, left
from ups.supervise.supervisor_process import box_root
from ups.supervise.trackers import Trackers
from ups.training.progress import SAVE_SIGNAL, STOP_SIGNALS, StopRequests

# Two at the same moment are one request: a terminal signals the process and its group.
_SAME_REQUEST_SECONDS = 0.5
_ACTION = "stop(not_restarted_in_process)"


def train_in_process(
    run_dir: Path, recipe: Recipe, identity: RunIdentity, say: Callable[[str], None], trackers: Trackers
) -> int:
    """Train a prepared run that is held (`hold_run`) to its end; returns its exit code.

    Raises what went wrong, after it was written down; KeyboardInterrupt only for a second interrupt.
    """
    with box_root(run_dir, 1) as root:
        return _InProcess(run_dir, recipe, identity, say, root, trackers).run()


@dataclass
class _InProcess:
    run_dir: Path
    recipe: Recipe
    identity: RunIdentity
    say: Callable[[str], None]
    root: Path
    trackers: Trackers
    box: BlackBox | None = None
    entry: dict[str, Any] = field(default_factory=dict)

    def run(self) -> int:
        self.file = RunFile(self.run_dir)
        self.file.begin(ranks=1, max_restarts=0, box_root=self.root, identity=self.identity)
        document = self.file.document
        self.entry, box_dir = self.file.begin_attempt(self.root)
        number = self.entry["number"]
        recorder = Recorder(RunDir(self.run_dir).failure_stem(number, 0), 0, 1, number)
        try:
            # Micro-batch sizes that a supervisor has found to fit are kept.
            changes = [f"{name}={value}" for name, value in document["overrides"].items()]
            recipe = resolve_data(plain_data(self.recipe), changes).recipe if changes else self.recipe
            usable = find_usable(self.run_dir, self.identity)
            if usable.foreign is not None:
                raise usable.foreign
            self.entry["from_checkpoint"] = usable.step
            self.file.save()
            recorder.box = self.box = BlackBox.create(ring_path(box_dir, 0), rank=0, world_size=1, attempt=number)
            with _signals_as_before(), torch.enable_grad():
                stopped, step = run_stages(
                    self.run_dir,
                    recipe,
                    RankEnvironment(attempt=number),
                    recorder,
                    _Interruptible(recipe.engine.max_seconds),
                    identity=self.identity,
                    hashed=usable.manifest_sha256,
                    on_commit=self._note_commit,
                    on_damage=self._note_damage,
                )
            return self._left(stopped, step) if stopped else self._done(step)
        except KeyboardInterrupt:
            self._left(signal.SIGINT, self._step())
            raise
        except BaseException as error:
            self._failed(error, recorder)
            raise
        finally:
            keep_rings(self.run_dir, box_dir)

    def _note_commit(self, step: int, manifest_sha256: str) -> None:
        self.identity = self.identity.with_commit(step, manifest_sha256)
        self.file.document["identity"] = self.identity.to_json()
        self._look_at_trackers()
        self.file.save()

    def _note_damage(self, step: int, problem: str) -> None:
        self.file.document["notices"].append({"time": time.time(), "line": damage_line(step, problem)})
        self.file.save()

    def _look_at_trackers(self) -> None:
        self.trackers.look()
        self.file.document["trackers"] = self.trackers.known()

    def _step(self) -> int:
        return 0 if self.box is None else self.box.last.step

    def _done(self, step: int) -> int:
        cause, problem = missing_proof(
            self.run_dir,
            step,
            last_step_of(self.recipe),
            self.identity,
            lambda: check_inputs(self.run_dir, self.recipe, self.identity),
        )
        if cause:
            raise _Unproven(problem, cause)
        self.file.document["checkpoint"] = step
        self._end("finished", step, 0)
        return self._verdict("completed", "", 0, f"step={step} ckpt={step} verified")

    def _left(self, number: int, step: int) -> int:
        commit = self.file.document["checkpoint"] = find_usable(self.run_dir, self.identity).step
        state, cause, code, detail = left(number, step, commit)
        self._end("left", step, code)
        return self._verdict(state, cause, code, detail)

    def _failed(self, error: BaseException, recorder: Recorder) -> None:
        """Write down what happened; must not raise, the error itself is on its way."""
        recorder.record(error)
        seen = read_failure(recorder.stem) or {}
        cause = error.missing if isinstance(error, _Unproven) else cause_of_error(error)
        commit = last_commit(self.run_dir)
        step = self._step()
        fault = Fault(
            attempt=self.entry["number"],
            rank=0,
            world=1,
            host=os.uname().nodename,
            step=step,
            phase=str(seen.get("phase", "init")),
            cause=cause,
            at=str(seen.get("at", "-")),
            action=_ACTION,
            message=error.message if isinstance(error, UpsError) else str(error)[:2000],
            hint=error.hint if isinstance(error, UpsError) else "",
            exit_code=exit_code_of_cause(cause),
            time_wall=time.time(),
        ).continued_from(commit)
        self.file.document["checkpoint"] = commit
        self.entry["faults"].append(fault.document())
        self._end("failed", step, fault.exit_code)
        self.say(fault.one_line())
        self._verdict("failed", cause, fault.exit_code, f"why='ups why {path_text(self.run_dir)}'")

    def _end(self, outcome: str, step: int, code: int) -> None:
        self.entry.update(ended=time.time(), exits={"0": code}, last_step=step, outcome=outcome, orphans=0)

    def _verdict(self, state: str, cause: str, exit_code: int, detail: str) -> int:
        self._look_at_trackers()
        line, problem = self.file.pronounce(state, cause, exit_code, detail)
        self.say(line)
        if problem:
            self.say(f"this verdict could not be written to {path_text(self.file.path)}: {problem}")
        return exit_code


class _Unproven(CheckpointError):
    """The run says that it is done, and something speaks against it."""

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message, hint="look at the checkpoints with `ups why`, then continue the run")
        self.missing = cause


class _Interruptible(StopRequests):
    """The first interrupt asks to save and leave, another one leaves at once: who waits twice means it."""

    _first = 0.0

    def ask_to_stop(self, number: int, frame: FrameType | None = None) -> None:
        if number == signal.SIGINT and frame is not None:
            now = time.monotonic()
            self._first = self._first or now
            if now - self._first > _SAME_REQUEST_SECONDS:
                raise KeyboardInterrupt
        super().ask_to_stop(number, frame)


def _signals_as_before() -> AbstractContextManager[None]:
    """A rank ignores signals once it has left; a notebook continues and must still be interruptible."""
    on_main_thread = threading.current_thread() is threading.main_thread()
    numbers = (*STOP_SIGNALS, SAVE_SIGNAL) if on_main_thread else ()
    # None: a handler of another language, which Python cannot set again.
    return handling({number: known for number in numbers if (known := signal.getsignal(number)) is not None})
