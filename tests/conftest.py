"""Order for every test run: fast tests first, tests that start real processes last and on a single worker.

Two process tests at once would fight for the cores, and their deadlines would measure each other. With xdist use
`-n 2 --dist loadgroup --no-loadscope-reorder`; `.ci/run` does.
"""

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist writes the groups into the test names
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("processes") is not None)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("processes") is not None:
                item.add_marker(pytest.mark.xdist_group("processes"))
