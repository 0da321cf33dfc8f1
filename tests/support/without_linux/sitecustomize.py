"""Run at the start of Python: takes away what Linux has and macOS lacks, in the C library and in Python's modules."""

import ctypes
import os
import resource
import select
import signal
import socket
import time

SYMBOLS = {"prctl", "renameat2", "syscall"}
NAMES = {
    os: (
        *("sched_getaffinity", "sched_setaffinity", "memfd_create", "MFD_CLOEXEC", "pidfd_open", "posix_fadvise"),
        *("posix_fallocate", "copy_file_range", "splice", "eventfd", "O_DIRECT", "O_TMPFILE", "O_PATH", "getrandom"),
        *("sched_setscheduler", "SCHED_BATCH", "SCHED_IDLE", "setns", "unshare", "getxattr", "setxattr", "pipe2"),
    ),
    select: ("epoll",),
    signal: ("pidfd_send_signal", "SIGRTMIN", "SIGRTMAX", "sigtimedwait", "sigwaitinfo"),
    socket: ("SO_PEERCRED", "SOCK_CLOEXEC", "SOCK_NONBLOCK"),
    time: ("CLOCK_BOOTTIME", "CLOCK_TAI"),
    resource: ("prlimit",),
}


class Library(ctypes.CDLL):
    """A C library without these symbols."""

    def __getattr__(self, name: str) -> object:
        if name in SYMBOLS:
            raise AttributeError(f"dlsym: symbol not found: {name}")
        return super().__getattr__(name)


ctypes.CDLL = Library  # type: ignore[misc]
for module, names in NAMES.items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
