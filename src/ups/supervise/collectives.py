"""Did all ranks issue the same collectives? Compares number, step and name of each, as the ranks recorded them.

A rank that skips a collective pairs its next one with another one of its peers: with luck the sizes differ and gloo
aborts a rank, often the wrong one; without luck sums are silently wrong. Both show here first. Only collectives that
carry a name (`BlackBox.issue`) are compared, and only between the ranks of this host.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from ups.record.blackbox import Record

_MEMORY = 512


@dataclass(frozen=True, slots=True)
class Mismatch:
    """`rank` issued `operation` as its collective `number`, where its peers issued `expected`."""

    rank: int
    number: int
    step: int
    phase: str
    operation: str
    expected: str
    expected_step: int
    time_ns: int


@dataclass(frozen=True, slots=True)
class _Issued:
    number: int
    step: int
    phase: str
    operation: str
    time_ns: int

    @property
    def key(self) -> tuple[int, str]:
        return (self.step, self.operation)


@dataclass(slots=True)
class CollectiveLog:
    """The last named collectives of each rank."""

    _issued: dict[int, dict[int, _Issued]] = field(default_factory=dict)

    def add(self, rank: int, record: Record, operation: str) -> Mismatch | None:
        """Take note of a collective; the mismatch that it reveals, if any."""
        if not operation or not record.collective:
            return None
        own = self._issued.setdefault(rank, {})
        if record.collective in own:
            return None
        own[record.collective] = _Issued(record.collective, record.step, record.phase.label, operation, record.time_ns)
        if len(own) > _MEMORY:
            del own[next(iter(own))]
        return self._compare(record.collective)

    def _compare(self, number: int) -> Mismatch | None:
        issued = {rank: log[number] for rank, log in self._issued.items() if number in log}
        counts = Counter(entry.key for entry in issued.values())
        if len(counts) < 2:
            return None
        (common, most), (_, second) = counts.most_common(2)
        if most > second:
            odd = [rank for rank, entry in issued.items() if entry.key != common]
        else:
            # No majority: the odd one is whose step from the collective before to this one was made least often.
            habit = {rank: self._times_made(rank, number) for rank in issued}
            least = min(habit.values())
            odd = [rank for rank in issued if habit[rank] == least]
            if len(odd) == len(issued):
                odd = [max(issued, key=lambda rank: issued[rank].step)]
        rank = min(odd)
        others = [entry for other, entry in issued.items() if other not in odd] or [
            entry for other, entry in issued.items() if other != rank
        ]
        wrong, expected = issued[rank], others[0]
        return Mismatch(
            rank, number, wrong.step, wrong.phase, wrong.operation, expected.operation, expected.step, wrong.time_ns
        )

    def _times_made(self, rank: int, number: int) -> int:
        """How often any rank went from the same collective to the same one before, in the same or the next step."""

        def move(log: dict[int, _Issued], at: int) -> tuple[str, str, int] | None:
            if at - 1 not in log or at not in log:
                return None
            before, after = log[at - 1], log[at]
            return (before.operation, after.operation, after.step - before.step)

        made = move(self._issued[rank], number)
        return sum(move(log, at) == made for log in self._issued.values() for at in log if at < number)
