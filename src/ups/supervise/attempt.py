"""One attempt: the ranks are started, watched until all of them are gone, and ended; and what happened in between.

Each rank is started by a wrapper of its own (`ups.record.rank_wrapper`), which writes down the moment of death. The
attempt looks about ten times a second at files in shared memory and at /proc, never at other hosts. It ends in one of
four ways: all ranks finished, all ranks saved and left because they were asked to, a fault with its first cause, or
because the attempt is over on another host (`head.py`). Whether to try again is left to `fault.py`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Annotated, Any, Literal

from pydantic import Field, StrictBool

from ups.errors import MachineError, exit_code_of_cause
from ups.record import processes
from ups.record.blackbox import Phase, Record
from ups.record.causes import cause_of_exit, signal_name
from ups.record.failure import memory_of_process
from ups.record.run_dir import RunDir
from ups.supervise import evidence
from ups.supervise.fault import MAX_CONSEQUENCES, Fault, Number, Whole
from ups.supervise.first_cause import (
    CollectiveLog,
    Mismatch,
    OomKills,
    RankEnd,
    clean,
    first_cause,
    position,
    rank_ends,
)
from ups.supervise.link import SECRET_VARIABLE
from ups.supervise.options import Options
from ups.supervise.rank_view import RankView
from ups.supervise.standstill import SECTIONS, PhaseTimes, Standstill, StandstillWatch

# Carried by every process of the run: what it finds after the end is an orphan.
TOKEN_VARIABLE = "UPS_SUPERVISOR_TOKEN"  # noqa: S105 - a mark, not a secret
_LAUNCH_VARIABLES = frozenset(
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME")
) | frozenset(("ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))
FLIGHT_PREFIX = "nccl_trace_rank_"
_STANDSTILL_EVERY_SECONDS = 0.25
_WRAPPERS_LEAVE_SECONDS = 5.0
_CAUSE_SECONDS = 15.0


AttemptState = Literal["finished", "left", "failed", "ended"]


@dataclass(slots=True)
class StopRequest:
    """A request to leave: `number` is the signal, 0 without a request; `urgent` means now."""

    number: int = 0
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an attempt ended: `finished`, `left` or `failed`; `ended` where only another host had a reason for that."""

    state: AttemptState
    fault: Fault | None = None
    last_step: Whole = 0
    exits: dict[Annotated[int, Field(ge=0, lt=10**9)], Whole] = field(default_factory=dict)
    orphans: Whole = 0
    # A rank that says it is done at an earlier step than the others.
    behind: Whole | None = None
    # When every rank was in its loop; None if that never happened.
    training_wall: Number | None = None
    # Of the first cause: whether it is only a consequence, and its time by the clock of this host.
    cascade: StrictBool = False
    time_ns: Whole = 0


@dataclass(frozen=True, slots=True)
class _Verdict:
    """Why the supervisor itself ends the attempt."""

    rank_end: RankEnd
    noticed_after_seconds: float = 0.0
    # Where the rank stood when it was looked at; the location of the fault if the rank itself recorded none.
    stood_at: str = "-"


