"""One block of an object as a file: a header with a checksum of every page, then the bytes."""

from __future__ import annotations

import os
import struct

import google_crc32c

# A window is 50 kB to 600 kB: larger blocks are mostly what nobody asked for, smaller ones are too many files.
BLOCK_BYTES = 64 << 10
PAGE_BYTES = 32 << 10
_HEADER = struct.Struct("<8sQ")
# Names the block size as well: with another one the same number is another part of the object.
_MAGIC = b"upsblk02"


def with_header(data: bytes) -> bytes:
    """The content of a file: the number of bytes, a checksum of each page, one of all that, and the bytes."""
    sums = [google_crc32c.value(data[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES)]
    body = _HEADER.pack(_MAGIC, len(data)) + struct.pack(f"<{len(sums)}I", *sums)
    return body + struct.pack("<I", google_crc32c.value(body)) + data


def verified(descriptor: int, file_bytes: int, start: int, stop: int | None) -> bytes | None:
    """Bytes start .. stop - 1 of a block, or all from `start` on; None unless each page that they touch fits its
    checksum."""
    head = os.pread(descriptor, _HEADER.size + 4 * (BLOCK_BYTES // PAGE_BYTES) + 4, 0)  # of a full block
    if len(head) < _HEADER.size:
        return None
    magic, size = _HEADER.unpack_from(head)
    stop = size if stop is None else stop
    if magic != _MAGIC or size > BLOCK_BYTES or stop > size:
        return None
    num_pages = -(-size // PAGE_BYTES)
    begin = _HEADER.size + 4 * num_pages + 4
    if file_bytes != begin + size:
        return None
    *sums, own = struct.unpack_from(f"<{num_pages + 1}I", head, _HEADER.size)
    if google_crc32c.value(head[: begin - 4]) != own:
        return None
    first, last = start // PAGE_BYTES, -(-stop // PAGE_BYTES)
    data = os.pread(descriptor, min(last * PAGE_BYTES, size) - first * PAGE_BYTES, begin + first * PAGE_BYTES)
    for page in range(first, last):
        at = (page - first) * PAGE_BYTES
        if google_crc32c.value(data[at : at + PAGE_BYTES]) != sums[page]:
            return None
    return data[start - first * PAGE_BYTES : stop - first * PAGE_BYTES]
