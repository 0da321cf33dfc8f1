"""Standstill: no rank is blamed while any rank moves, and then the one that delays the others."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ups.record import processes
from ups.record.blackbox import BlackBox, Phase, ring_path
from ups.supervise.rank_view import RankView
from ups.supervise.standstill import Deadlines, PhaseTimes, Standstill, StandstillWatch

pytestmark = pytest.mark.processes
SECOND = 10**9
RULES = Deadlines(name_floor_seconds=10, kill_floor_seconds=60)


class Rank:
    """A ring, and a real process behind it."""

    def __init__(self, root: Path, number: int, program: str = "import time; time.sleep(600)") -> None:
        self.process = subprocess.Popen([sys.executable, "-c", program])
        path = ring_path(root, number)
        self.box = BlackBox.create(path, rank=number, world_size=2, attempt=0, capacity=64)
        pids = {"rank_pid": self.process.pid, "wrapper_pid": 0}
        (root / f"rank_{number:05d}.pid").write_text(json.dumps(pids))
        self.view = RankView(root, root, 0, number)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[Rank]]:
    with contextlib.ExitStack() as stack:
        made = []
        for number in (0, 1):
            rank = Rank(tmp_path, number)
            stack.callback(rank.process.wait)
            stack.callback(rank.process.kill)
            made.append(rank)
        yield made


def computed(rank: Rank) -> float:
    """CPU-seconds of its process."""
    process = processes.read_process(rank.process.pid)
    return process.cpu_seconds if process else 0.0


def learned() -> StandstillWatch:
    times = PhaseTimes(RULES)
    for phase in (Phase.DATA, Phase.FORWARD, Phase.BACKWARD):
        for _ in range(50):
            times.learn(phase, 0.1)
    return StandstillWatch(times)


def views(ranks: list[Rank]) -> list[RankView]:
    for rank in ranks:
        rank.view.refresh()
    return [rank.view for rank in ranks]


def look(watch: StandstillWatch, seen: list[RankView], now_ns: int) -> Standstill | None:
    """As by a watcher that has looked all the time in between."""
    watch.busy_until(now_ns)
    return watch.look(seen, now_ns)


def test_the_rank_behind_is_named_then_ended(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.box.record(Phase.DATA, 3)
    ranks[0].box.record(Phase.FORWARD, 3)
    watch, seen, now = learned(), views(ranks), time.monotonic_ns()
    assert look(watch, seen, now + 9 * SECOND) is None
    named = look(watch, seen, now + 11 * SECOND)
    assert named is not None
    assert (named.view.rank, named.kill) == (1, False)
    ended = look(watch, seen, now + 61 * SECOND)
    assert ended is not None
    assert (ended.view.rank, ended.kill, ended.cause) == (1, True, "stalled")


def test_nobody_is_ended_while_anybody_moves(ranks: list[Rank]) -> None:
    ranks[1].box.record(Phase.DATA, 3)
    watch, now = learned(), time.monotonic_ns()
    ranks[0].box.record(Phase.SAVE, 3, deadline_seconds=7200.0)
    assert look(watch, views(ranks), now + 100 * SECOND) is None
    for later in (130, 3600):
        named = look(watch, views(ranks), now + later * SECOND)
        assert named is not None
        assert (named.view.rank, named.kill) == (0, False)


def test_a_save_far_beyond_what_saves_take_is_named_then_ended(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.box.issue("save", Phase.SAVE, 3, deadline_seconds=3600.0, usual_seconds=2.0)
    watch, seen, now = learned(), views(ranks), time.monotonic_ns()
    assert look(watch, seen, now + 29 * SECOND) is None
    named = look(watch, seen, now + 31 * SECOND)
    assert named is not None
    assert (named.kill, named.usual_seconds, named.kill_after_seconds) == (False, 2.0, 600.0)
    ended = look(watch, seen, now + 601 * SECOND)
    assert ended is not None
    assert (ended.kill, ended.cause) == (True, "stalled")


def test_a_rank_whose_save_is_slow_is_not_named_while_another_trains(ranks: list[Rank]) -> None:
    watch, now = learned(), time.monotonic_ns()
    ranks[0].box.record(Phase.SAVE, 3, deadline_seconds=3600.0)
    ranks[1].box.record(Phase.FORWARD, 3)
    seen = views(ranks)
    assert seen[1].last is not None
    seen[1].last = replace(seen[1].last, time_ns=now + 195 * SECOND)
    assert look(watch, seen, now + 200 * SECOND) is None


def test_a_long_wait_in_the_past_excuses_nobody_else(ranks: list[Rank]) -> None:
    watch = learned()
    watch.times.learn(Phase.SYNC, 300.0)
    ranks[1].box.record(Phase.DATA, 3)
    ranks[0].box.record(Phase.DATA, 3)
    ranks[0].box.record(Phase.SYNC, 3)
    standstill = look(watch, views(ranks), time.monotonic_ns() + 61 * SECOND)
    assert standstill is not None
    assert (standstill.view.rank, standstill.kill) == (1, True)


def test_a_declared_deadline_is_a_cause_of_its_own(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.box.record(Phase.SAVE, 3, deadline_seconds=30.0)
    standstill = learned().look(views(ranks), time.monotonic_ns() + 31 * SECOND)
    assert standstill is not None
    assert (standstill.cause, standstill.kill) == ("deadline(save)", True)


def test_a_stopped_rank_is_ended_as_soon_as_it_would_be_named_even_in_a_long_phase(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.box.record(Phase.SAVE, 3, deadline_seconds=7200.0)
    ranks[1].process.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    watch, seen, now = learned(), views(ranks), time.monotonic_ns()
    assert look(watch, seen, now) is None
    standstill = look(watch, seen, now + 11 * SECOND)
    assert standstill is not None
    assert (standstill.view.rank, standstill.cause, standstill.kill) == (1, "stopped(SIGSTOP)", True)


def test_a_rank_that_was_continued_is_left_alone(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.box.record(Phase.SAVE, 3, deadline_seconds=7200.0)
    watch, now = learned(), time.monotonic_ns()
    ranks[1].process.send_signal(signal.SIGSTOP)
    time.sleep(0.2)
    assert look(watch, views(ranks), now) is None
    ranks[1].process.send_signal(signal.SIGCONT)
    time.sleep(0.2)
    assert look(watch, views(ranks), now + 11 * SECOND) is None


def test_of_level_ranks_the_one_that_computes_is_named(tmp_path: Path) -> None:
    busy = Rank(tmp_path, 1, "while True: pass")
    idle = Rank(tmp_path, 0)
    try:
        for rank in (idle, busy):
            rank.box.record(Phase.BACKWARD, 3)
        watch, seen = learned(), views([idle, busy])
        began = time.monotonic_ns()
        look(watch, seen, began)
        limit = time.monotonic() + 120
        while computed(busy) < 0.5 and time.monotonic() < limit:
            time.sleep(0.05)
        # Rules in which two seconds are long: what matters is who computed in them.
        watch.times.rules = Deadlines(name_floor_seconds=1, name_factor=1, kill_floor_seconds=60)  # type: ignore[misc]
        standstill = look(watch, seen, began + 2 * SECOND)
        assert standstill is not None
        assert standstill.view.rank == 1
    finally:
        for rank in (idle, busy):
            rank.process.kill()
            rank.process.wait()


def test_after_a_pause_of_the_whole_job_time_begins_again(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.box.record(Phase.DATA, 3)
    watch, seen, now = learned(), views(ranks), time.monotonic_ns()
    assert watch.look(seen, now + SECOND) is None
    assert watch.look(seen, now + 300 * SECOND) is None, "the watcher did not look for five minutes either"
    assert look(watch, seen, now + 309 * SECOND) is None
    standstill = look(watch, seen, now + 311 * SECOND)
    assert standstill is not None
    assert not standstill.kill
    standstill = look(watch, seen, now + 361 * SECOND)
    assert standstill is not None
    assert standstill.kill


def test_a_rank_that_moved_while_its_stack_was_taken_is_known_to_move(ranks: list[Rank]) -> None:
    ranks[0].box.record(Phase.DATA, 3)
    ranks[0].view.refresh()
    last = ranks[0].view.last
    assert last is not None
    assert not ranks[0].view.moved_since(last)
    ranks[0].box.record(Phase.FORWARD, 3)
    assert ranks[0].view.moved_since(last)
    assert ranks[0].view.last is last


def test_a_rank_that_is_ahead_and_waits_in_an_evaluation_excuses_nobody(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.box.issue("gradient_norm", Phase.SYNC, 3)
    ranks[0].box.issue("barrier", Phase.EVALUATE, 3, deadline_seconds=3600)
    watch = learned()
    watch.times.learn(Phase.SYNC, 0.1)
    seen, now = views(ranks), time.monotonic_ns()
    standstill = look(watch, seen, now + 11 * SECOND)
    assert standstill is not None
    assert standstill.view.rank == 1


def test_a_rank_that_saves_excuses_those_who_wait_for_it(ranks: list[Rank]) -> None:
    for rank in ranks:
        rank.box.issue("gradient_norm", Phase.SYNC, 3)
    ranks[0].box.record(Phase.SAVE, 3, deadline_seconds=3600)
    ranks[0].box.record(Phase.SAVE, 3, deadline_seconds=3600)
    ranks[1].box.issue("barrier", Phase.SYNC, 3)
    watch = learned()
    watch.times.learn(Phase.SYNC, 0.1)
    assert look(watch, views(ranks), time.monotonic_ns() + 110 * SECOND) is None
    named = look(watch, views(ranks), time.monotonic_ns() + 600 * SECOND)
    assert named is not None
    assert (named.view.rank, named.kill) == (0, False)