@dataclass(slots=True)
class Attempt:
    """Watches one attempt. `say` prints a line; `notice` stores one."""

    options: Options
    number: int
    box_dir: Path
    overrides: Mapping[str, int]
    stop_request: StopRequest
    say: Callable[[str], None]
    notice: Callable[[dict[str, Any]], None]
    on_look: Callable[[list[RankView]], None] = lambda views: None
    # Step of the checkpoint from which a restart would go on.
    find_commit: Callable[[], int | None] = lambda: None
    # Whether the attempt is over on another host.
    over_elsewhere: Callable[[], bool] = lambda: False
    _views: list[RankView] = field(default_factory=list)
    # (rank, number of the record) -> how long it had stood still when it was named
    _named: dict[tuple[int, int], float] = field(default_factory=dict)
    _asked_ns: int = 0
    _asked: set[int] = field(default_factory=set)
    _oom_kills: OomKills = field(default_factory=OomKills)
    _training_wall: float | None = None
    _times: PhaseTimes = field(init=False)
    _collectives: CollectiveLog = field(default_factory=CollectiveLog)
    _told_boxes_lost: bool = False

    def run(self) -> Outcome:
        """Start the ranks, watch them, and leave no process behind, whatever happens."""
        self.box_dir.mkdir(parents=True, exist_ok=True)
        self._times = PhaseTimes(self.options.deadlines)
        run_dir = self.options.run_dir
        self._views = [RankView(run_dir, self.box_dir, self.number, rank) for rank in self.options.local_ranks]
        self._oom_kills.look(time.monotonic())
        launcher = Launcher(self.options, self.number, self.box_dir, self.overrides)
        try:
            return self._watch(launcher)
        finally:
            launcher.end()
            for view in self._views:
                view.close()

    def _watch(self, launcher: Launcher) -> Outcome:
        watch = StandstillWatch(self._times)
        began = time.monotonic()
        next_look = began
        while True:
            mismatch = self._refresh(launcher)
            if self._training_wall is None and all(v.last and v.last.phase is not Phase.INIT for v in self._views):
                self._training_wall = time.time()
            self.on_look(self._views)
            if mismatch is not None:
                return self._failed(launcher, self._of_mismatch(mismatch))
            done = all(view.done for view in self._views)
            if done and self._have_left():
                return self._all_done(launcher)
            died = any(view.failed or view.exit is not None for view in self._views if not view.done)
            if died or self.over_elsewhere():
                return self._failed(launcher, None)
            now = time.monotonic()
            self._oom_kills.look(now)
            if not done and self.stop_request.number and self._forward_stop_request(now):
                return self._failed(launcher, self._stuck_in_section(now))
            if not done and now >= next_look:
                next_look = now + _STANDSTILL_EVERY_SECONDS
                self._tell_lost_boxes()
                ending = self._late_start(now - began) or self._standing_still(watch)
                if ending is not None:
                    return self._failed(launcher, ending)
            time.sleep(self.options.poll_seconds)

    def _refresh(self, launcher: Launcher) -> Mismatch | None:
        mismatch: Mismatch | None = None
        for view in self._views:
            view.notice_unrecorded_death(launcher.wrapper_code(view.rank), launcher.not_started.get(view.rank, ""))
            before: Record | None = view.last
            for record in view.refresh():
                if before is not None and record.number == before.number + 1:
                    self._times.learn(before.phase, (record.time_ns - before.time_ns) / 1e9, before.stage)
                before = record
                if record.operation and view.reader is not None:
                    name = view.reader.operation(record.operation)
                    mismatch = self._collectives.add(view.rank, record, name) or mismatch
        return mismatch

    def _have_left(self) -> bool:
        """Whether the ranks, whose work is done, are gone or have had their time for that.

        Nothing can fail here: what proves the run is its last checkpoint, and no step would be trained again.
        """
        if all(not view.alive for view in self._views):
            return True
        rules = self.options.deadlines
        patience = rules.asked_teardown_seconds if self.stop_request.number else rules.teardown_seconds
        marked_ns = max(view.last.time_ns for view in self._views if view.last is not None)
        return self.stop_request.urgent or time.monotonic_ns() - marked_ns > patience * 1e9

    def _all_done(self, launcher: Launcher) -> Outcome:
        deadline = time.monotonic() + _WRAPPERS_LEAVE_SECONDS
        late = [view for view in self._views if view.alive]
        while not late and launcher.will_end() and time.monotonic() < deadline:
            time.sleep(0.02)
        state: AttemptState = "finished" if all(view.finished for view in self._views) else "left"
        broken = self._broken_wrapper(launcher) if state == "left" and not self.stop_request.number else None
        if broken is not None:
            return self._failed(launcher, broken)
        orphans = launcher.end()
        for view in self._views:
            if view in late:
                view.notice_unrecorded_death(launcher.wrapper_code(view.rank))
                self._tell_teardown(view, "did not leave in time, and was ended")
            elif view.exit is not None and (view.failed or not clean(view)):
                failure = view.failure()
                cause = cause_of_exit(int(view.exit["code"])) if failure is None else failure["cause"]
                self._tell_teardown(view, f"ended with {cause}")
        return self._outcome(state, None, orphans)

    def _tell(self, line: str, **more: int) -> None:
        self.say(line)
        self.notice({"attempt": self.number, "time_wall": time.time(), **more, "line": line})

    def _tell_teardown(self, view: RankView, what: str) -> None:
        """A rank that did not end as it should after its work was done: recorded, and no reason to train again."""
        assert view.last is not None
        seconds = (time.monotonic_ns() - view.last.time_ns) / 1e9
        line = (
            f"NOTICE rank={view.rank}/{self.options.ranks} step={view.last.step} phase=teardown "
            f"host={self.options.host}: its work was done {seconds:.0f} s ago; then it {what} log={view.log}"
        )
        self._tell(line, rank=view.rank)

    def _broken_wrapper(self, launcher: Launcher) -> _Verdict | None:
        """A wrapper that did not end as its rank did.

        Ranks that leave without the supervisor having been asked were asked by others (a user, a scheduler, their
        own time limit), unless something between us and them failed: then their leaving is a consequence.
        """
        for view in self._views:
            code, ended = launcher.wrapper_code(view.rank), view.exit
            if code is None or ended is None or (code == int(ended["code"]) and "pid" in ended):
                continue
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"failed with exit code {code}"
            message = f"ranks left without a request to the supervisor, and the wrapper of rank {view.rank} {how}"
            step, phase = position(view)
            cause = "out_of_memory" if code == -signal.SIGKILL and self._oom_kills.happened() else "launcher_failed"
            return _Verdict(RankEnd(view.rank, time.monotonic_ns(), cause, step, phase, message=message))
        return None

    def _forward_stop_request(self, now: float) -> bool:
        """Tell each rank once, also those that only come up now, to save and leave; True when their time is over.

        A rank in a save or an evaluation can only leave after it: it gets what that usually takes, and no more than
        `Deadlines.leave_seconds` in all.
        """
        self._asked_ns = self._asked_ns or time.monotonic_ns()
        waiting = {view.pid for view in self._views if view.alive and view.pid} - self._asked
        processes.send(waiting, signal.SIGTERM)
        self._asked |= waiting
        if self.stop_request.urgent:
            return True
        asked_for = now - self._asked_ns / 1e9
        records = [view.last for view in self._views if view.alive and view.last is not None]
        busy = any(record.phase in SECTIONS and asked_for <= self._times.leave_seconds(record) for record in records)
        return asked_for > self.options.deadlines.grace_seconds and not busy

    def _stuck_in_section(self, now: float) -> _Verdict | None:
        """Who did not leave in time because of its save or evaluation; None for all others, and if it was urgent."""
        inside = [view for view in self._views if view.alive and view.last and view.last.phase in SECTIONS]
        asked_for = now - self._asked_ns / 1e9
        if not inside or self.stop_request.urgent:
            return None
        locations = evidence.capture(self._views, native=False)
        view = next((view for view in inside if not evidence.waits_for_peers(view)), inside[0])
        assert view.last is not None
        step, phase = position(view)
        at = locations[view.rank].short() if view.rank in locations else "-"
        message = f"asked to leave {asked_for:.0f} s ago, and in {phase} for {now - view.last.time_ns / 1e9:.0f} s"
        rank_end = RankEnd(view.rank, time.monotonic_ns(), f"deadline({phase})", step, phase, at, message=message)
        return _Verdict(rank_end, asked_for)

    def _late_start(self, seconds: float) -> _Verdict | None:
        missing = [view for view in self._views if view.reader is None and view.alive]
        if not missing or seconds < self.options.deadlines.start_seconds:
            return None
        message = f"{len(missing)} of {self.options.ranks} ranks did not come up in {seconds:.0f} s"
        return _Verdict(RankEnd(missing[0].rank, time.monotonic_ns(), "deadline(init)", 0, "init", message=message))

    def _standing_still(self, watch: StandstillWatch) -> _Verdict | None:
        standstill = watch.look(self._views, time.monotonic_ns())
        if standstill is None:
            return None
        key = (standstill.view.rank, standstill.record.number)
        named = key in self._named
        if named and not standstill.kill:
            return None
        # Native frames take seconds: the rank is named without them.
        locations = evidence.capture(self._views, native=named)
        view = self._who_is_not_waiting(standstill)
        at = locations[view.rank].short() if view.rank in locations else "-"
        watch.busy_until(time.monotonic_ns())
        if standstill.view.moved_since(standstill.record):
            return None  # slow, and on its way again
        if not named:
            self._named[key] = (time.monotonic_ns() - standstill.record.time_ns) / 1e9
            self._tell_slow(standstill, view, at)
        if not standstill.kill:
            return None
        if not named and standstill.cause != "stopped(SIGSTOP)":
            evidence.capture(self._views, native=True)
            if standstill.view.moved_since(standstill.record):
                return None
        step, phase = position(view)
        usual = "never seen before" if standstill.usual_seconds is None else f"usually {standstill.usual_seconds:.3g} s"
        message = f"no progress for {standstill.seconds:.1f} s in {phase} ({usual})"
        # Where all ranks of this host wait for those of another one, the rank that stands still is there.
        waits = self.options.host_info is not None and evidence.waits_for_peers(view)
        rank_end = RankEnd(view.rank, standstill.record.time_ns, standstill.cause, step, phase, at, waits, message)
        return _Verdict(rank_end, self._named[key])

    def _who_is_not_waiting(self, standstill: Standstill) -> RankView:
        """Among ranks that are level, the one whose own stack is not inside a collective."""
        if standstill.cause == "stopped(SIGSTOP)" or len(standstill.level) < 2:
            return standstill.view
        outside = [view for view in self._views if view.rank in standstill.level and not evidence.waits_for_peers(view)]
        return standstill.view if standstill.view in outside or not outside else outside[0]

    def _tell_lost_boxes(self) -> None:
        """Rings stay mapped on both sides and are watched as before; what is read by path is lost."""
        if self._told_boxes_lost or self.box_dir.is_dir():
            return
        self._told_boxes_lost = True
        line = (
            f"NOTICE host={self.options.host}: {self.box_dir}, where the ranks record what they do, was removed. "
            "The run continues and is still watched, but until the next attempt `ups status` shows no ranks, and "
            "checkpoints are not known by their hash. Where systemd clears the shared memory of a user at logout "
            "(RemoveIPC=yes), use `loginctl enable-linger`"
        )
        self._tell(line)

    def _tell_slow(self, standstill: Standstill, view: RankView, at: str) -> None:
        step, phase = position(view)
        usual = "-" if standstill.usual_seconds is None else f"{standstill.usual_seconds:.3g}s"
        after = "now" if standstill.kill else f"after_{standstill.kill_after_seconds:.0f}s"
        line = (
            f"SLOW rank={view.rank}/{self.options.ranks} step={step} phase={phase} host={self.options.host} "
            f"for={standstill.seconds:.1f}s usual={usual} at={at} ends={after} log={view.log}"
        )
        self._tell(line, rank=view.rank)

    def _of_mismatch(self, mismatch: Mismatch) -> _Verdict:
        noticed_ns = time.monotonic_ns()
        locations = evidence.capture(self._views, native=False)
        rank, record = mismatch.rank, mismatch.record
        message = (
            f"collective {record.collective}: rank {rank} issued {mismatch.operation} of step {record.step}, "
            f"its peers {mismatch.expected} of step {mismatch.expected_step}"
        )
        cause = f"collective_mismatch({mismatch.operation.replace(' ', '')})"
        rank_end = RankEnd(rank, record.time_ns, cause, record.step, record.phase.label, message=message)
        at = locations[rank].short() if rank in locations else "-"
        return _Verdict(rank_end, (noticed_ns - record.time_ns) / 1e9, at)

    def _failed(self, launcher: Launcher, own: _Verdict | None) -> Outcome:
        """Gather what all ranks have to say, end them, and find the first cause."""
        noticed_ns = time.monotonic_ns()
        if own is None:
            own = self._settle(launcher)
        ended_ns = time.monotonic_ns()
        memory = {view.rank: memory_of_process(view.pid) for view in self._views if view.alive and view.pid}
        orphans = launcher.end()
        for view in self._views:
            view.refresh()
        down_ns = time.monotonic_ns()
        oom = self._oom_kills.happened()
        ends = rank_ends(self._views, out_of_memory_kill=oom, ended_ns=ended_ns)
        first = self._choose(own, ends)
        if first is None:
            return self._outcome("ended" if self.over_elsewhere() else "left", None, orphans)
        since = own.noticed_after_seconds if own else (noticed_ns - first.time_ns) / 1e9
        fault = self._fault(first, ends, max(since, 0.0), (down_ns - noticed_ns) / 1e9)
        evidence.write(self.options.run_dir, fault, self._views, memory)
        return replace(self._outcome("failed", fault, orphans), cascade=first.cascade, time_ns=first.time_ns)

    def _settle(self, launcher: Launcher) -> _Verdict | None:
        """Let the others write down what they saw; the death may turn out to be the echo of a mismatched collective.

        Where so far there are only consequences, a rank that is still leaving must be the cause: wait for it.
        """
        began = time.monotonic()
        while True:
            mismatch = self._refresh(launcher)
            if mismatch is not None:
                return self._of_mismatch(mismatch)
            seconds = time.monotonic() - began
            if all(view.failed or not view.alive for view in self._views) or seconds > _CAUSE_SECONDS:
                return None
            if seconds > self.options.settle_seconds:
                ends = rank_ends(self._views, out_of_memory_kill=False, ended_ns=None)
                if self.over_elsewhere() or not ends or not all(rank_end.cascade for rank_end in ends):
                    return None
            time.sleep(0.02)

    def _choose(self, own: _Verdict | None, ends: list[RankEnd]) -> RankEnd | None:
        if own is not None:
            # What the watch saw is the cause, unless a rank recorded its own reason before that.
            earlier = [s for s in ends if not s.cascade and s.time_ns < own.rank_end.time_ns]
            return earlier[0] if earlier else self._placed(own, ends)
        if self._asked_ns:
            # Asked to leave: dying of that very signal, or with a peer that did, is obedience and no fault.
            ends = [s for s in ends if not s.cascade and not s.cause.startswith("killed(SIGTERM")]
        return first_cause(ends)

    def _placed(self, own: _Verdict, ends: list[RankEnd]) -> RankEnd:
        """A mismatch is seen from outside; the location is where the rank itself then failed, or stood."""
        if own.rank_end.at != "-":
            return own.rank_end
        locations = [s.at for s in ends if s.rank == own.rank_end.rank and s.at != "-"]
        return replace(own.rank_end, at=locations[0] if locations else own.stood_at)

    def _fault(self, first: RankEnd, ends: list[RankEnd], noticed: float, down: float) -> Fault:
        view = next(view for view in self._views if view.rank == first.rank)
        return Fault(
            attempt=self.number,
            rank=first.rank,
            world=self.options.ranks,
            host=self.options.host,
            step=first.step,
            phase=first.phase,
            cause=first.cause,
            at=first.at,
            log=view.log,
            message=first.message[:2000],
            hint=first.hint,
            exit_code=exit_code_of_cause(first.cause),
            time_wall=time.time() - (time.monotonic_ns() - first.time_ns) / 1e9,
            noticed_after_seconds=round(noticed, 3),
            down_after_seconds=round(down, 3),
            evidence=f"{RunDir.failures.name}/attempt_{self.number}/{self.options.evidence_name}",
            consequences=[s.document() for s in ends if s.rank != first.rank][:MAX_CONSEQUENCES],
        ).continued_from(self.find_commit())

    def _outcome(self, state: AttemptState, fault: Fault | None, orphans: list[processes.Process]) -> Outcome:
        last_step = max((view.last.step for view in self._views if view.last is not None), default=0)
        exits = {view.rank: int(view.exit["code"]) for view in self._views if view.exit is not None}
        behind = next((view.rank for view in self._views if view.last is not None and view.last.step < last_step), None)
        return Outcome(state, fault, last_step, exits, len(orphans), behind, self._training_wall)


