"""Fetching from servers that fail and lie: never a wrong file, always an end with a named cause."""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support.file_server import FileServer, serve
from ups.data import download
from ups.data import fetch as fetch_module
from ups.data.fetch import RemoteFile, RemoteSet, catalog, choose, fetch, find, plan
from ups.errors import (
    ConfigError,
    DataError,
    DiskFullError,
    FetchChangedError,
    FetchContentError,
    FetchRefusedError,
    FetchUnavailableError,
    UpsError,
)

NAME = "pdebench/small"


def _hdf5(seed: int, num_bytes: int = 600_000) -> bytes:
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        file["tensor"] = np.random.default_rng(seed).random(num_bytes // 8)
    return stream.getvalue()


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(download, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(download, "PROGRESS_BYTES", 1000)
    monkeypatch.setattr(download, "STALL_SECONDS", 0.5)
    with serve(_hdf5(1), other=_hdf5(2)) as state:
        yield state


def _offer(monkeypatch: pytest.MonkeyPatch, md5: str, count: int = 1) -> None:
    """Make a data set of files at the server, whose address is given as the mirror."""
    files = tuple(RemoteFile(f"{i}.hdf5", "https://nowhere.invalid/x", f"there/{i}.hdf5", md5) for i in range(count))
    monkeypatch.setattr(fetch_module, "catalog", lambda: {NAME: RemoteSet(NAME, files)})


def _outcome(server: FileServer, out: Path) -> str:
    """'right', or the cause of the error; and that nothing wrong has the name of the file."""
    right = server.content
    try:
        fetch(NAME, out, mirror=server.url)
        outcome = "right"
    except UpsError as error:
        outcome = error.cause
    target = out / NAME / "0.hdf5"
    assert not target.exists() or target.read_bytes() in (right, server.content, server.other)
    assert target.exists() == (outcome == "right")
    return outcome


@pytest.mark.parametrize("hashed", [True, False], ids=["md5", "no_hash"])
@pytest.mark.parametrize(
    "faults",
    [
        [],
        ["cut"],
        ["cut", "cut", "cut"],
        ["stall"],
        ["longer"],
        ["no_range"],
        ["cut", "no_range"],
        ["cut", "wrong_part"],
        ["503", "503", "503"],
        ["cut", "503", "cut"],
        ["page"],
        ["cut", "page"],
        ["page_as_data"],
        ["shorter"],
        ["packed"],
        ["cut", "cut", "stall", "503", "cut", "no_range"],
    ],
    ids=lambda faults: "-".join(faults) or "none",
)
def test_a_server_that_fails_for_a_while_gives_the_right_file(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: list[str], hashed: bool
) -> None:
    _offer(monkeypatch, _md5(server.content) if hashed else "")
    server.faults = list(faults)
    assert _outcome(server, tmp_path) == "right"
    assert (tmp_path / NAME / "0.hdf5").read_bytes() == server.content
    assert not server.faults


@pytest.mark.parametrize("hashed", [True, False], ids=["md5", "no_hash"])
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("503", "fetch_unavailable"),
        ("stall", "fetch_unavailable"),
        ("page", "fetch_content"),
        ("page_as_data", "fetch_content"),
        ("shorter", "fetch_content"),
        ("packed", "fetch_content"),
        ("404", "fetch_refused"),
        ("redirect_away", "fetch_refused"),
        ("wrong_part", "fetch_changed"),
    ],
)
def test_a_server_that_never_gets_well_ends_with_a_named_cause(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, cause: str, hashed: bool
) -> None:
    _offer(monkeypatch, _md5(server.content) if hashed else "")
    monkeypatch.setattr(download, "PROGRESS_BYTES", 1 << 30)  # whatever comes in between is no progress
    server.faults = [fault] * 50
    assert _outcome(server, tmp_path) == cause


