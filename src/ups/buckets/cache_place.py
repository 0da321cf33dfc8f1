"""Where blocks of objects are kept on this host, and how many: one cache for a process and all that it starts.

Set by `data.cache_dir` and `data.cache_bytes` of a recipe, or by two variables of the environment, through which ranks,
workers and guards come to know it.
"""

from __future__ import annotations

import functools
import os
import shutil
from pathlib import Path

from ups.buckets.block_cache import BlockCache
from ups.errors import ConfigError, MachineError
from ups.record.text import size_text

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
    if limit:
        cache.limit_bytes = _number(limit)
        if cache.limit_bytes > room:
            raise MachineError(
                f"the cache of data may take {size_text(cache.limit_bytes)}, and the disk of {path} has room for "
                f"{size_text(room)}",
                hint="set data.cache_bytes lower, or data.cache_dir to another disk",
            )
        return cache
    cache.limit_bytes = min(MOST_BYTES, room // 2)
    if cache.limit_bytes < LEAST_BYTES:
        raise MachineError(
            f"the disk of {path} has no room for a cache of data: {size_text(room)} are left",
            hint="free some space, or set data.cache_dir to another disk",
        )
    return cache


def _number(limit: str) -> int:
    try:
        found = int(limit)
    except ValueError:
        found = -1
    if found < LEAST_BYTES:
        raise ConfigError(f"{LIMIT} must be a number of bytes, {LEAST_BYTES} or more")
    return found
