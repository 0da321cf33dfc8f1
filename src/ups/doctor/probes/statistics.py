"""The statistics that the check `data` keeps for the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

STATISTICS_NAME = "statistics.json"


def read_statistics(path: Path) -> dict[str, Any]:
    """By task, as `Statistics.to_json` wrote them."""
    found: dict[str, Any] = json.loads((path / STATISTICS_NAME).read_text())
    return found
