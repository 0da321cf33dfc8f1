"""Deadlines: slow is not dead, and silence is measured against what the phase took before."""

from dataclasses import replace

from ups.record.blackbox import Mark, Phase, Record
from ups.supervise.deadlines import Deadlines, PhaseTimes


def record(phase: Phase, deadline_seconds: float = 0.0) -> Record:
    return Record(1, 0, phase, 5, 0, 0, 0, 0, deadline_seconds, 0.0, 10, Mark.NONE)


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


def test_a_declared_deadline_is_kept_whatever_was_learnt() -> None:
    times = PhaseTimes(Deadlines())
    for _ in range(100):
        times.learn(Phase.SAVE, 0.01)
        times.learn(Phase.FORWARD, 0.01)
    for phase in (Phase.SAVE, Phase.EVALUATE, Phase.FORWARD):
        limits = times.limits(record(phase, 300.0))
        assert (limits.name, limits.kill, limits.declared) == (300.0, 300.0, True)


def test_a_save_without_a_declaration_is_not_measured_by_earlier_saves() -> None:
    times = PhaseTimes(Deadlines())
    for _ in range(100):
        times.learn(Phase.SAVE, 0.01)
    assert times.limits(record(Phase.SAVE)).kill == Deadlines().save_seconds


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
