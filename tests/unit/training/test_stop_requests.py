"""Signals become flags; after a stop was asked for, later signals are ignored."""

from __future__ import annotations

import signal

import pytest

from ups.training.progress import StopRequests


@pytest.fixture(autouse=True)
def keep_handlers():  # type: ignore[no-untyped-def]
    kept = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def test_a_signal_is_a_request_and_not_an_end() -> None:
    with StopRequests() as stop_requests:
        assert stop_requests.stop == 0
        signal.raise_signal(signal.SIGINT)
        assert stop_requests.stop == signal.SIGINT
        signal.raise_signal(signal.SIGTERM)
        assert stop_requests.stop == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_without_a_request_the_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests():
        pass
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_end_of_the_allowed_time_is_a_request_to_stop() -> None:
    assert StopRequests(max_seconds=1e-9).stop == signal.SIGTERM
    assert StopRequests(max_seconds=1e9).stop == 0


def test_a_request_to_save_is_taken_once() -> None:
    with StopRequests() as stop_requests:
        signal.raise_signal(signal.SIGUSR2)
        assert stop_requests.take_save()
        assert not stop_requests.take_save()
