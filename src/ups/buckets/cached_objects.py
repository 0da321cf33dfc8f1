"""Objects in buckets: which there are, ranges of their bytes by way of the cache, and an object as a file for reading.

Owns patience (a server that is gone for seconds is waited for, one that is gone for good is named) and suspicion (size,
ETag and length of each answer are compared with what was asked for). The connection itself is made by `client`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from ups.buckets.block_cache import BLOCK_BYTES, the_cache
from ups.buckets.client import bare_addresses, open_bucket, parse_bucket_url
from ups.errors import DataChangedError, StoreRefusedError, StoreUnavailableError

logger = logging.getLogger(__name__)

# Less than the shortest time after which a rank that stands still is ended (60 s).
GIVE_UP_SECONDS = 30.0
# A block that takes longer than this is asked for again.
REQUEST_SECONDS = 10.0
NUM_THREADS = 32
MAX_LISTED = 1_000_000
# While the cache has room its blocks are fetched so many bytes at a time: what lies next to a window will be asked for,
# too. Once it is full that would push out what is asked for sooner.
WIDE_BYTES = 256 << 10
# Of one request; a thread has as many files open as it has blocks.
MAX_REQUEST_BYTES = 512 << 10
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 2.0
_T = TypeVar("_T")
# Never the generator of the process: the sequence of that one belongs to whoever seeded it.
_jitter = random.SystemRandom()


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One version of an object. etag: '' where the server gives none. modified_ns: in nanoseconds since 1970."""

    url: str
    size: int
    etag: str
    modified_ns: int

    @property
    @functools.lru_cache(maxsize=4096)  # noqa: B019 - of small values
    def key(self) -> str:
        """What its blocks are kept under: another version is another object."""
        text = json.dumps([self.url, self.size, self.etag, self.modified_ns, BLOCK_BYTES])
        return hashlib.sha256(text.encode()).hexdigest()[:40]


_known: dict[str, ObjectInfo | None] = {}
_listed: dict[str, dict[str, ObjectInfo]] = {}


def object_info(url: str) -> ObjectInfo | None:
    """Size and version of an object, None if there is none; asked once by a process until `forget`."""
    if url not in _known:
        _known[url] = _ask(url)
    return _known[url]


def forget(prefix: str) -> None:
    """Ask again about the objects below an address: they may have been replaced."""
    for known in (_known, _listed):
        for url in [url for url in list(known) if url.startswith(prefix)]:
            known.pop(url, None)


def list_objects(url: str) -> dict[str, ObjectInfo]:
    """Objects below an address, by their name relative to it; asked once by a process.

    Raises StoreRefusedError where a server cannot list.
    """
    if url in _listed:
        return _listed[url]
    store, key = _store_and_key(url)
    import obstore  # after its absence was reported

    prefix = key.rstrip("/") + "/"
    if url.startswith("http"):
        raise StoreRefusedError(
            f"{url}: a web server does not say which files there are", hint="name the files, or use s3:// or gs://"
        )

    def ask() -> dict[str, ObjectInfo]:
        infos: dict[str, ObjectInfo] = {}
        for page in obstore.list(store, prefix):
            for meta in page:
                name = str(meta["path"]).removeprefix(prefix)
                infos[name] = _info(f"{url.rstrip('/')}/{name}", meta)
            if len(infos) > MAX_LISTED:
                raise StoreRefusedError(f"{url} holds more than {MAX_LISTED:,} objects", hint="name a smaller part")
        return infos

    infos = _listed[url] = _patiently(url, ask)
    _known.update({info.url: info for info in infos.values()})
    return infos


