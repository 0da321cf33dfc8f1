"""Which published data sets can be fetched, and from where: PDEBench and The Well, as lists that come with the package.

PDEBench publishes a table of addresses with MD5 hashes. The Well publishes addresses without hashes; what is known
about its files is their names and places.
"""

from __future__ import annotations

import csv
import fnmatch
import functools
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources

from ups.buckets.address import holds_secret
from ups.errors import ConfigError

WELL_BASE = "https://sdsc-users.flatironinstitute.org/~polymathic/data/the_well/datasets"
PDEBENCH, THE_WELL = "pdebench", "the_well"


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """path: where it goes, below the directory of its data set. mirrored: where a mirror has it. md5: '' if unknown."""

    path: str
    url: str
    mirrored: str
    md5: str = ""


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
    found: dict[str, list[RemoteFile]] = {}
    for row in csv.DictReader(_lines("pdebench.csv")):
        file = RemoteFile(row["path"].split("/")[-1], row["url"], row["path"], row["md5"])
        found.setdefault(f"{PDEBENCH}/{row['name']}", []).append(file)
    for line in _lines("the_well.txt"):
        name, path = line.split("/", 1)
        found.setdefault(f"{THE_WELL}/{name}", []).append(RemoteFile(path, f"{WELL_BASE}/{line}", path))
    return {name: RemoteSet(name, tuple(files)) for name, files in found.items()}


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
