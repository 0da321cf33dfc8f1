"""The simulated month: where Daly's assumptions hold it agrees with him, and each loss goes where it belongs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.scale.month import DAY, HOUR, MONTH, Case, Run, effective
from ups.plan.devices import effective_part

PLAIN = Case(1024, 8000.0, notice=0.0, start=300.0, save=20.0, interval=900.0)


def test_a_plain_run_keeps_what_daly_says() -> None:
    part, error, spent = effective(PLAIN, 200 * PLAIN.failure_seconds / DAY, 2)
    assert part == pytest.approx(effective_part(900.0, 20.0, 300.0, PLAIN.failure_seconds), abs=0.004 + 2 * error)
    assert set(spent) <= {"save", "saves", "fault", "lost work", "notice", "start", "slow host"}


def test_all_seconds_are_accounted_for() -> None:
    run = Run(MONTH, 3)
    part = run.until(20 * DAY)
    assert run.now == pytest.approx(20 * DAY / part)
    assert run.now == pytest.approx(20 * DAY + sum(run.spent.values()))


def test_a_late_save_loses_the_time_to_write_it() -> None:
    days = 300 * PLAIN.failure_seconds / DAY
    soon, late = (effective(replace(PLAIN, write=write), days, 2)[0] for write in (0.0, 600.0))
    assert soon - late == pytest.approx(600.0 / PLAIN.failure_seconds, rel=0.25)


def test_without_faults_and_saves_all_time_is_work() -> None:
    assert Run(Case(8, 1e12), 1).until(HOUR) == 1.0


def test_a_lost_host_is_waited_for_unless_there_is_a_spare() -> None:
    case = replace(PLAIN, lost_hosts=1.0, replace=HOUR)
    days = 50 * case.failure_seconds / DAY
    alone, spare = effective(case, days, 2)[2], effective(replace(case, spares=20), days, 2)[2]
    assert alone["hosts"] == pytest.approx(HOUR * alone["hosts lost"])
    assert spare["hosts"] == 0.0
