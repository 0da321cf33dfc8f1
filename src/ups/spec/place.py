"""Where a rank stands. Made only by `ups.distributed.runtime` (and by tests)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DeviceKind = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's position in the world.

    A loader takes a `Place`, and only a started runtime makes one: a loader built before the process group exists is
    a type error, not a race in which every rank reads the same data.
    """

    rank: int
    world_size: int
    local_rank: int = 0
    local_world_size: int = 1
    device_kind: DeviceKind = "cpu"

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} is not in a world of {self.world_size}")
        if not 0 <= self.local_rank < self.local_world_size:
            raise ValueError(f"local rank {self.local_rank} is not among {self.local_world_size} local ranks")
