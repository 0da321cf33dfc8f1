"""An object in a bucket as a file for reading, as h5py and others want one."""

from __future__ import annotations

import io
import os
from typing import Any

from ups.buckets.cached_objects import ObjectInfo, read_range


class ObjectFile(io.RawIOBase):
    """Bytes of one version of an object; every read goes through the cache."""

    def __init__(self, info: ObjectInfo) -> None:
        super().__init__()
        self.info, self._at = info, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.info.size}[whence]
        if base + offset < 0:
            raise ValueError("a place before the beginning of the object")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        data = read_range(self.info, self._at, self._at + len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)
