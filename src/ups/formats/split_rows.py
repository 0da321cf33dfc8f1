"""Which rows of which file are the trajectories of a split, where a data set is made of several files."""

from __future__ import annotations

import bisect
from itertools import accumulate


class SplitRows:
    """starts, counts: split -> first row and number of rows in each file, as `split_counts` gives them."""

    def __init__(self, starts: dict[str, list[int]], counts: dict[str, list[int]]) -> None:
        self.starts, self.counts = starts, counts
        self._ends = {split: list(accumulate(numbers)) for split, numbers in counts.items()}

    @property
    def totals(self) -> dict[str, int]:
        """Trajectories of each split."""
        return {split: ends[-1] for split, ends in self._ends.items()}

    def locate(self, split: str, trajectory: int) -> tuple[int, int]:
        """Number of the file of a trajectory, and its row in there."""
        ends = self._ends[split]
        number = bisect.bisect_right(ends, trajectory)
        before = ends[number - 1] if number else 0
        return number, self.starts[split][number] + trajectory - before
