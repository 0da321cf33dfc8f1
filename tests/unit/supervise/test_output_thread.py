"""Whoever reads the supervisor's lines, or stops reading them, does not hold up the watch."""

import threading
import time

from ups.supervise.supervisor_process import OutputThread


def test_lines_come_in_order_and_all_before_the_end() -> None:
    heard: list[str] = []
    with OutputThread(heard.append) as output:
        for number in range(100):
            output.say(str(number))
    assert heard == [str(number) for number in range(100)]


def test_a_closed_pipe_is_no_error() -> None:
    def broken(line: str) -> None:
        raise BrokenPipeError(line)

    with OutputThread(broken) as output:
        output.say("FAILED")
        output.say("VERDICT")


def test_a_reader_that_does_not_read_costs_nothing() -> None:
    halted = threading.Event()

    def halt(line: str) -> None:
        halted.wait(30)

    began = time.monotonic()
    with OutputThread(halt) as output:
        for _ in range(5000):
            output.say("SLOW")
        assert time.monotonic() - began < 1.0
        halted.set()
