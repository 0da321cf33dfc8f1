"""The background thread: made once, one piece of work at a time, and what it raises reaches whoever waits."""

from __future__ import annotations

import threading

import pytest

from ups.training.checkpoint import BackgroundThread


def test_all_work_runs_in_one_thread_and_errors_reach_the_one_who_waits() -> None:
    background = BackgroundThread("test")
    seen: list[int] = []
    for _ in range(3):
        background.hand_over(lambda: seen.append(threading.get_ident()))
        background.wait()
    assert len(seen) == 3
    assert len({*seen, threading.get_ident()}) == 2

    def fail() -> None:
        raise KeyboardInterrupt("planted")

    background.hand_over(fail)
    with pytest.raises(KeyboardInterrupt, match="planted"):
        background.wait()
    background.hand_over(lambda: seen.append(0))
    background.wait()
    assert seen[-1] == 0
    background.close()


def test_work_is_not_piled_up() -> None:
    background = BackgroundThread("test")
    release = threading.Event()
    background.hand_over(lambda: release.wait(20) and None)
    with pytest.raises(RuntimeError, match="was not waited for"):
        background.hand_over(lambda: None)
    release.set()
    background.wait()
    background.close()
