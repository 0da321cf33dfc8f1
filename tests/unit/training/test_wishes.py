"""Signals become flags; after a stop was asked for, later signals are ignored."""

from __future__ import annotations

import signal

import pytest

from ups.training.wishes import Wishes


@pytest.fixture(autouse=True)
def keep_handlers():  # type: ignore[no-untyped-def]
    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_signal_is_a_wish_and_not_an_end() -> None:
    with Wishes() as wishes:
        assert wishes.stop == 0
        signal.raise_signal(signal.SIGINT)
        assert wishes.stop == signal.SIGINT
        signal.raise_signal(signal.SIGTERM)
        assert wishes.stop == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_without_a_wish_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Wishes():
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_end_of_the_allowed_time_is_a_wish_to_stop() -> None:
    assert Wishes(max_seconds=1e-9).stop == signal.SIGTERM
    assert Wishes(max_seconds=1e9).stop == 0


def test_a_wish_to_save_is_taken_once() -> None:
    with Wishes() as wishes:
        signal.raise_signal(signal.SIGUSR2)
        assert wishes.take_save()
        assert not wishes.take_save()
