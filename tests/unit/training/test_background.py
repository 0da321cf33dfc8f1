"""The background thread: made once, and what its work returns or raises reaches whoever waits."""

from __future__ import annotations

import threading

import pytest

from ups.training.checkpoint import BackgroundThread, Saved


def test_all_work_runs_in_one_thread_and_errors_reach_the_one_who_waits() -> None:
    background = BackgroundThread("test")
    seen: list[int] = []

    def work() -> Saved:
        seen.append(threading.get_ident())
        return Saved(len(seen), "")

    assert [background.hand_over(work).result().step for _ in range(3)] == [1, 2, 3]
    assert len({*seen, threading.get_ident()}) == 2

    def fail() -> Saved:
        raise KeyboardInterrupt("planted")

    with pytest.raises(KeyboardInterrupt, match="planted"):
        background.hand_over(fail).result()
    assert background.hand_over(work).result().step == 4
    background.close()
