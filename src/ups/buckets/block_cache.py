"""A bounded cache of blocks on disk, shared by all processes of a host.

A block is a file of its own: a header with a checksum of every page, then the bytes. It is written under a temporary
name and appears by a rename, so that nobody ever sees a part of one; a page that does not fit its checksum when it is
read makes the block count as absent. What a block belongs to is the business of `cached_objects`; where the cache lies
and how large it may be that of `cache_place`.

Locks are `flock`s, which end with their process. One lock file guards the bookkeeping: how many bytes there are, who
writes, what is evicted. A thousand others see to it that a block is fetched once, though eight readers want it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import google_crc32c

from ups.errors import DiskFullError, MachineError

logger = logging.getLogger(__name__)

# A window is 50 kB to 600 kB: larger blocks bring mostly what is not asked for, smaller ones are too many requests.
BLOCK_BYTES = 256 << 10
PAGE_BYTES = 32 << 10
# Another process may be stopped while it fetches: after so long this one fetches for itself.
LOCK_SECONDS = 5.0
NUM_LOCKS = 1024
_HEADER = struct.Struct("<8sQ")
_MAGIC = b"upsblk01"
_TEMPORARY = ".new-"
_USED_AGAIN_SECONDS = 1.0


class BlockCache:
    """Blocks below a directory, at most `limit_bytes` of them; the least recently used go first."""

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self._blocks = str(directory / "blocks")
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for name in ("blocks", "locks"):
                (directory / name).mkdir(exist_ok=True)
        except OSError as error:
            raise _trouble(directory, error) from error

    def read(self, key: str, start: int, stop: int) -> bytes | None:
        """Bytes start .. stop - 1 of a block; None if it is not here, or not what was written."""
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _trouble(self.directory, error) from error
        try:
            status = os.fstat(descriptor)
            found = _verified(descriptor, status.st_size, start, stop)
            if found is None:
                logger.warning("a block of the cache in %s is damaged; it is fetched again", self.directory)
                with contextlib.suppress(OSError):
                    os.unlink(path)
            elif time.time() - status.st_mtime > _USED_AGAIN_SECONDS:
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
            return found
        except OSError as error:
            raise _trouble(self.directory, error) from error
        finally:
            os.close(descriptor)

    def holds(self, key: str) -> bool:
        """Whether a block is here; its bytes are not looked at."""
        return os.path.exists(self._path(key))

    def fill(self, key: str, fetch: Callable[[], bytes]) -> bytes:
        """The whole block: from the disk if another process has put it there meanwhile, else fetched and kept."""
        number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little") % NUM_LOCKS
        with self._lock(f"fetch-{number:03x}", LOCK_SECONDS):
            size = self._size(key)
            found = self.read(key, 0, size) if size is not None else None
            if found is None:
                found = fetch()
                self._keep(key, found)
            return found

    def used_bytes(self) -> int:
        """What all blocks take, by looking at each."""
        return sum(size for _, size, _ in self._scan())

    def _path(self, key: str) -> str:
        return f"{self._blocks}/{key[:2]}/{key}"  # of every read: pathlib takes longer than the system call

    def _size(self, key: str) -> int | None:
        """Bytes of a block that is here."""
        try:
            with open(self._path(key), "rb") as file:
                magic, size = _HEADER.unpack(file.read(_HEADER.size))
        except (OSError, struct.error):
            return None
        return int(size) if magic == _MAGIC and size <= BLOCK_BYTES else None

    def _keep(self, key: str, data: bytes) -> None:
        content = _header(data) + data
        if len(content) > self.limit_bytes // 2:
            return
        path = self._path(key)
        try:
            descriptor, temporary = self._reserve(path, len(content))
            try:
                view = memoryview(content)
                while view:
                    view = view[os.write(descriptor, view) :]
                # No fsync: after a power cut the checksums tell, and the block is fetched again.
                os.rename(temporary, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise _trouble(self.directory, error) from error

    def _reserve(self, path: str, size: int) -> tuple[int, str]:
        """An open file of that size for a block to come, counted before the first byte of it is written."""
        with self._lock("bookkeeping", None):
            used = self._counted()
            if used is None or used + size > self.limit_bytes:
                used = self._evict(self.limit_bytes - max(size, self.limit_bytes // 10))
            folder = os.path.dirname(path)
            os.makedirs(folder, exist_ok=True)
            temporary = f"{folder}/{_TEMPORARY}{os.getpid()}-{time.monotonic_ns()}"
            descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                # Held as long as this process writes: whoever gets the lock knows that the writer is dead.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.ftruncate(descriptor, size)
                self._count(used + size)
            except BaseException:
                os.close(descriptor)
                os.unlink(temporary)
                raise
            return descriptor, temporary

    def _counted(self) -> int | None:
        """Bytes in use as last counted; after a kill it may be more than there is, never less."""
        try:
            return int((self.directory / "used").read_text())
        except (OSError, ValueError):
            return None

    def _count(self, used: int) -> None:
        temporary = self.directory / f"{_TEMPORARY}used"
        temporary.write_text(str(used))
        temporary.rename(self.directory / "used")

    def _evict(self, goal: int) -> int:
        """Remove what dead writers left, and the least recently used blocks until at most `goal` bytes are in use."""
        found = sorted(self._scan())
        used = sum(size for _, size, _ in found)
        for _, size, path in found:
            temporary = os.path.basename(path).startswith(_TEMPORARY)
            if (temporary and _writer_is_dead(path)) or (used > goal and not temporary):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                used -= size
        return used

    def _scan(self) -> Iterator[tuple[float, int, str]]:
        """(last use, bytes, path) of every block, those that are being written included."""
        with os.scandir(self.directory / "blocks") as folders:
            for folder in folders:
                with os.scandir(folder.path) as entries:
                    for entry in entries:
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield status.st_mtime, status.st_size, entry.path

    @contextlib.contextmanager
    def _lock(self, name: str, seconds: float | None) -> Iterator[None]:
        """Hold a lock; with `seconds` the block runs without it when somebody else holds it for longer."""
        try:
            descriptor = os.open(self.directory / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _trouble(self.directory, error) from error
        try:
            if seconds is None:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            else:
                _lock_within(descriptor, seconds)
            yield
        finally:
            os.close(descriptor)


def _lock_within(descriptor: int, seconds: float) -> None:
    deadline, pause = time.monotonic() + seconds, 0.001
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                return
        time.sleep(pause)
        pause = min(0.02, 2 * pause)


def _writer_is_dead(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _header(data: bytes) -> bytes:
    """What stands before the bytes: their number, a checksum of each page, and one of all that."""
    sums = [google_crc32c.value(data[at : at + PAGE_BYTES]) for at in range(0, len(data), PAGE_BYTES)]
    body = _HEADER.pack(_MAGIC, len(data)) + struct.pack(f"<{len(sums)}I", *sums)
    return body + struct.pack("<I", google_crc32c.value(body))


def _verified(descriptor: int, file_bytes: int, start: int, stop: int) -> bytes | None:
    """Bytes start .. stop - 1 of a block file; None unless every page that they touch fits its checksum."""
    fixed = os.pread(descriptor, _HEADER.size, 0)
    if len(fixed) < _HEADER.size:
        return None
    magic, size = _HEADER.unpack(fixed)
    if magic != _MAGIC or size > BLOCK_BYTES or stop > size:
        return None
    num_pages = -(-size // PAGE_BYTES)
    rest = os.pread(descriptor, 4 * num_pages + 4, _HEADER.size)
    begin = _HEADER.size + 4 * num_pages + 4
    if file_bytes != begin + size or len(rest) != 4 * num_pages + 4:
        return None
    *sums, own = struct.unpack(f"<{num_pages + 1}I", rest)
    if google_crc32c.value(fixed + rest[:-4]) != own:
        return None
    first, last = start // PAGE_BYTES, -(-stop // PAGE_BYTES)
    data = os.pread(descriptor, min(last * PAGE_BYTES, size) - first * PAGE_BYTES, begin + first * PAGE_BYTES)
    for page in range(first, last):
        at = (page - first) * PAGE_BYTES
        if google_crc32c.value(data[at : at + PAGE_BYTES]) != sums[page]:
            return None
    return data[start - first * PAGE_BYTES : stop - first * PAGE_BYTES]


def _trouble(directory: Path, error: OSError) -> MachineError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFullError(
            f"there is no space left for the cache of data in {directory}",
            hint="free some space, or set data.cache_dir or data.cache_bytes",
        )
    return MachineError(
        f"the cache of data in {directory} cannot be used: {error.strerror}",
        hint="set data.cache_dir to a place of yours",
    )
