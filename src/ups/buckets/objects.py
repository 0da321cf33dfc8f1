"""Reading and writing the objects below the prefix of a bucket: bounded, and with errors of ups.

An object appears whole or not at all; that a directory of several does is for `run_copy.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ups.buckets.client import Bucket, is_plain_key
from ups.errors import BucketError, IntegrityError
from ups.record.manifest import FileHash

_CHUNK_BYTES = 4 * 2**20


def put(bucket: Bucket, name: str, content: bytes | Path) -> None:
    """Write one object, from memory or from a file; a large file goes in parts."""
    import obstore

    with _errors(bucket, f"writing {name}"):
        obstore.put(bucket.store, bucket.key(name), content, max_concurrency=2)


def get(bucket: Bucket, name: str, limit: int) -> bytes | None:
    """The content of an object, None if there is none. Raises IntegrityError for more than `limit` bytes."""
    import obstore

    with _errors(bucket, f"reading {name}"):
        try:
            found = obstore.get(bucket.store, bucket.key(name))
        except FileNotFoundError:
            return None
        if found.meta["size"] > limit:
            raise IntegrityError(
                f"{bucket.url}/{name} has {found.meta['size']} bytes, and more than {limit} are not read"
            )
        return bytes(found.bytes())


def get_file(bucket: Bucket, name: str, expected: FileHash, target: Path) -> None:
    """Copy an object into a new file. Raises IntegrityError unless it has the expected size and hash."""
    import obstore

    digest, size = hashlib.sha256(), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    with _errors(bucket, f"reading {name}"), target.open("xb") as file:
        try:
            found = obstore.get(bucket.store, bucket.key(name))
        except FileNotFoundError:
            raise IntegrityError(f"{bucket.url}/{name} is missing") from None
        if found.meta["size"] != expected.size:
            raise IntegrityError(f"{bucket.url}/{name} has {found.meta['size']} bytes, committed was {expected.size}")
        for part in found.stream(min_chunk_size=_CHUNK_BYTES):
            size += len(part)
            if size > expected.size:  # a server that lies about the size must not fill the disk
                raise IntegrityError(f"{bucket.url}/{name} is longer than {expected.size} bytes")
            digest.update(part)
            file.write(part)
    if digest.hexdigest() != expected.sha256 or size != expected.size:
        raise IntegrityError(f"{bucket.url}/{name} is not what was committed: its hash is {digest.hexdigest()[:12]}...")


def names(bucket: Bucket, folder: str = "") -> dict[str, int]:
    """Name below the prefix -> size, of every object in `folder`. Names that cannot be files there are left out."""
    import obstore

    start = bucket.key(folder) if folder else bucket.prefix
    found: dict[str, int] = {}
    with _errors(bucket, f"listing {folder or 'the prefix'}"):
        for batch in obstore.list(bucket.store, start or None):
            for entry in batch:
                name = entry["path"].removeprefix(f"{bucket.prefix}/" if bucket.prefix else "")
                if is_plain_key(name):
                    found[name] = entry["size"]
    return found


def delete(bucket: Bucket, *doomed: str) -> None:
    """Remove objects in the given order, one request each: not all servers know how to remove many."""
    import obstore

    for name in doomed:
        with _errors(bucket, f"removing {name}"):
            try:
                obstore.delete(bucket.store, bucket.key(name))
            except FileNotFoundError:
                continue


@contextmanager
def _errors(bucket: Bucket, doing: str) -> Iterator[None]:
    from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

    try:
        yield
    except (PermissionDeniedError, UnauthenticatedError) as error:
        raise BucketError(
            f"{bucket.url}: {doing} is not allowed",
            hint="check the credentials in the environment, and what they may do with this bucket",
        ) from error
    except BaseError as error:
        # The first line alone: what follows describes the client.
        text = " ".join(str(error).partition("\n")[0].split())[:300]
        raise BucketError(f"{bucket.url}: {doing} failed: {text}") from error
    except OSError as error:  # of the file on this side
        raise BucketError(f"{bucket.url}: {doing} failed: {error.strerror or error}") from error
