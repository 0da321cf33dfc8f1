"""A bounded cache of blocks on disk, shared by all processes of a host, and where it lies.

A block is a file of its own: a header with a checksum of every page, then the bytes. It is written under a temporary
name and appears by a rename, so that no reader sees a part of one; a page that does not fit its checksum when it is
read makes the block count as absent. What a block belongs to is the business of `cached_objects`.

Locks are `flock`s, which end with their process. One lock file guards the bookkeeping: how many bytes there are, who
writes, what is evicted. A thousand others see to it that a block is fetched once, though eight readers want it.
Blocks that follow each other are fetched and kept together: one request, one entry in the books.

`the_cache` is one cache for a process and all that it starts: set by `data.cache_dir` and `data.cache_bytes` of a
recipe, or by two environment variables, which ranks and workers inherit.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import logging
import os
import re
import shutil
import stat
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import google_crc32c

from ups.errors import ConfigError, DiskFullError, MachineError
from ups.record.files import try_lock
from ups.record.text import size_text

logger = logging.getLogger(__name__)

# Disks give space in pieces of this size.
_DISK_BYTES = 4096
# Another process may be stopped while it fetches: after so long this one fetches for itself.
LOCK_SECONDS = 5.0
NUM_LOCKS = 1024
_TEMPORARY = ".new-"
_NAME = re.compile(r"[0-9a-f]{40}(-[0-9a-f]+)?|\.new-\d+-\d+")
# As good as now: a block is not marked again so soon.
_USED_AGAIN_SECONDS = 0.1
_LONGEST_SECONDS = 1e7  # a time that every file system can write down
_serial = itertools.count(time.monotonic_ns())


class BlockCache:
    """Blocks below a directory, at most `limit_bytes` of them.

    The time of a file is that of its last use or, where the next one is known, of that. The farthest from now go first:
    what is used again in an hour, and what was not used for an hour.
    """

    def __init__(self, directory: Path, limit_bytes: int) -> None:
        self.directory, self.limit_bytes = directory, limit_bytes
        self._blocks, self._used = str(directory / "blocks"), str(directory / "used")
        self._roomy: bool | None = None
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            status = directory.stat()
            if status.st_uid != os.geteuid() or status.st_mode & 0o022:
                raise MachineError(
                    f"the cache of data in {directory} is not yours alone: it belongs to user {status.st_uid}, with "
                    f"mode {stat.S_IMODE(status.st_mode):o}, so others could change what is read",
                    hint=f"chmod go-w {directory}, or set data.cache_dir to a directory of your own",
                )
            for name in ("blocks", "locks"):
                (directory / name).mkdir(exist_ok=True)
        except OSError as error:
            raise _trouble(directory, error) from error

    def read(self, key: str, start: int = 0, stop: int | None = None) -> bytes | None:
        """Bytes start .. stop - 1 of a block (default all); None if it is not here, or not what was written."""
        path = self._path(key)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _trouble(self.directory, error) from error
        try:
            status = os.fstat(descriptor)
            content = verified(descriptor, status.st_size, start, stop)
            if content is None:
                logger.warning("a block of the cache in %s is damaged; it is fetched again", self.directory)
                with contextlib.suppress(OSError):
                    os.unlink(path)
            elif self._counts_use() and abs(time.time() - status.st_mtime) > _USED_AGAIN_SECONDS:
                with contextlib.suppress(OSError):
                    os.utime(descriptor)
            return content
        except OSError as error:
            raise _trouble(self.directory, error) from error
        finally:
            os.close(descriptor)

    def expect(self, key: str, seconds: float) -> None:
        """Say in how many seconds a block that was just used will be used again, where that is known."""
        when = time.time() + min(seconds, _LONGEST_SECONDS)
        with contextlib.suppress(OSError):  # it is gone, or not ours to mark
            os.utime(self._path(key), (when, when))

    def fill(self, keys: Sequence[str], fetch: Callable[[int, int], Sequence[bytes]]) -> list[bytes]:
        """Whole blocks, in order: from the disk where another process has put one there meanwhile, else kept now.

        fetch(first, end): the blocks keys[first] .. keys[end - 1]; asked once, from the first that is missing to the
        last.
        """
        deadline = time.monotonic() + LOCK_SECONDS
        with contextlib.ExitStack() as locks:
            hashes = (int.from_bytes(hashlib.sha256(key.encode()).digest()[:4], "little") for key in keys)
            for number in sorted({one % NUM_LOCKS for one in hashes}):  # one order for all: no deadlock
                locks.enter_context(self._lock(f"fetch-{number:03x}", deadline - time.monotonic()))
            contents = [self.read(key) for key in keys]
            missing = [at for at, data in enumerate(contents) if data is None]
            if missing:
                first, end = missing[0], missing[-1] + 1
                fetched = fetch(first, end)
                self._keep([(keys[at], fetched[at - first]) for at in missing])
                contents[first:end] = fetched
            return [data for data in contents if data is not None]

    def has_room(self) -> bool:
        """Whether blocks can be added for a while before others must go."""
        self._roomy = (self._counted() or 0) < self.limit_bytes * 8 // 10
        return self._roomy

    def _counts_use(self) -> bool:
        """Whether it matters which blocks are used; as far as this process knows, which looks when it fetches one."""
        return not (self.has_room() if self._roomy is None else self._roomy)

    def used_bytes(self) -> int:
        """What all blocks take, by looking at each."""
        return sum(size for _, size, _ in self._scan())

    def _path(self, key: str) -> str:
        return f"{self._blocks}/{key[:2]}/{key}"  # of every read: pathlib takes longer than the system call

    def _keep(self, blocks: Sequence[tuple[str, bytes]]) -> None:
        contents = [(self._path(key), with_header(data)) for key, data in blocks]
        if sum(len(content) for _, content in contents) > self.limit_bytes // 2:
            return
        try:
            with contextlib.ExitStack() as files:
                reserved = self._reserve([(path, len(content)) for path, content in contents], files)
                for (path, content), (descriptor, temporary) in zip(contents, reserved, strict=True):
                    view = memoryview(content)
                    while view:
                        view = view[os.write(descriptor, view) :]
                    # No fsync: after a power cut the checksums tell, and the block is fetched again.
                    os.rename(temporary, path)
        except OSError as error:
            raise _trouble(self.directory, error) from error

    def _reserve(self, wanted: Sequence[tuple[str, int]], files: contextlib.ExitStack) -> list[tuple[int, str]]:
        """An open file of its size for each block to come, counted before the first byte of it is written.

        files: closes them, and removes those that were not renamed.
        """
        total = sum(_on_disk(size) for _, size in wanted)
        reserved = []
        with self._lock("bookkeeping", None):
            used = self._counted()
            if used is None or used + total > self.limit_bytes:
                used = self._evict(self.limit_bytes - max(total, self.limit_bytes // 10))
            self._count(used + total)
            for path, size in wanted:
                folder = os.path.dirname(path)
                os.makedirs(folder, exist_ok=True)
                temporary = f"{folder}/{_TEMPORARY}{os.getpid()}-{next(_serial)}"
                descriptor = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                files.callback(_close, descriptor, temporary)
                # Held as long as this process writes: whoever gets the lock knows that the writer is dead.
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                os.ftruncate(descriptor, size)
                reserved.append((descriptor, temporary))
        return reserved

    def _counted(self) -> int | None:
        """Bytes in use as last counted; after a kill it may be more than there is, never less."""
        try:
            with open(self._used, "rb", buffering=0) as file:
                return int(file.read())
        except (OSError, ValueError):
            return None

    def _count(self, used: int) -> None:
        # In place, by one call: a rename over a file that exists makes some file systems write it to the disk first.
        descriptor = os.open(self._used, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.pwrite(descriptor, b"%020d" % used, 0)
        finally:
            os.close(descriptor)

    def _evict(self, goal: int) -> int:
        """Remove what dead writers left, and the farthest from now until at most `goal` bytes are in use."""
        now = time.time()
        blocks = sorted(self._scan(), key=lambda block: -abs(now - block[0]))
        used = sum(size for _, size, _ in blocks)
        for _, size, path in blocks:
            temporary = os.path.basename(path).startswith(_TEMPORARY)
            if (temporary and _writer_is_dead(path)) or (used > goal and not temporary):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                used -= size
        return used

    def _scan(self) -> Iterator[tuple[float, int, str]]:
        """(last or next use, bytes, path) of every block, those that are being written included.

        Only what has the name of a block: the user may have put the cache where other files are.
        """
        with os.scandir(self._blocks) as folders:
            for folder in (one for one in folders if len(one.name) == 2 and one.is_dir(follow_symlinks=False)):
                with os.scandir(folder.path) as entries:
                    for entry in (one for one in entries if _NAME.fullmatch(one.name)):
                        if not entry.name.startswith((folder.name, _TEMPORARY)):
                            continue
                        with contextlib.suppress(FileNotFoundError):
                            status = entry.stat(follow_symlinks=False)
                            yield status.st_mtime, _on_disk(status.st_size), entry.path

    @contextlib.contextmanager
    def _lock(self, name: str, seconds: float | None) -> Iterator[None]:
        """Hold a lock; with `seconds` the block runs without it when another process holds it for longer."""
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


def _on_disk(size: int) -> int:
    return -(-size // _DISK_BYTES) * _DISK_BYTES


def _close(descriptor: int, temporary: str) -> None:
    os.close(descriptor)
    with contextlib.suppress(OSError):
        os.unlink(temporary)


def _lock_within(descriptor: int, seconds: float) -> None:
    deadline, pause = time.monotonic() + seconds, 0.001
    while not try_lock(descriptor) and time.monotonic() <= deadline:
        time.sleep(pause)
        pause = min(0.02, 2 * pause)


def _writer_is_dead(path: str) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return try_lock(descriptor)
    finally:
        os.close(descriptor)


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


# A window is 50 kB to 600 kB: larger blocks are mostly bytes without a request, smaller ones are too many files.
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


DIRECTORY = "UPS_DATA_CACHE_DIR"
LIMIT = "UPS_DATA_CACHE_BYTES"
# Without a limit of one's own: half of what the disk has left, and never more than this.
MOST_BYTES = 64 << 30
LEAST_BYTES = 16 << 20


def use_cache(directory: str | None, limit_bytes: int | None) -> None:
    """Make what a recipe says the cache of this process and of those that it starts; None leaves a setting as it is."""
    if directory is not None:
        os.environ[DIRECTORY] = os.path.abspath(os.path.expanduser(directory))
    if limit_bytes is not None:
        os.environ[LIMIT] = str(limit_bytes)


def the_cache() -> BlockCache:
    """The cache of this process. Raises MachineError if its disk is too small for it."""
    return _open(os.environ.get(DIRECTORY) or _default(), os.environ.get(LIMIT) or "", os.getpid())


def _default() -> str:
    root = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not os.path.isabs(root):
        raise MachineError("there is no home for a cache of data", hint=f"set data.cache_dir, or {DIRECTORY}")
    return os.path.join(root, "ups", "objects")


@functools.lru_cache(maxsize=8)
def _open(directory: str, limit: str, pid: int) -> BlockCache:
    path = Path(directory)
    cache = BlockCache(path, LEAST_BYTES)  # makes the directory
    room = shutil.disk_usage(path).free + cache.used_bytes()
    # Never less than what it needs to work at all: a disk without that much room is refused.
    cache.limit_bytes = _number(limit) if limit else max(LEAST_BYTES, min(MOST_BYTES, room // 2))
    if cache.limit_bytes > room:
        raise MachineError(
            f"the cache of data may take {size_text(cache.limit_bytes)}, and the disk of {path} has room for "
            f"{size_text(room)}",
            hint="free some space, or set data.cache_bytes lower or data.cache_dir to another disk",
        )
    return cache


def _number(limit: str) -> int:
    num_bytes = int(limit) if limit.isdecimal() else 0
    if num_bytes < LEAST_BYTES:
        raise ConfigError(f"{LIMIT} must be a number of bytes, {LEAST_BYTES} or more")
    return num_bytes
