"""Deadlines: slow is not dead, and silence is measured against what the phase took before."""

from dataclasses import replace

from ups.record.blackbox import Mark, Phase, Record
from ups.supervise.standstill import Deadlines, PhaseTimes


def record(phase: Phase, deadline_seconds: float = 0.0, usual_seconds: int = 0) -> Record:
    return Record(1, 0, phase, 5, 0, 0, 0, 0, deadline_seconds, 0.0, 10, Mark.NONE, usual_seconds)


def test_a_fast_phase_has_the_floors() -> None:
    times = PhaseTimes(Deadlines())
    for _ in range(100):
        times.learn(Phase.FORWARD, 0.05)
    limits = times.limits(record(Phase.FORWARD))
    assert (limits.name, limits.kill) == (9.0, 60.0)


def test_a_slow_phase_has_multiples_of_its_99th_percentile() -> None:
    times = PhaseTimes(Deadlines())
    for _ in range(100):
        times.learn(Phase.FORWARD, 8.0)
    limits = times.limits(record(Phase.FORWARD))
    assert (limits.name, limits.kill) == (40.0, 160.0)


def test_few_observations_count_by_the_longest() -> None:
    times = PhaseTimes(Deadlines())
    for seconds in (0.1, 30.0, 0.1):
        times.learn(Phase.DATA, seconds)
    assert times.p99(Phase.DATA) == 30.0


def test_a_phase_that_was_never_seen_gets_time_for_a_cold_start() -> None:
    assert PhaseTimes(Deadlines()).limits(record(Phase.FORWARD)).kill == 600.0


def test_a_compilation_has_its_declared_deadline_whatever_a_step_takes_and_is_named_before_it() -> None:
    times = PhaseTimes(Deadlines())
    for _ in range(100):
        times.learn(Phase.FORWARD, 0.01)
    limits = times.limits(record(Phase.FORWARD, 3600.0))
    assert (limits.name, limits.kill, limits.declared, limits.learned) == (1200.0, 3600.0, True, False)
    assert times.limits(record(Phase.INIT)).name == 300.0
    short = times.limits(record(Phase.TEARDOWN))
    assert short.name == short.kill == Deadlines().teardown_seconds


def test_evaluations_are_learned_with_floors_of_their_own() -> None:
    times = PhaseTimes(Deadlines())
    first = times.limits(record(Phase.EVALUATE, 3600.0))
    assert (first.name, first.kill, first.learned) == (120.0, 3600.0, False)
    times.learn(Phase.EVALUATE, 0.5)
    quick = times.limits(record(Phase.EVALUATE, 3600.0))
    assert (quick.name, quick.kill, quick.learned) == (30.0, 600.0, True)
    times.learn(Phase.EVALUATE, 100.0)
    long = times.limits(record(Phase.EVALUATE, 3600.0))
    assert (long.name, long.kill, long.learned) == (500.0, 2000.0, True)
    times.learn(Phase.EVALUATE, 1000.0)
    longest = times.limits(record(Phase.EVALUATE, 3600.0))
    assert (longest.name, longest.kill, longest.learned) == (3600.0, 3600.0, False)


def test_a_save_takes_what_its_rank_measured_and_not_the_moment_of_handing_it_over() -> None:
    times = PhaseTimes(Deadlines())
    for _ in range(100):
        times.learn(Phase.SAVE, 0.01)
    unknown = times.limits(record(Phase.SAVE, 3600.0))
    assert (unknown.name, unknown.kill) == (120.0, 3600.0)
    assert times.limits(record(Phase.SAVE)).kill == Deadlines().save_seconds
    known = times.limits(record(Phase.SAVE, 3600.0, usual_seconds=100))
    assert (known.name, known.kill, known.learned) == (500.0, 2000.0, True)


def test_once_asked_to_leave_a_save_has_what_it_usually_takes_and_never_much_time() -> None:
    times = PhaseTimes(Deadlines(grace_seconds=60.0))
    assert times.leave_seconds(record(Phase.FORWARD, 3600.0)) == 60.0
    assert times.leave_seconds(record(Phase.SAVE, 3600.0)) == 90.0
    assert times.leave_seconds(record(Phase.SAVE, 3600.0, usual_seconds=1)) == 60.0
    assert times.leave_seconds(record(Phase.SAVE, 3600.0, usual_seconds=40)) == 200.0
    assert times.leave_seconds(record(Phase.SAVE, 3600.0, usual_seconds=4000)) == 600.0


def test_memory_is_bounded_and_follows_the_run() -> None:
    times = PhaseTimes(Deadlines())
    for _ in range(5000):
        times.learn(Phase.DATA, 9.0)
    for _ in range(512):
        times.learn(Phase.DATA, 0.5)
    assert times.p99(Phase.DATA) == 0.5


def test_a_new_stage_has_everything_to_learn() -> None:
    times = PhaseTimes(Deadlines())
    for _ in range(100):
        times.learn(Phase.DATA, 0.001)
    fresh = replace(record(Phase.DATA), stage=1)
    assert times.limits(fresh).kill == Deadlines().unseen_seconds
    times.learn(Phase.DATA, 200.0, stage=1)
    assert times.limits(fresh).name == 1000.0
