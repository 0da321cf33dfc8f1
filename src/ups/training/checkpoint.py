"""Saving and loading the state of a run: torch.distributed.checkpoint inside the commit of `ups.record.manifest`.

A save has two parts. The copy (all tensors of this rank into host memory) happens in the loop. Everything after it
(writing, hashing, fsync, commit, retention) happens in one background thread (made before training) on the checkpoint
group, so that no collective of a save can meet one of training. At most one save is in flight: the next one first waits
for it. Its outcome is agreed on inside the save and looked at only then: all ranks count the same failures at the same
step. An error that could not be agreed on (a peer is gone, no memory to communicate) leaves the ranks apart: it is
raised, and the rank leaves.

When to save: `hooks.py`. Which checkpoint is trusted: `ups.record.checkpoints`. torch's metadata file is a pickle, and
is read without running it: `checkpoint_metadata.py`. torch's package is imported where it is used: it takes longer to
import than all of ups, and the first steps do not need it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import re
import shutil
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ups.distributed.agreement import from_all, from_first
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import is_sharded, local
from ups.errors import CheckpointError, DiskFullError, IntegrityError, MachineError, UpsError
from ups.models.stepper import former_name, present_name
from ups.record import checkpoints
from ups.record.files import HeldDirectory
from ups.record.identity import RunIdentity
from ups.record.manifest import FileHash, clean_temporaries, commit_directory, hash_files, make_temporary, verify
from ups.record.run_dir import RunDir
from ups.training.progress import Progress

logger = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3
# Trying again does not help against these: the run stops instead of repeating the steps since the last commit.
_NO_SPACE = re.compile("no space left|disk quota exceeded", re.IGNORECASE)
_READ_ONLY = re.compile("read-only file system", re.IGNORECASE)
# Of a save in flight when the loop has left by an error.
_LAST_SAVE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Saved:
    """Outcome of one save, the same on all ranks; `error` is '' when the checkpoint is committed."""

    step: int
    error: str


class Checkpointer:
    """Saves and loads checkpoints of one run directory. Collective: all ranks call the same methods in turn."""

    def __init__(
        self,
        runtime: Runtime,
        run_dir: Path,
        *,
        keep: int = 3,
        asynchronous: bool = True,
        identity: RunIdentity | None = None,
        hashed: str = "",
        on_commit: Callable[[int, str], None] | None = None,
        on_damage: Callable[[int, str], None] | None = None,
    ) -> None:
        """identity: of the run, written into each checkpoint and compared with what is found. hashed: manifest hash of
        the checkpoint whose bytes were read before this process began. on_commit(step, manifest hash) is called by the
        rank that commits, with '' before a step is written; on_damage(step, problem) by the rank that chooses the
        checkpoint to start from, for each one that it skips.
        """
        self._runtime = runtime
        self.run_dir = run_dir
        self._keep = keep
        self.needed: set[int] = set()  # steps whose checkpoints are kept whatever their age
        run_dir.mkdir(parents=True, exist_ok=True)
        self._held = HeldDirectory(run_dir)
        self._identity = identity
        self._hashed = hashed
        self._on_commit = on_commit or (lambda step, manifest_sha256: None)
        self._on_damage = on_damage
        self._buffers: dict[str, Tensor] = {}
        self._background = BackgroundThread("ups-checkpoint") if asynchronous else None
        self._in_flight: Future[Saved] | None = None
        self.failed_in_row = 0
        self.last: Saved | None = None
        # From the start of a save to its end in the background; 0 before the first one is done.
        self.longest_seconds = 0.0
        # A single rank is no mistake here; torch cannot know that.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    def save(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        """Save the state after `progress.step` steps; returns after the copy when asynchronous. Collective: all ranks.

        Raises CheckpointError when this is due after three failed saves in a row; one or two are reported and counted.
        """
        self.wait()
        staged = self._copy(tensors)
        document = {"format": 1, "world_size": self._runtime.world_size, "progress": progress.to_json()}
        if self._identity is not None:
            document["identity"] = self._identity.mark()
        step = progress.step
        if self._background is None:
            self._look(self._write(staged, document, step))
        else:
            self._in_flight = self._background.hand_over(lambda: self._write(staged, document, step))

    def wait(self) -> None:
        """Wait for the save in flight, if any, and count its outcome. Collective: all ranks."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is None:
            return
        try:
            outcome = in_flight.result()
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(
                f"a save could not be finished together with the other ranks: {_short(error)}",
                hint="see the traceback; `ups why RUN` says which rank failed first",
            ) from error
        self._look(outcome)

    def close(self) -> None:
        """Let the thread of the saves end; nothing can be saved afterwards.

        After an error a save may still be in flight. On one rank it comes to its end by itself, and whoever trains on
        in this process (`ups.fit`) must not meet its files; with peers that are gone it never may.
        """
        if self._background is not None:
            self._background.close(_LAST_SAVE_SECONDS if self._runtime.world_size == 1 else 0.0)
        self._held.close()

    def save_now(self, tensors: Mapping[str, Tensor], progress: Progress) -> None:
        """Save and do not return before it is committed; tries until it works or three saves have failed in a row."""
        while True:
            self.save(tensors, progress)
            self.wait()
            if self.last is not None and not self.last.error:
                return

    def find(self) -> tuple[Path, Progress] | None:
        """The newest checkpoint that can be trusted, as one rank sees it, on all ranks. Collective: all ranks."""
        answer: tuple[str, UpsError | None] = ("", None)
        if self._runtime.is_first:
            try:
                clean_temporaries(RunDir(self.run_dir).checkpoints)
                belongs = self._identity.check if self._identity is not None else None
                latest = checkpoints.latest_verified(
                    self.run_dir, belongs=belongs, hashed=self._hashed, set_aside=True, on_damage=self._on_damage
                )
                answer = (str(latest) if latest else "", None)
            except UpsError as error:
                answer = ("", error)
        name, failure = from_first(answer, self._runtime.control_group)
        if failure is not None:
            raise failure
        if not name:
            return None
        path = Path(name)
        checkpoints.wait_until_visible(path)
        return path, Progress.from_json(checkpoints.read_progress(path)["progress"])

    def find_end(self, stage_index: int) -> tuple[int, Path] | None:
        """Step and path of the checkpoint with which a stage of this run ended, if it can be trusted; on all ranks the
        same. Collective: all ranks."""
        answer = (-1, "")
        if self._runtime.is_first:
            for step, path in checkpoints.list_checkpoints(self.run_dir):
                with contextlib.suppress(UpsError, OSError):
                    progress = Progress.from_json(checkpoints.read_progress(path)["progress"])
                    if path.is_symlink() or progress.stage_index != stage_index or not progress.stage_finished:
                        continue
                    verify(path)
                    if self._identity is not None:
                        self._identity.check(path, step)
                    answer = (step, str(path))
                    break
        step, name = from_first(answer, self._runtime.control_group)
        if not name:
            return None
        checkpoints.wait_until_visible(Path(name))
        return step, Path(name)

    def load(self, path: Path, tensors: Mapping[str, Tensor], *, only_model: bool = False) -> None:
        """Read `path` into the live `tensors`, whatever number of ranks wrote it. Collective: all ranks.

        With `only_model`, the weights of an earlier stage: entries that it did not have keep their initial values.
        """
        from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
        from torch.distributed.checkpoint.state_dict_loader import load

        from ups.training.checkpoint_metadata import CheckpointReader

        try:
            reader = CheckpointReader(path)
            known = reader.tensors
            stored = {n if n in known else former_name(n): t for n, t in tensors.items()}
            wanted = stored
            if only_model:
                wanted = {n: t for n, t in stored.items() if n.startswith("model/") and n in known}
            missing = sorted(wanted.keys() - known.keys())
            if missing or not wanted:
                raise CheckpointError(
                    f"{path} has no entry '{(missing or ['model/'])[0]}' ({len(missing)} are missing)",
                    hint="the recipe has changed since this run was started: use its own config.yaml, or a new run.dir",
                )
            _check_shapes(path, wanted, known)
            group = self._runtime.checkpoint_group
            load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)
        except CheckpointError:
            raise
        except (Exception, CheckpointException) as error:
            raise CheckpointError(
                f"{path} cannot be loaded: {_short(error)}",
                hint="see the traceback; `ups why RUN` says which rank failed first",
            ) from error

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of each tensor in host memory that is kept for the next save."""
        on_device = self._runtime.device.type == "cuda"
        staged: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            mine = local(tensor)
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != mine.shape or buffer.dtype != mine.dtype:
                buffer = torch.empty(mine.shape, dtype=mine.dtype, device="cpu", pin_memory=on_device)
                self._buffers[name] = buffer
            buffer.copy_(mine, non_blocking=on_device)
            staged[name] = _placed_like(tensor, buffer)
        if on_device:
            torch.cuda.synchronize(self._runtime.device)
        return staged

    def _look(self, outcome: Saved) -> None:
        self.last = outcome
        self.failed_in_row = self.failed_in_row + 1 if outcome.error else 0
        if outcome.error and self._runtime.is_first:
            logger.warning("save of step %d failed (%d in a row): %s", outcome.step, self.failed_in_row, outcome.error)
        if outcome.error:
            self._held.check()  # no later save can work, and one that made the directory again would look like success
        if self.failed_in_row >= MAX_FAILED_SAVES:
            text = f"{self.failed_in_row} saves in a row failed, the last at step {outcome.step}: {outcome.error}"
            intact = "the last committed checkpoint is intact"
            if _NO_SPACE.search(outcome.error):
                raise DiskFullError(text, hint=f"free some space on the disk of the run and start it again; {intact}")
            if _READ_ONLY.search(outcome.error):
                raise MachineError(text, hint=f"make the file system of the run writable and start it again; {intact}")
            raise CheckpointError(text, hint=f"see the log of rank 0; {intact}")

    def _write(self, staged: dict[str, Tensor], document: dict[str, Any], step: int) -> Saved:
        """Write, hash and commit. Collective: all ranks, on the checkpoint group only."""
        started = time.monotonic()
        final = RunDir(self.run_dir).checkpoint(step)
        try:
            error = self._commit(staged, document, final)
        except Exception as problem:
            if self._runtime.checkpoint_group is not None:
                raise  # the other ranks do not know of it: see above
            error = _short(problem)
        self.longest_seconds = max(self.longest_seconds, time.monotonic() - started)
        return Saved(step, error)

    def _commit(self, staged: dict[str, Tensor], document: dict[str, Any], final: Path) -> str:
        """Four agreed parts: make a place, write, hash, commit. Each part's error is reported to all ranks."""
        group, first = self._runtime.checkpoint_group, self._runtime.is_first
        place: tuple[str, str] = ("", "")
        if first:
            place = _attempt_text(lambda: str(self._prepare(final, document)))
        name, error = from_first(place, group)
        if error:
            return str(error)
        temporary = Path(name)
        mine: tuple[dict[str, FileHash], str] = ({}, "")
        try:
            from torch.distributed.checkpoint.filesystem import FileSystemWriter
            from torch.distributed.checkpoint.state_dict_saver import save

            checkpoints.wait_until_visible(temporary, {})
            # hash_files brings the files to disk; a second fsync in the writer would only double the wait.
            writer = FileSystemWriter(temporary, sync_files=False, thread_count=1)
            save(staged, storage_writer=writer, process_group=group, no_dist=group is None)
            mine = (hash_files(temporary, self._own_files(temporary)), "")
        except BaseException as problem:  # the other ranks must learn of it, not wait; torch's is no Exception
            if not isinstance(problem, Exception) and not hasattr(problem, "failures"):
                raise
            reported = _short(problem) + _lack_of_space(temporary, staged)
            mine = ({}, reported if hasattr(problem, "failures") else f"rank {self._runtime.rank}: {reported}")
        everything = from_all(mine, group)
        errors = [text for _, text in everything if text]
        outcome = errors[0] if errors else ""
        if first and not errors:
            hashes = {path: file for part, _ in everything for path, file in part.items()}
            outcome = _attempt_text(lambda: self._publish(temporary, final, document["progress"]["step"], hashes))[1]
        if first and outcome:
            shutil.rmtree(temporary, ignore_errors=True)
        return str(from_first(outcome, group))

    def _prepare(self, final: Path, document: dict[str, Any]) -> Path:
        self._held.check()
        temporary = make_temporary(final)
        (temporary / checkpoints.PROGRESS_NAME).write_text(json.dumps(document, indent=1, sort_keys=True) + "\n")
        return temporary

    def _own_files(self, temporary: Path) -> list[str]:
        own = [path.name for path in temporary.iterdir() if path.name.startswith(f"__{self._runtime.rank}_")]
        return [*own, ".metadata", checkpoints.PROGRESS_NAME] if self._runtime.is_first else own

    def _publish(self, temporary: Path, final: Path, step: int, hashes: dict[str, FileHash]) -> str:
        checkpoints.wait_until_visible(temporary, hashes)
        checkpoints.clear_link(final)
        # Forgotten first: a kill between the commit and the note must not make a genuine checkpoint look replaced.
        self._on_commit(step, "")
        manifest = commit_directory(temporary, final, known_hashes=hashes)
        self._on_commit(step, manifest.sha256)
        try:
            checkpoints.retain(self.run_dir, self._keep, self.needed)
        except (UpsError, OSError) as error:
            # This checkpoint is committed, whatever becomes of the old ones.
            logger.warning("old checkpoints could not be removed: %s", _short(error))
        return ""


