"""Published data sets, and how one is downloaded: several files at once, each resumed, checked and only then named.

    fetch("pdebench/burgers1d", Path("data"), only=["*Nu0.01*"]).paths

The catalog (PDEBench with MD5 hashes, The Well without) comes with the package. One file is downloaded by
`ups.data.download`; files that are there already are not downloaded again. A directory `.fetch` beside the files holds
partial files and the list of verified ones.
"""

from __future__ import annotations

import csv
import fnmatch
import functools
import json
import logging
import os
import shutil
import threading
import urllib.parse
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ups.buckets.client import holds_secret
from ups.data import download
from ups.data.download import RemoteFile
from ups.errors import ConfigError, DataError, DiskFullError, FetchContentError, UpsError
from ups.record.files import hold_partial, machine_errors, read_object, write_file_atomically
from ups.record.text import size_text

JOBS = 4
PARTIAL = ".fetch"
POLL_SECONDS = 0.2
# Of what is known about whole files: some 200 bytes for each of at most a few hundred files.
_VERIFIED_BYTES = 1 << 20

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file that is to be here. size: None if the server does not say."""

    file: RemoteFile
    target: Path
    size: int | None
    present: bool

    @property
    def missing(self) -> int:
        """Bytes that are to come, as far as known; those of a partial file among them."""
        return 0 if self.present else self.size or 0


@dataclass(frozen=True, slots=True)
class Fetched:
    """path: of the data set, which a task of a recipe can name. paths: of its files. num_fetched: how many came now."""

    name: str
    path: Path
    paths: tuple[Path, ...]
    num_bytes: int
    num_fetched: int


def plan(name: str, out: Path, *, only: Sequence[str] = (), mirror: str | None = None) -> list[Wanted]:
    """The files of a data set, which of them are here, and the size of the others by asking the server.

    only: patterns of paths such as `*beta0.4*` or `data/train/*`. mirror: an address to fetch from instead.
    """
    chosen = find(name)
    files = choose(chosen, only, mirror)
    folder = out / chosen.name
    verified = _verified(folder)
    stop = threading.Event()
    with ThreadPoolExecutor(JOBS) as pool:
        try:
            return list(pool.map(lambda file: _wanted(file, folder, verified, stop), files))
        finally:
            stop.set()  # interrupted, or one of them failed: the pool waits for those that are being asked for


def fetch(
    name: str,
    out: Path,
    *,
    only: Sequence[str] = (),
    mirror: str | None = None,
    jobs: int = JOBS,
    progress: Progress | None = None,
) -> Fetched:
    """Bring a data set to `out`/NAME, or what of it is missing there. progress: told bytes here, and bytes in all.

    Raises FetchRefusedError, FetchUnavailableError, FetchContentError, FetchChangedError, DiskFullError or another
    UpsError; files that are whole by then stay, and a second call continues the others.
    """
    wanted = plan(name, out, only=only, mirror=mirror)
    folder = out / find(name).name
    with hold_partial(folder / PARTIAL, f"fetching {find(name).name}"):
        missing = [one for one in wanted if not one.present]
        _check_space(folder, missing)
        _Work(folder, missing, jobs, progress, sum(one.size or 0 for one in wanted)).run()
    paths = tuple(one.target for one in wanted)
    return Fetched(find(name).name, folder, paths, sum(path.stat().st_size for path in paths), len(missing))


class _Work:
    """The files that are missing, fetched by a few threads."""

    def __init__(
        self, folder: Path, missing: list[Wanted], jobs: int, progress: Progress | None, all_bytes: int
    ) -> None:
        self._folder, self._missing, self._jobs = folder, missing, jobs
        self._progress, self._all_bytes = progress, all_bytes
        self._there = all_bytes - sum(one.missing for one in missing)
        self._bytes: dict[str, int] = {}
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._known, self._num_fetched = _verified(folder), 0

    def run(self) -> None:
        errors: list[UpsError] = []
        with ThreadPoolExecutor(self._jobs) as pool:
            waiting: set[Future[None]] = {pool.submit(self._one, wanted) for wanted in self._missing}
            try:
                while waiting:
                    done, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
                    if self._progress is not None:
                        self._progress(self._there + sum(list(self._bytes.values())), self._all_bytes)
                    for future in (one for one in done if not one.cancelled()):
                        error = future.exception()
                        if isinstance(error, UpsError):
                            errors.append(error)
                        elif error is not None:
                            raise error
                    if any(isinstance(error, DiskFullError) for error in errors):
                        break  # no other file would fit either
                    if len(errors) == self._jobs and not self._num_fetched:
                        for future in waiting:
                            future.cancel()  # the server is down, not a file: the others need not wait for it as long
            finally:
                self._stop.set()
                for future in waiting:
                    future.cancel()
        if errors:
            first = errors[0]
            if len(errors) > 1:
                more = f"{first.message} (and the same or another reason for {len(errors) - 1} other files)"
                raise type(first)(more, hint=first.hint)
            raise first

    def _one(self, wanted: Wanted) -> None:
        path = wanted.file.path
        partial = self._folder / PARTIAL / path.replace("/", "+")
        md5 = download.Fetch(
            wanted.file, wanted.target, partial, lambda n: self._bytes.update({path: n}), self._stop
        ).run()
        status = wanted.target.stat()
        with self._lock:
            self._num_fetched += 1
            self._known[path] = {"size": status.st_size, "mtime_ns": status.st_mtime_ns, "md5": md5}
            write_file_atomically(self._folder / PARTIAL / "verified.json", json.dumps(self._known).encode())


def _wanted(file: RemoteFile, folder: Path, verified: dict[str, Any], stop: threading.Event) -> Wanted:
    target = folder / file.path
    if target.exists():
        if not target.is_file():
            raise DataError(f"{target} is there already, and is no file", hint="move it away, or use another --out")
        status, known = target.stat(), verified.get(file.path)
        size, now = status.st_size, (status.st_size, status.st_mtime_ns)
        if not isinstance(known, dict) or (known.get("size"), known.get("mtime_ns")) != now:
            with machine_errors(f"cannot read {target}"):
                _check_present(file, target, size, stop)
        return Wanted(file, target, size, present=True)
    return Wanted(file, target, _remote_size(file.url, stop), present=False)


def _remote_size(url: str, stop: threading.Event) -> int | None:
    """How long the server says that a file is; None if it does not say, or not now."""
    try:
        # Not HEAD: addresses that are signed for reading refuse it.
        with download.request(url, 0, end=1, stop=stop) as answer:
            return answer.total
    except (download.TryAgainError, download.BeginAgainError, FetchContentError) as error:
        logger.warning("the size of %s is not known: %s", download.shown(url), error)
        return None


def _check_present(file: RemoteFile, target: Path, size: int, stop: threading.Event) -> None:
    """Raise DataError if a file that was already there is not the published one, as far as that can be known."""
    problem = download.check_size(target)
    if not problem and file.md5:
        problem = "" if download.md5_of(target, stop) == file.md5 else f"its MD5 is not {file.md5}"
    elif not problem and _remote_size(file.url, stop) not in (None, size):
        problem = "it has another size"
    if problem:
        raise DataError(
            f"{target} is there already, and is not the published file: {problem}",
            hint="move it away, or use another --out",
        )


def _verified(folder: Path) -> dict[str, Any]:
    """What earlier fetches checked, by path; each entry holds as long as size and time of the file are the same."""
    return read_object(folder / PARTIAL / "verified.json", _VERIFIED_BYTES) or {}


def _check_space(folder: Path, missing: list[Wanted]) -> None:
    needed = sum(one.missing for one in missing)
    for one in missing:
        partial = folder / PARTIAL / one.file.path.replace("/", "+")
        if partial.exists():
            needed -= min(os.stat(partial).st_size, one.missing)
    with machine_errors(f"cannot use {folder}"):
        free = shutil.disk_usage(folder).free
    if needed + download.SPARE_BYTES > free:
        raise DiskFullError(
            f"{size_text(needed)} are to be fetched, and {size_text(free)} are free at {folder}",
            hint="choose some of the files with --only, or another disk with --out",
        )


WELL_BASE = "https://sdsc-users.flatironinstitute.org/~polymathic/data/the_well/datasets"
PDEBENCH, THE_WELL = "pdebench", "the_well"


@dataclass(frozen=True, slots=True)
class RemoteSet:
    """A published data set: `pdebench/burgers1d`, `the_well/active_matter`."""

    name: str
    files: tuple[RemoteFile, ...]

    @property
    def source(self) -> str:
        return self.name.split("/")[0]


@functools.cache
def catalog() -> dict[str, RemoteSet]:
    """All data sets by name."""
    files_of: dict[str, list[RemoteFile]] = {}
    for row in csv.DictReader(_lines("pdebench.csv")):
        file = RemoteFile(row["path"].split("/")[-1], row["url"], row["path"], row["md5"])
        files_of.setdefault(f"{PDEBENCH}/{row['name']}", []).append(file)
    for line in _lines("the_well.txt"):
        name, path = line.split("/", 1)
        files_of.setdefault(f"{THE_WELL}/{name}", []).append(RemoteFile(path, f"{WELL_BASE}/{line}", path))
    return {name: RemoteSet(name, tuple(files)) for name, files in files_of.items()}


def find(name: str) -> RemoteSet:
    """A data set by its name, with or without what it is part of. Raises ConfigError."""
    known = catalog()
    matches = [full for full in known if name in (full, full.split("/")[1])]
    if not matches:
        raise ConfigError(
            f"no data set that can be fetched is called '{name[:80]}'", hint="`ups data fetch` lists those there are"
        )
    return known[matches[0]]


def choose(chosen: RemoteSet, only: Sequence[str], mirror: str | None) -> list[RemoteFile]:
    """The files that are wanted. only: patterns of paths, such as `*beta0.4*` or `data/train/*`; none means all.

    mirror: an address below which files lie as at their source; `{name}` in it is replaced by the data set's name.
    """
    files = [file for file in chosen.files if not only or any(fnmatch.fnmatch(file.path, p) for p in only)]
    if not files:
        raise ConfigError(
            f"no file of {chosen.name} is called {' or '.join(only)[:200]}",
            hint=f"`ups data fetch {chosen.name} --dry-run` lists them; the first is '{chosen.files[0].path}'",
        )
    if mirror is None:
        return files
    if holds_secret(mirror):  # urllib would ask the resolver for the address with its password
        raise ConfigError("the mirror's address carries a user, a password, a query or a token", hint="leave it out")
    try:
        parts = urllib.parse.urlsplit(mirror)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname)
    except ValueError:  # such as http://[bad/
        usable = False
    if not usable:
        raise ConfigError(f"the mirror '{mirror[:200]}' is no address", hint="it begins with https:// or http://")
    short = chosen.name.split("/")[1]
    base = mirror.rstrip("/")
    if "{name}" in base:
        base = base.replace("{name}", short)
    elif chosen.source == THE_WELL:
        base = f"{base}/{short}"
    return [RemoteFile(f.path, f"{base}/{urllib.parse.quote(f.mirrored)}", f.mirrored, f.md5) for f in files]


def _lines(name: str) -> list[str]:
    text = resources.files("ups.data").joinpath("catalogs", name).read_text(encoding="utf-8")
    return [line for line in text.splitlines() if line and not line.startswith("#")]
