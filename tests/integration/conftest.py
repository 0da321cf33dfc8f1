"""What the tests of installed packages share: the wheel is built once."""

from pathlib import Path

import pytest

from tests.integration.environments import build_wheel


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))
