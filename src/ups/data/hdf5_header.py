"""The first bytes of an HDF5 file: that it is one, and how long it says it is. Reads them without the library."""

from __future__ import annotations

import os
from pathlib import Path

from ups.errors import FetchContentError

MAGIC = b"\x89HDF\r\n\x1a\n"
HEADER_BYTES = 64


def check_header(data: bytes, where: str) -> None:
    """Raise FetchContentError unless these bytes may begin an HDF5 file."""
    if not data.startswith(MAGIC[: len(data)]):
        raise FetchContentError(
            f"{where} is not an HDF5 file: it begins with {data[:16]!r}",
            hint="look at that address in a browser: the server may send a page in place of the file",
        )


def check_size(path: Path) -> str:
    """What is wrong with the length of an HDF5 file, by its own header; '' if nothing is."""
    with path.open("rb") as file:
        data = file.read(HEADER_BYTES)
        size = os.fstat(file.fileno()).st_size
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        return "it is no HDF5 file"
    version = data[8]
    # Where the address of the end stands: after those of the base and of the free space (0, 1) or extension (2, 3).
    place = {0: 40, 1: 44, 2: 28, 3: 28}.get(version)
    offsets = data[13] if version < 2 else data[9]
    if place is None or offsets != 8:
        return ""  # not a header that is read here; whoever opens the file judges
    end = int.from_bytes(data[place : place + 8], "little")
    return f"it says that it has {end} bytes, and {size} came" if end > size else ""
