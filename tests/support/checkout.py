"""Where this checkout is, and what programs of `tests.support` need to be found by a process that the tests start."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def path_with(*folders: Path) -> dict[str, str]:
    """PYTHONPATH with the checkout and these folders first. Ranks and loader workers start with a safe path."""
    before = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([*map(str, folders), str(ROOT), *([before] if before else [])])}