@pytest.mark.parametrize("word", ["swap", "swap_unsaid"])
def test_a_file_that_changes_between_two_parts_is_never_put_together(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    """By the ETag, or where the server says nothing of it by the hash."""
    _offer(monkeypatch, _md5(server.other))  # what is there after the swap is what is published
    server.faults = ["cut", word]
    assert _outcome(server, tmp_path) == "right"
    assert (tmp_path / NAME / "0.hdf5").read_bytes() == server.content


def test_without_a_hash_a_changed_file_comes_whole(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _offer(monkeypatch, "")
    server.faults = ["cut", "swap"]
    assert _outcome(server, tmp_path) == "right"
    assert (tmp_path / NAME / "0.hdf5").read_bytes() == server.content


def test_a_file_that_always_changes_ends_with_that_cause(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of different sizes, and without a word that a part could be held against."""
    server.other = _hdf5(3, 500_000)
    _offer(monkeypatch, "0" * 32)
    server.faults = ["cut", "swap_unsaid"] * 20
    assert _outcome(server, tmp_path) in ("fetch_changed", "fetch_content")


def test_without_etag_and_hash_a_part_is_not_continued(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _offer(monkeypatch, "")
    server.etags, server.faults = False, ["cut"]
    assert _outcome(server, tmp_path) == "right"
    assert server.requests[-1] == "", "asked for everything"


def test_without_a_length_only_a_hash_says_that_it_is_whole(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.faults = ["no_length"] * 3
    _offer(monkeypatch, _md5(server.content))
    assert _outcome(server, tmp_path / "a") == "right"
    server.faults = ["no_length"] * 3
    _offer(monkeypatch, "")
    assert _outcome(server, tmp_path / "b") == "fetch_content"


def test_what_is_there_is_continued_and_not_fetched_twice(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _offer(monkeypatch, _md5(server.content))
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    server.faults = ["cut"]
    assert _outcome(server, tmp_path) == "fetch_unavailable"
    server.requests.clear()
    assert _outcome(server, tmp_path) == "right"
    start = int(server.requests[-1].removeprefix("bytes=").rstrip("-"))
    assert start >= len(server.content) // 2
    server.requests.clear()
    assert fetch(NAME, tmp_path, mirror=server.url).num_fetched == 0
    assert not server.requests, "a file that was checked is not asked for again"
    (tmp_path / NAME / "0.hdf5").write_bytes(server.other)
    with pytest.raises(DataError, match="not the published file"):
        fetch(NAME, tmp_path, mirror=server.url)


def test_a_wrong_hash_is_no_file(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch, "0" * 32)
    assert _outcome(server, tmp_path) == "fetch_content"
    assert not list((tmp_path / NAME / ".fetch").glob("0.hdf5"))


def test_several_files_come_at_once_and_one_that_fails_names_itself(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _offer(monkeypatch, _md5(server.content), count=5)
    calls: list[tuple[int, int]] = []
    server.bytes_per_second = 1e6
    fetched = fetch(NAME, tmp_path, mirror=server.url, progress=lambda done, total: calls.append((done, total)))
    assert fetched.num_fetched == len(fetched.paths) == 5
    assert calls[-1] == (fetched.num_bytes, fetched.num_bytes)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    server.faults = ["404"]
    with pytest.raises(FetchRefusedError, match=r"there/\d\.hdf5 is refused"):
        fetch(NAME, tmp_path / "b", mirror=server.url)
    assert len(list((tmp_path / "b" / NAME).glob("*.hdf5"))) == 4


def test_the_disk_is_looked_at_before(server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _offer(monkeypatch, _md5(server.content))
    monkeypatch.setattr(download, "SPARE_BYTES", 1 << 60)
    with pytest.raises(DiskFullError, match="are free at"):
        fetch(NAME, tmp_path, mirror=server.url)
    assert set(server.requests) <= {"bytes=0-0"}


def test_a_plan_has_sizes_and_fetches_nothing(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _offer(monkeypatch, "", count=2)
    assert [one.size for one in plan(NAME, tmp_path, mirror=server.url)] == [len(server.content)] * 2
    assert not list(tmp_path.iterdir())


def test_a_plan_says_why_a_size_is_not_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _offer(monkeypatch, "0" * 32)
    assert [one.size for one in plan(NAME, tmp_path, mirror="http://127.0.0.1:9")] == [None]
    assert "is not known: " in caplog.text
    assert "127.0.0.1" in caplog.text


def test_a_server_that_nobody_runs_is_unavailable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "FIRST_WAIT_SECONDS", 0.01)
    _offer(monkeypatch, "0" * 32)
    with pytest.raises(FetchUnavailableError, match="no connection"):
        fetch(NAME, tmp_path, mirror="http://127.0.0.1:1")


def test_the_catalog_has_both_collections() -> None:
    known = catalog()
    assert len(known) == 11 + 23
    burgers = find("burgers1d")
    assert burgers.name == "pdebench/burgers1d"
    assert len(burgers.files) == 12
    assert all(len(file.md5) == 32 for name in known if name.startswith("pdebench") for file in known[name].files)
    well = find("active_matter")
    (one,) = choose(well, ["data/train/*L_10.0_zeta_1.0_alpha_-1.0*"], "https://host/{name}/resolve/main")
    assert one.url.startswith("https://host/active_matter/resolve/main/data/train/")
    (same,) = choose(well, [one.path], "https://host/sets/")
    assert same.url == f"https://host/sets/active_matter/{one.mirrored}"
    assert choose(burgers, ["*Nu0.01.*"], "http://host/m")[0].url == (
        "http://host/m/1D/Burgers/Train/1D_Burgers_Sols_Nu0.01.hdf5"
    )
    for only, mirror in ((["nothing*"], None), ([], "ftp://host")):
        with pytest.raises(ConfigError):
            choose(burgers, only, mirror)
    with pytest.raises(ConfigError, match="no data set"):
        find("burgers9d")


CHILD = """
import sys
from pathlib import Path
from ups.data import download
from ups.data import fetch as fetch_module
from ups.data.fetch import fetch
from ups.data.fetch import RemoteFile, RemoteSet
name, url, md5, out = sys.argv[1:]
files = (RemoteFile("0.hdf5", "https://nowhere.invalid/x", "there/0.hdf5", md5),)
fetch_module.catalog = lambda: {name: RemoteSet(name, files)}
download.SYNC_BYTES = 1 << 16
download.FIRST_WAIT_SECONDS = 0.05
fetch(name, Path(out), mirror=url)
"""


@pytest.mark.processes
@pytest.mark.timeout(400)
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.long)])
@pytest.mark.parametrize("hashed", [True, False], ids=["md5", "no_hash"])
def test_killed_at_any_moment_and_run_again_it_ends_with_the_right_file(
    tmp_path: Path, kills: int, hashed: bool
) -> None:
    content = _hdf5(7, 3_000_000)
    draw = random.Random(kills)
    target = tmp_path / NAME / "0.hdf5"
    with serve(content, other=_hdf5(8, 3_000_000)) as server:
        command = [sys.executable, "-c", CHILD, NAME, server.url, _md5(content) if hashed else "", str(tmp_path)]
        server.bytes_per_second = 2_000_000
        for _ in range(kills):
            until = server.sent + draw.randrange(2 * len(content) // kills)
            child = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            while server.sent < until and child.poll() is None:
                time.sleep(0.002)
            child.send_signal(signal.SIGKILL)
            child.wait()
            assert not target.exists() or target.read_bytes() == content
        server.bytes_per_second = 0.0
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
    assert _md5(target.read_bytes()) == _md5(content)
    starts = [int(r.removeprefix("bytes=").split("-")[0]) for r in server.requests if r not in ("", "bytes=0-0")]
    assert max(starts, default=0) > 0, "a part was continued"


def test_two_at_once_do_not_write_to_the_same_file(
    server: FileServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ups.record.files import hold_partial

    _offer(monkeypatch, _md5(server.content))
    with hold_partial(tmp_path / NAME / ".fetch", "fetching"), pytest.raises(ConfigError, match="another process"):
        fetch(NAME, tmp_path, mirror=server.url)
    with contextlib.suppress(FetchContentError, FetchChangedError):
        fetch(NAME, tmp_path, mirror=server.url)
    assert (tmp_path / NAME / "0.hdf5").read_bytes() == server.content
