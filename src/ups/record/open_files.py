"""The limit on open files of this process: raised before a run starts, and asked for by the doctor."""

from __future__ import annotations

import contextlib
import resource

_UNLIMITED = 2**62
# Far above what a run needs. Some hosts have a hard limit of a thousand million, and programs that walk through all
# numbers up to the limit (to close what they inherited) would then take minutes to start.
MAX_OPEN_FILES = 2**20


def raise_open_files(needed: int = MAX_OPEN_FILES) -> tuple[int, int]:
    """Raise the soft limit of this process, which its children inherit, to `needed` where the hard limit allows it.

    Returns (soft, hard) as they are then. A soft limit of 1024 is the usual default, kept for the sake of old programs.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return (
        soft if soft != resource.RLIM_INFINITY else _UNLIMITED,
        hard if hard != resource.RLIM_INFINITY else _UNLIMITED,
    )
