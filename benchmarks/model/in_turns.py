"""CPU time of several candidates in turns, so that a slow moment of the machine meets all. No program of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping


def in_turns(steps: Mapping[str, Callable[[], object]], blocks: int, repeats: int) -> dict[str, list[float]]:
    """CPU-seconds of one call, for each block of each candidate; the first block warms up.

    A candidate that works in another process returns its CPU-seconds as a float.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for block in range(blocks + 1):
        for name, step in steps.items():
            start = time.process_time()
            results = [step() for _ in range(repeats)]
            elsewhere = sum(result for result in results if isinstance(result, float))
            if block:
                seconds[name].append((elsewhere or time.process_time() - start) / repeats)
    return seconds
