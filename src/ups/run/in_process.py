"""A run inside this process: the engine of a rank, with the record that a supervisor would keep.

It writes run.json, black box, failure record and verdict like a supervised run, so that `ups status`, `ups why` and a
later `ups train` see no difference. What it cannot do is what needs another process: restart after a death, notice a
standstill.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
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
from ups.record.run_dir import RunDir
from ups.record.text import path_text
from ups.run.assemble import run_stages
from ups.run.directory import check_inputs, last_step_of
from ups.supervise.attempt import keep_rings
from ups.supervise.checkpoints import damage_line, find_usable, last_commit, missing_proof
from ups.supervise.fault import Fault
from ups.supervise.run_file import RunFile, state_after
from ups.supervise.supervisor_process import box_root
from ups.supervise.trackers import Trackers
from ups.training.progress import SAVE_SIGNAL, STOP_SIGNALS, StopRequests

# Two at the same moment are one request: a terminal signals the process and its group.
_SAME_REQUEST_SECONDS = 0.5
_ACTION = "stop(nobody_restarts_a_run_in_process)"


def train_in_process(
    run_dir: Path, recipe: Recipe, identity: RunIdentity, say: Callable[[str], None], trackers: Trackers | None = None
) -> int:
    """Train a prepared run that is held (`hold_run`) to its end; returns its exit code.

    Raises what went wrong, after it was written down; KeyboardInterrupt only for a second interrupt.
    """
    with box_root(run_dir, 1) as root:
        return _InProcess(run_dir, recipe, identity, say, root, trackers).run()


class _InProcess:
    def __init__(
        self,
        run_dir: Path,
        recipe: Recipe,
        identity: RunIdentity,
        say: Callable[[str], None],
        root: Path,
        trackers: Trackers | None,
    ) -> None:
        self._run_dir, self._recipe, self._identity, self._say, self._root = run_dir, recipe, identity, say, root
        self._trackers = trackers
        self._file = RunFile(run_dir)
        self._entry: dict[str, Any] = {}
        self._box: BlackBox | None = None

    def run(self) -> int:
        self._file.begin(ranks=1, max_restarts=0, box_root=self._root, identity=self._identity)
        document = self._file.document
        number = len(document["attempts"])
        self._entry = {"number": number, "started": time.time(), "from_checkpoint": None, "faults": []}
        self._entry["overrides"] = dict(document["overrides"])
        document["attempts"].append(self._entry)
        box_dir = self._root / f"attempt_{number}"
        document["blackbox_dir"] = str(box_dir)
        recorder = Recorder(RunDir(self._run_dir).failure_stem(number, 0), 0, 1, number)
        try:
            # Micro-batch sizes that a supervisor has found to fit are kept.
            changes = [f"{name}={value}" for name, value in document["overrides"].items()]
            recipe = resolve_data(plain_data(self._recipe), changes).recipe if changes else self._recipe
            usable = find_usable(self._run_dir, self._identity)
            if usable.foreign is not None:
                raise usable.foreign
            self._entry["from_checkpoint"] = usable.step
            self._file.save()
            recorder.box = self._box = BlackBox.create(ring_path(box_dir, 0), rank=0, world_size=1, attempt=number)
            with _signals_as_before(), torch.enable_grad():
                stopped, step = run_stages(
                    self._run_dir,
                    recipe,
                    RankEnvironment(attempt=number),
                    recorder,
                    _Interruptible(recipe.engine.max_seconds),
                    identity=self._identity,
                    hashed=usable.manifest_sha256,
                    on_commit=self._note_commit,
                    on_damage=self._note_damage,
                )
            return self._left(stopped, step) if stopped else self._done(step)
        except KeyboardInterrupt:
            step = self._step()
            self._left(signal.SIGINT, step)
            raise
        except BaseException as error:
            self._failed(error, recorder)
            raise
        finally:
            keep_rings(self._run_dir, box_dir)

    def _note_commit(self, step: int, manifest_sha256: str) -> None:
        self._identity = self._identity.with_commit(step, manifest_sha256)
        self._file.document["identity"] = self._identity.to_json()
        self._look_at_trackers()
        self._file.save()

    def _note_damage(self, step: int, problem: str) -> None:
        self._file.document["notices"].append({"time": time.time(), "line": damage_line(step, problem)})
        self._file.save()

    def _look_at_trackers(self) -> None:
        if self._trackers is not None:
            self._trackers.look()
            self._file.document["trackers"] = self._trackers.known()

    def _step(self) -> int:
        return 0 if self._box is None else self._box.last.step

    def _done(self, step: int) -> int:
        cause, problem = missing_proof(
            self._run_dir,
            step,
            last_step_of(self._recipe),
            self._identity,
            lambda: check_inputs(self._run_dir, self._recipe, self._identity),
        )
        if cause:
            raise _Unproven(problem, cause)
        self._file.document["checkpoint"] = step
        self._end("finished", step, 0)
        return self._verdict("completed", "", 0, f"step={step} ckpt={step} verified")

    def _left(self, number: int, step: int) -> int:
        commit = find_usable(self._run_dir, self._identity).step
        self._file.document["checkpoint"] = commit
        state, code = state_after(number)
        self._end("left", step, code)
        detail = f"ckpt={'-' if commit is None else commit} lost={max(0, step - (commit or 0))}"
        return self._verdict(state, f"asked({signal.Signals(number).name})", code, detail)

    def _failed(self, error: BaseException, recorder: Recorder) -> None:
        """Write down what happened; must not raise, the error itself is on its way."""
        recorder.record(error)
        seen = read_failure(recorder.stem) or {}
        cause = error.missing if isinstance(error, _Unproven) else cause_of_error(error)
        commit = last_commit(self._run_dir)
        step = self._step()
        fault = Fault(
            attempt=self._entry["number"],
            rank=0,
            world=1,
            host=os.uname().nodename,
            step=step,
            phase=str(seen.get("phase", "init")),
            cause=cause,
            at=str(seen.get("at", "-")),
            checkpoint=commit,
            lost_steps=max(0, step - (commit or 0)),
            action=_ACTION,
            message=error.message if isinstance(error, UpsError) else str(error)[:2000],
            hint=error.hint if isinstance(error, UpsError) else "",
            exit_code=exit_code_of_cause(cause),
            time_wall=time.time(),
        )
        self._file.document["checkpoint"] = commit
        self._entry["faults"].append(fault.document())
        self._end("failed", step, fault.exit_code)
        self._say(fault.one_line())
        self._verdict("failed", cause, fault.exit_code, f"why='ups why {path_text(self._run_dir)}'")

    def _end(self, outcome: str, step: int, code: int) -> None:
        self._entry.update(ended=time.time(), exits={"0": code}, last_step=step, outcome=outcome, orphans=0)

    def _verdict(self, state: str, cause: str, exit_code: int, detail: str) -> int:
        self._look_at_trackers()
        line, problem = self._file.pronounce(state, cause, exit_code, detail)
        self._say(line)
        if problem:
            self._say(f"this verdict could not be written to {path_text(self._file.path)}: {problem}")
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


@contextlib.contextmanager
def _signals_as_before() -> Iterator[None]:
    """A rank ignores signals once it has left; a notebook continues and must still be interruptible."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (*STOP_SIGNALS, SAVE_SIGNAL)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
