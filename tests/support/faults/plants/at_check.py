"""Breaks a part of the product inside a probe of the doctor, to show that its check notices."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

# Names a file of this folder; for processes that find this folder in PYTHONPATH.
VARIABLE = "PLANTED_FAULT"


def plant_at_check(plant: str) -> None:
    """Import the module `plant` when the first check of this process has begun."""
    from ups.doctor.probes import check

    begin = check.begin_check

    @contextlib.contextmanager
    def begin_planted(name: str) -> Iterator[Any]:
        with begin(name) as report:
            importlib.import_module(plant)
            yield report

    check.begin_check = begin_planted
