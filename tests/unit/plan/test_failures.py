"""The expected part of useful time agrees with runs that fail at random, and Young's interval is near the best."""

from __future__ import annotations

import random

import pytest

from ups.plan.devices import effective_part, outlook, young_interval


def simulated(interval: float, save: float, restart: float, between: float, work: float) -> float:
    """Useful part of a long run with exponential failures, which may also hit restarts and saves."""
    draw = random.Random(5)
    clock, done = 0.0, 0.0
    until = draw.expovariate(1 / between)
    need = interval + save
    while done < work:
        if until >= need:
            clock, until, done, need = clock + need, until - need, done + interval, interval + save
        else:
            clock, until, need = clock + until, draw.expovariate(1 / between), restart + interval + save
    return done / clock


@pytest.mark.parametrize(("interval", "save", "restart"), [(60.0, 2.0, 30.0), (400.0, 5.0, 100.0), (20.0, 1.0, 5.0)])
def test_expected_part_agrees_with_random_failures(interval: float, save: float, restart: float) -> None:
    expected = effective_part(interval, save, restart, 1000.0)
    assert expected == pytest.approx(simulated(interval, save, restart, 1000.0, 3e6), rel=0.01)


def test_youngs_interval_is_within_a_percent_of_the_best() -> None:
    best = max(effective_part(float(t), 3.0, 60.0, 5000.0) for t in range(10, 2000, 5))
    assert effective_part(young_interval(3.0, 5000.0), 3.0, 60.0, 5000.0) == pytest.approx(best, rel=0.01)


def test_more_devices_fail_more_often() -> None:
    one, many = (outlook(n, 1000.0, 1.0, 60.0) for n in (1, 1000))
    assert many.failure_seconds == one.failure_seconds / 1000
    assert many.effective < one.effective <= 1


def test_a_save_costs_what_is_printed_and_nothing_more() -> None:
    """0.0816 ms on 8 GPUs, each of which fails every 50,677 h: sqrt(2 x 0.0816e-3 x 2.28e7 s) are 61 s."""
    ahead = outlook(8, 50_677.0, 0.0816e-3, 120.0)
    assert ahead.interval_seconds == pytest.approx(61.0, rel=0.01)
    often = outlook(8, 50_677.0, 0.0816e-3, 120.0, interval=0.204)
    assert often.effective == pytest.approx(1 - 0.0816e-3 / 0.204 - 120 / 2.28e7, rel=1e-5)
