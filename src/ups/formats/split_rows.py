"""Which trajectories of files without splits are to train, to validate and to test: the one rule, for every format."""

from __future__ import annotations

import bisect
import math
from itertools import accumulate

from ups.formats.base import SPLITS

# Of fewer test trajectories not even equal signs of all differences are significant (sign test, 5 %); so many are only
# held out where enough are left to train on.
LEAST_TEST = 6
LEAST_TO_SPLIT = 24


def split_counts(
    counts: list[int], valid_fraction: float, test_fraction: float
) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """First row and number of rows of each split in each file.

    The wanted totals are rounded up over all files so far, so that files of four trajectories still give one in ten,
    and at least one trajectory of every file goes to train. Where there are LEAST_TO_SPLIT, at least LEAST_TEST of them
    are for the test, unless none is wanted.
    """
    if test_fraction > 0 and sum(counts) >= LEAST_TO_SPLIT:
        test_fraction = max(test_fraction, LEAST_TEST / sum(counts))
    starts: dict[str, list[int]] = {s: [] for s in SPLITS}
    numbers: dict[str, list[int]] = {s: [] for s in SPLITS}
    seen = valid_given = test_given = 0
    for count in counts:
        seen += count
        test = max(0, min(math.ceil(seen * test_fraction - 1e-9) - test_given, count - 1))
        valid = max(0, min(math.ceil(seen * valid_fraction - 1e-9) - valid_given, count - 1 - test))
        train = count - valid - test
        test_given, valid_given = test_given + test, valid_given + valid
        for split, start, number in (("train", 0, train), ("valid", train, valid), ("test", train + valid, test)):
            starts[split].append(start)
            numbers[split].append(number)
    return starts, numbers


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
