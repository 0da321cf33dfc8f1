"""Whether a directory that a process works in is still the one that it started in (standard library only)."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path

from ups.errors import RunDirectoryLostError


class HeldDirectory:
    """Keeps a directory open, so that another one made in its place can be distinguished from it: its number is not
    reused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def lost(self) -> str:
        """'' while the path leads to the same directory, else what happened to it.

        A file system that does not answer properly at the moment is no proof that the directory is gone.
        """
        try:
            found = os.stat(self.path)
        except OSError as error:
            gone = (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)
            return f"{self.path} was removed or moved while the run went on" if error.errno in gone else ""
        with contextlib.suppress(OSError):
            if not os.path.samestat(found, os.fstat(self._descriptor)):
                return f"{self.path} was replaced by another directory while the run went on"
        return ""

    def found(self) -> Path | None:
        """Where the directory is now; None if it was removed, or cannot be found."""
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self._descriptor}"))
            return place if os.path.samestat(os.stat(place), os.fstat(self._descriptor)) else None
        except OSError:
            return None

    def check(self) -> None:
        """Raises RunDirectoryLostError if the directory is gone."""
        lost = self.lost()
        if lost:
            raise RunDirectoryLostError(lost, hint="put the directory back where it was, then start the run again")

    def close(self) -> None:
        """Let go of the directory."""
        os.close(self._descriptor)
