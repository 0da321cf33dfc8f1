"""An object, or a folder of objects, as a path: so that readers do with a bucket what they do with a directory.

Only looking and reading; whatever else a path can do fails, because the operating system knows no such file.
"""

from __future__ import annotations

import fnmatch
import glob
import io
import os
import re
import stat
from collections.abc import Generator, Iterable
from pathlib import Path, PosixPath
from typing import Any, BinaryIO, Self, cast

from ups.buckets.cached_objects import ObjectFile, ObjectInfo, list_objects, object_info
from ups.buckets.client import is_address, parse_bucket_url


def data_path(path: str | Path) -> Path:
    """The path of data as the user wrote it: of this host, or an address in a bucket."""
    if isinstance(path, BucketPath) or not is_address(path):
        return Path(path) if isinstance(path, str) else path
    return BucketPath(str(parse_bucket_url(str(path))))


def natural(name: str) -> list[str]:
    """A key that puts run_2 before run_10."""
    return [part.zfill(20) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def matching_paths(paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """What the user wrote as path or paths of data, with the files that each pattern (runs/*.npz) means; a pattern
    that nothing matches stays."""
    names: list[str] = []
    for path in map(str, [paths] if isinstance(paths, str | os.PathLike) else paths):
        plain = is_address(path) or not glob.has_magic(path) or os.path.exists(path)
        # Statistics are kept next to the first file.
        files = () if plain else [name for name in glob.glob(path) if not name.endswith(".statistics.json")]
        names += sorted(files, key=natural) or [path]
    return names


def plain_name(path: str | Path) -> str:
    """A path as one text that stays the same wherever it is used: absolute, or the address."""
    target = data_path(path)
    return str(target) if isinstance(target, BucketPath) else os.path.abspath(target)


class BucketPath(PosixPath):
    """A path whose parts are `s3:`, the bucket and the key; its text is the address."""

    def __str__(self) -> str:
        text = super().__str__()
        if not self.parts or not self.parts[0].endswith(":"):
            return text  # relative to an address
        return text.replace(":/", "://", 1)

    def __fspath__(self) -> str:
        return str(self)

    def __repr__(self) -> str:
        return f"BucketPath('{self}')"

    def info(self) -> ObjectInfo:
        """Size and version. Raises FileNotFoundError."""
        object_ = object_info(str(self))
        if object_ is None:
            raise FileNotFoundError(2, os.strerror(2), str(self))
        return object_

    def exists(self, *, follow_symlinks: bool = True) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self, **kwargs: Any) -> bool:
        return object_info(str(self)) is not None

    def is_dir(self, **kwargs: Any) -> bool:
        """Whether objects lie below it; of a web server, which cannot list, whether it is a Zarr group."""
        if str(self).startswith("http"):
            return (self / "zarr.json").is_file()
        return not self.is_file() and bool(list_objects(str(self)))

    def is_symlink(self) -> bool:
        return False

    def absolute(self) -> Self:
        return self

    def resolve(self, strict: bool = False) -> Self:
        return self

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        info = self.info()
        seconds = info.modified_ns // 10**9
        times = (seconds, seconds, seconds, float(seconds), info.modified_ns / 1e9, float(seconds))
        nanoseconds = (info.modified_ns,) * 3
        number = int(info.key[:15], 16)
        return os.stat_result((stat.S_IFREG | 0o444, number, 0, 1, 0, 0, info.size, *times, *nanoseconds))

    def open_object(self) -> BinaryIO:
        """The object as a file for reading. Raises FileNotFoundError."""
        return cast(BinaryIO, io.BufferedReader(ObjectFile(self.info()), 1 << 16))

    def open(self, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if mode != "rb":
            raise OSError(30, os.strerror(30), str(self))
        return self.open_object()

    def read_bytes(self) -> bytes:
        with self.open_object() as file:
            return file.read()

    def glob(self, pattern: str, **kwargs: Any) -> Generator[Self, None, None]:
        """Objects and folders whose parts fit a pattern of as many parts."""
        wanted = pattern.split("/")
        seen = set()
        for name in list_objects(str(self)):
            parts = name.split("/")[: len(wanted)]
            fits = len(parts) == len(wanted) and all(map(fnmatch.fnmatchcase, parts, wanted))
            if fits and tuple(parts) not in seen:
                seen.add(tuple(parts))
                yield self.joinpath(*parts)

    def rglob(self, pattern: str, **kwargs: Any) -> Generator[Self, None, None]:
        """Objects below it whose name fits a pattern."""
        for name in list_objects(str(self)):
            if fnmatch.fnmatchcase(name.rpartition("/")[2], pattern):
                yield self / name

    def file_sizes(self, expected: Iterable[str]) -> dict[str, int]:
        """Relative name -> bytes of every object below it; of a web server, which cannot list, of those expected."""
        if not str(self).startswith("http"):
            return {name: info.size for name, info in list_objects(str(self)).items()}
        infos = {name: object_info(str(self / name)) for name in expected}
        return {name: info.size for name, info in infos.items() if info is not None}