class Launcher:
    """One attempt's processes: a wrapper for each rank, which starts the rank."""

    def __init__(self, options: Options, attempt: int, box_dir: Path, overrides: Mapping[str, int]) -> None:
        self.token = secrets.token_hex(16)
        # Why a wrapper could not be started, by rank; the ranks after it were not tried.
        self.not_started: dict[int, str] = {}
        self._wrappers: dict[int, subprocess.Popen[bytes]] = {}
        log_of_rank = functools.partial(RunDir(options.run_dir).log, attempt)
        try:
            log_of_rank(0).parent.mkdir(parents=True, exist_ok=True)
            rendezvous = options.rendezvous.variables(box_dir)
        except OSError as error:
            raise MachineError(
                f"cannot start ranks: {error}", hint="check space and permissions of the run directory and of /dev/shm"
            ) from error
        environment = {
            **{name: value for name, value in os.environ.items() if not _of_another_launcher(name)},
            **({"OMP_NUM_THREADS": "1"} if options.ranks > 1 and "OMP_NUM_THREADS" not in os.environ else {}),
            **options.environment,
            **rendezvous,
            "WORLD_SIZE": str(options.ranks),
            "LOCAL_WORLD_SIZE": str(len(options.local_ranks)),
            "UPS_ATTEMPT": str(attempt),
            "UPS_BLACKBOX_DIR": str(box_dir),
            "UPS_OVERRIDES": json.dumps(dict(overrides)),
            TOKEN_VARIABLE: self.token,
            **_flight_recorder(options.run_dir, attempt),
        }
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & environment.keys():
            # Tasks have batches of many sizes: blocks of fixed size would leave gaps in a GPU's memory.
            environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        command = processes.module_command("ups.record.rank_wrapper", str(options.run_dir), *options.command)
        for local_rank, rank in enumerate(options.local_ranks):
            try:
                rank_variables = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
                with log_of_rank(rank).open("ab") as log:
                    self._wrappers[rank] = _start(command, {**environment, **rank_variables}, log)
            except (OSError, subprocess.SubprocessError) as error:
                self.not_started[rank] = f"rank {rank} could not be started: {error}"
                return

    def ended(self) -> bool:
        """Whether every wrapper has left."""
        return all(wrapper.poll() is not None for wrapper in self._wrappers.values())

    def will_end(self) -> bool:
        """Whether a wrapper is still there that can leave by itself: a stopped one cannot."""
        waiting = [wrapper.pid for wrapper in self._wrappers.values() if wrapper.poll() is None]
        states = [process.state for pid in waiting if (process := processes.read_process(pid)) is not None]
        return any(state not in processes.STOPPED for state in states)

    def wrapper_code(self, rank: int) -> int | None:
        """The exit code of a rank's wrapper as `subprocess` gives it; None while it runs."""
        wrapper = self._wrappers.get(rank)
        return None if wrapper is None else wrapper.poll()

    def members(self) -> list[processes.Process]:
        """Every living process of this attempt, in the family tree or out of it."""
        members = {p.pid: p for p in processes.carriers(TOKEN_VARIABLE, self.token)}
        for wrapper in self._wrappers.values():
            if wrapper.returncode is None:  # not reaped: its number is still its own
                alone = processes.read_process(wrapper.pid)
                members |= {p.pid: p for p in [alone] if p is not None and p.state != "Z"}
                members |= {p.pid: p for p in processes.descendants(wrapper.pid)}
        members.pop(os.getpid(), None)
        return list(members.values())

    def end(self, timeout_seconds: float = 10.0) -> list[processes.Process]:
        """SIGKILL everything that is left of the attempt; returns what survived that (nothing, but it is looked at)."""
        # A program that trains with `ups.train` may have children besides, and waits for them itself.
        own = frozenset(wrapper.pid for wrapper in self._wrappers.values()) | processes.children_in_session()
        left = processes.kill_until_gone(self.members, timeout_seconds, not_reaped=own)
        for wrapper in self._wrappers.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                wrapper.wait(timeout=1.0)
        processes.reap_adopted(own)
        return left


