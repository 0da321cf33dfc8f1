"""The bytes of an object in a bucket as an array would show them: what a map of a local file is to the readers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ups.buckets.cached_objects import ObjectInfo, bring, object_info, read_range
from ups.errors import DataError


class ObjectBytes:
    """Slices of an object, each a new read-only array of bytes."""

    def __init__(self, url: str) -> None:
        info = object_info(url)
        if info is None:
            raise DataError(f"{url} is missing", hint="the store is incomplete: copy it again")
        self.info: ObjectInfo = info

    def __len__(self) -> int:
        return self.info.size

    def __getitem__(self, place: slice) -> npt.NDArray[np.uint8]:
        start, stop, _ = place.indices(self.info.size)
        return np.frombuffer(read_range(self.info, start, stop), np.uint8)

    def bring(self, start: int, stop: int) -> list[str]:
        """Bring a slice into the cache of this host; returns the keys of its blocks there."""
        return bring(self.info, start, stop)