def read_range(info: ObjectInfo, start: int, stop: int) -> bytes:
    """Bytes start .. stop - 1 of an object."""
    stop = min(stop, info.size)
    if start >= stop:
        return b""
    cache, parts, missing = the_cache(), {}, []
    numbers = range(start // BLOCK_BYTES, (stop - 1) // BLOCK_BYTES + 1)
    if hasattr(_here, "blocks"):
        _here.blocks += [_block(info, number) for number in numbers]
    for number in numbers:
        begin = number * BLOCK_BYTES
        inside = (max(start - begin, 0), min(stop - begin, BLOCK_BYTES))
        part = cache.read(_block(info, number), *inside)
        if part is None:
            missing.append((number, inside))
        else:
            parts[number] = part
    if missing:
        fetched = _fetch(info, _runs(info, [number for number, _ in missing]))
        parts |= {number: fetched[number][slice(*inside)] for number, inside in missing}
    return b"".join(parts[number] for number in sorted(parts)) if len(parts) > 1 else next(iter(parts.values()))


@contextlib.contextmanager
def noted_blocks() -> Iterator[list[str]]:
    """The keys in the cache of the blocks that this thread reads inside."""
    _here.blocks = keys = list[str]()
    try:
        yield keys
    finally:
        del _here.blocks


def threads() -> ThreadPoolExecutor:
    """The threads of this process that wait for servers."""
    return _threads(os.getpid())


def _ask(url: str) -> ObjectInfo | None:
    store, key = _store_and_key(url)
    import obstore

    def ask() -> Any:
        try:
            return obstore.head(store, key)
        except obstore.exceptions.GenericError as error:
            if "Content-Length Header missing" in str(error):
                raise FileNotFoundError(url) from None  # a web server's page about a folder
            raise

    try:
        return _info(url, _patiently(url, ask))
    except FileNotFoundError:
        return None


def _info(url: str, meta: Any) -> ObjectInfo:
    # Whole seconds: a listing may know the time more precisely than the answer about one object.
    modified_ns = int(meta["last_modified"].timestamp()) * 10**9
    return ObjectInfo(url, int(meta["size"]), str(meta.get("e_tag") or ""), modified_ns)


def _block(info: ObjectInfo, number: int) -> str:
    return f"{info.key}-{number:x}"


def _runs(info: ObjectInfo, missing: list[int]) -> list[range]:
    """Blocks that follow each other, each a request; with their neighbors while the cache has room."""
    wide = WIDE_BYTES // BLOCK_BYTES
    if the_cache().has_room():
        last = -(-info.size // BLOCK_BYTES)
        missing = sorted({n for m in missing for n in range(m // wide * wide, min(m // wide * wide + wide, last))})
    runs: list[range] = []
    for number in missing:
        if runs and number == runs[-1].stop and len(runs[-1]) < MAX_REQUEST_BYTES // BLOCK_BYTES:
            runs[-1] = range(runs[-1].start, number + 1)
        else:
            runs.append(range(number, number + 1))
    return runs


def _fetch(info: ObjectInfo, runs: list[range]) -> dict[int, bytes]:
    """Blocks by number, fetched at the same time; a thread that waits for a server itself fetches in turn."""
    fill = functools.partial(_fill, info)
    alone = len(runs) == 1 or getattr(_here, "waits", False)
    filled = map(fill, runs) if alone else threads().map(fill, runs)
    by_number: dict[int, bytes] = {}
    for run, blocks in zip(runs, filled, strict=True):
        by_number.update(zip(run, blocks, strict=True))
    return by_number


def _fill(info: ObjectInfo, run: range) -> list[bytes]:
    def fetch(first: int, end: int) -> list[bytes]:
        data = _download(info, run[first] * BLOCK_BYTES, min((run[end - 1] + 1) * BLOCK_BYTES, info.size))
        return [data[at : at + BLOCK_BYTES] for at in range(0, len(data), BLOCK_BYTES)]

    return the_cache().fill([_block(info, number) for number in run], fetch)


def _download(info: ObjectInfo, start: int, stop: int) -> bytes:
    """Bytes from the server, of the version that was asked about and of the right length."""
    import obstore

    store, key = _store_and_key(info.url)
    options: dict[str, Any] = {"range": (start, stop)}
    if info.etag and not info.etag.startswith("W/"):
        options["if_match"] = info.etag

    def ask() -> bytes:
        answer = obstore.get(store, key, options=options)  # type: ignore[arg-type]
        current = _info(info.url, answer.meta)
        if (current.size, current.etag) != (info.size, info.etag):
            raise _changed(info.url)
        data = bytes(answer.bytes())
        if len(data) != stop - start:
            # A connection that was cut: as good as no answer.
            raise ConnectionError(f"{len(data)} bytes came instead of {stop - start}")
        return data

    try:
        return _patiently(info.url, ask)
    except FileNotFoundError:
        raise StoreRefusedError(
            f"{info.url} is not there any more", hint="bring the data back, or correct the path"
        ) from None


def _changed(url: str) -> DataChangedError:
    return DataChangedError(f"{url} was replaced while it was read", hint="start again when no process writes to it")


def _patiently(url: str, call: Callable[[], _T]) -> _T:
    """What a call to a server returns; again and again for GIVE_UP_SECONDS where trying again may help."""
    from obstore import exceptions

    begin, pause, said = time.monotonic(), _FIRST_PAUSE_SECONDS, False
    while True:
        try:
            return call()
        except FileNotFoundError:  # of obstore, too
            raise
        except (exceptions.PermissionDeniedError, exceptions.UnauthenticatedError) as error:
            raise StoreRefusedError(
                f"{url}: the server does not give it to these credentials: {_text(error)}",
                hint="see docs/object_stores.md for where credentials are looked for",
            ) from None
        except exceptions.PreconditionError:
            raise _changed(url) from None
        except (exceptions.BaseError, OSError) as error:
            waited = time.monotonic() - begin
            if waited + pause > GIVE_UP_SECONDS:
                raise StoreUnavailableError(
                    f"{url}: the server does not answer, for {waited:.0f} s: {_text(error)}",
                    hint="see whether the server runs and is reached from here; a run resumes where it was",
                ) from None
            if waited > 1 and not said:
                logger.warning("%s: the server does not answer; waiting up to %.0f s", url, GIVE_UP_SECONDS)
                said = True
        time.sleep(pause * (0.5 + _jitter.random()))
        pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _text(error: BaseException) -> str:
    """The first words of what a library says, on one line."""
    return bare_addresses(" ".join(str(error).split("\n\nDebug source")[0].split()))[:200]


def _store_and_key(url: str) -> tuple[Any, str]:
    """The store of an address, and the key in it."""
    address = parse_bucket_url(url)
    return _store(f"{address.scheme}://{address.host}", os.getpid()), address.prefix


@functools.lru_cache(maxsize=64)
def _store(root: str, pid: int) -> Any:
    return open_bucket(root, request_seconds=REQUEST_SECONDS, max_retries=0).store


def _mark() -> None:
    _here.waits = True


@functools.lru_cache(maxsize=1)
def _threads(pid: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="bucket", initializer=_mark)


_here = threading.local()


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
