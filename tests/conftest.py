"""Order for every test run: fast tests first, then tests that start real processes, on one worker for each kind.

Tests with several ranks (tests/distributed, tests/faults) run one by one: two at once would fight for the cores,
and their deadlines would measure each other. The other tests with processes start one command at a time and leave a
core free, so they run next to them. With xdist use `-n 2 --dist loadgroup --no-loadscope-reorder`; `.ci/run` does.
"""

from pathlib import Path

import pytest

WITH_RANKS = {"distributed", "faults"}


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the test names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("processes") is not None)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("processes") is not None:
                folder = item.path.relative_to(Path(__file__).parent).parts[0]
                item.add_marker(pytest.mark.xdist_group("ranks" if folder in WITH_RANKS else "commands"))