def _start(command: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        env=environment,
        # Its own session: Ctrl-C at the terminal is the supervisor's to pass on, once.
        start_new_session=True,
        # Until the wrapper is far enough to end its rank by itself.
        preexec_fn=processes.bound_to(os.getpid()),
    )


def _of_another_launcher(name: str) -> bool:
    """Whether a variable shows a launcher around the supervisor, or is for supervisors only: not for these ranks."""
    return name in _LAUNCH_VARIABLES or name == SECRET_VARIABLE or name.startswith("TORCHELASTIC_")


def _flight_recorder(run_dir: Path, attempt: int) -> dict[str, str]:
    """Where torch's flight recorder dumps, which it does on NCCL unless told otherwise (`TORCH_FR_BUFFER_SIZE=0`): into
    the run, not into everybody's /tmp."""
    prefix = str((RunDir(run_dir).failures_of(attempt) / FLIGHT_PREFIX).absolute())
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    return {name: prefix for name in names if name not in os.environ}


def keep_rings(run_dir: Path, box_dir: Path) -> None:
    """Copy the rings of an attempt into the run: shared memory goes with the supervisor."""
    target = RunDir(run_dir).blackbox
    with contextlib.suppress(OSError):
        target.mkdir(exist_ok=True)
        for ring in box_dir.glob("rank_*.ring"):
            if ring.parent != target:
                shutil.copy2(ring, target / ring.name)