def _placed_like(tensor: Tensor, buffer: Tensor) -> Tensor:
    """`buffer` with the global shape and placement of a sharded `tensor`: all that a save plan looks at.

    `DTensor.from_local` would move the buffer to the device of the mesh.
    """
    if not is_sharded(tensor):
        return buffer
    from torch.distributed.tensor import DTensor

    placed: Tensor = DTensor(buffer, tensor._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    return placed


def _attempt_text(work: Callable[[], str]) -> tuple[str, str]:
    """(result, '') or ('', what went wrong): an error on one rank must reach the others as a value."""
    try:
        return work(), ""
    except Exception as error:  # noqa: BLE001 - also for want of memory: the other ranks must learn of it, not wait
        return "", _short(error)


def _check_shapes(path: Path, wanted: Mapping[str, Tensor], known: Mapping[str, Any]) -> None:
    for name, tensor in wanted.items():
        shape = list(getattr(known[name], "size", tensor.shape))
        if shape != list(tensor.shape):
            raise CheckpointError(
                f"{path}: '{name}' has the shape {shape}, the model has {list(tensor.shape)}",
                hint="the recipe has changed since this run was started: use its own config.yaml, or a new run.dir",
            )


def _lack_of_space(folder: Path, staged: Mapping[str, Tensor]) -> str:
    """What torch's writer often does not say: on a full disk it says "unexpected pos" of a container."""
    needed = sum(local(tensor).nbytes for tensor in staged.values())
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return ""
    return f" (no space left on the disk: {free} bytes are free, a save needs up to {needed})" if free < needed else ""


def _short(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # of a CheckpointException of torch, by rank
    if failures:
        rank, (cause, _) = next(iter(failures.items()))
        return f"rank {rank}: {_short(cause)}"
    text = error.one_line() if isinstance(error, UpsError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:500]


class BackgroundThread:
    """Runs one piece of work at a time. Made before training, closed after it; both by the loop's thread.

    Not an executor of `concurrent.futures`: the interpreter would wait at its end for work that hangs.
    """

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Saved], Future[Saved]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            raise MachineError(
                f"cannot start the thread '{name}': {error}",
                hint="raise the limit on threads (ulimit -u) or on address space (ulimit -v) of the ranks",
            ) from error

    def hand_over(self, work: Callable[[], Saved]) -> Future[Saved]:
        """Start `work` in the thread."""
        outcome: Future[Saved] = Future()
        self._work.put((work, outcome))
        return outcome

    def close(self, wait_seconds: float = 0.0) -> None:
        """Let the thread end after what it is doing; waits for that no longer than it is told to."""
        self._work.put(None)
        if wait_seconds:
            self._thread.join(wait_seconds)

    def _run(self) -> None:
        while (item := self._work.get()) is not None:
            work, outcome = item
            try:
                outcome.set_result(work())
            except BaseException as error:  # noqa: BLE001 - raised in the loop's thread, where it waits
                outcome.set_exception(error)
            del work, outcome, item  # hold the state that was saved


_MODEL, _AVERAGE = "model/", "ema/"


def read_weights(checkpoint: Path) -> dict[str, Tensor]:
    """Parameters by their names of today, on the CPU; the averaged ones where there is an average.

    Raises CheckpointError if a byte of the checkpoint is not what was committed, or it holds anything but tensors.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # a BaseException
    from torch.distributed.checkpoint.state_dict_loader import load

    from ups.training.checkpoint_metadata import CheckpointReader

    try:
        verify(checkpoint)
    except IntegrityError as error:
        raise CheckpointError(f"{checkpoint} cannot be trusted: {error.message}", hint=error.hint) from error
    reader = CheckpointReader(checkpoint)
    entries = reader.tensors
    chosen = {present_name(name.removeprefix(_MODEL)): name for name in entries if name.startswith(_MODEL)}
    chosen |= {present_name(name.removeprefix(_AVERAGE)): name for name in entries if name.startswith(_AVERAGE)}
    wanted = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in chosen.values()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(wanted, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:
        # The hashes fit: the bytes were committed like this, by somebody who may have meant harm.
        raise CheckpointError(
            f"the tensors of {checkpoint} cannot be read ({type(error).__name__})",
            hint="do not use this checkpoint; take an older one or a copy",
        ) from error
    return {short: wanted[name] for short, name in chosen.items()}
