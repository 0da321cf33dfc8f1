"""Order for every test run: fast tests first, then tests that start real processes.

With xdist use `-n 3 --dist worksteal`, as `.ci/run` does: tests of a file stay on one worker as long as there is enough
to do, so that what a file prepares once is prepared once. Three tests with processes may run at a time on two cores,
because most of them wait for something: their deadlines are against hanging, and what they assert must hold on a busy
machine.
"""

import signal

import pytest

# A shell ignores SIGINT for its background jobs, and children keep that: tests of signals would fail there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("processes") is not None)
