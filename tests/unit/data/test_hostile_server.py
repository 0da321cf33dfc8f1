"""Fetching from servers that mean harm: every fetch ends, with a named cause, and harms nothing outside its files."""

from __future__ import annotations

import hashlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.hostile_server import CHUNKED, HEADER, SLOW, Talk, endless, saying, serving
from ups.data import download
from ups.data import fetch as fetch_module
from ups.data.fetch import RemoteFile, RemoteSet, fetch
from ups.errors import ConfigError, DataError, DiskFullError, FetchRefusedError, UpsError

NAME = "pdebench/small"
FILE = (HEADER + bytes(100_000))[:100_000]
MD5 = hashlib.md5(FILE, usedforsecurity=False).hexdigest()


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    files = (RemoteFile("0.hdf5", "https://nowhere.invalid/x", "0.hdf5", MD5),)
    monkeypatch.setattr(fetch_module, "catalog", lambda: {NAME: RemoteSet(NAME, files)})
    monkeypatch.setattr(download, "FIRST_WAIT_SECONDS", 0.01)
    monkeypatch.setattr(download, "ATTEMPTS", 2)
    monkeypatch.setattr(download, "STALL_SECONDS", 0.6)
    monkeypatch.setenv("no_proxy", "*")


def cause_of(talk: Talk, out: Path) -> str:
    with serving(talk) as url, pytest.raises(UpsError) as caught:
        fetch(NAME, out, mirror=url)
    return caught.value.cause


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", SLOW)
def test_an_answer_that_never_comes_to_the_file_is_given_up(tmp_path: Path, kind: str) -> None:
    assert cause_of(endless(*SLOW[kind]), tmp_path) == "fetch_unavailable"


@pytest.mark.timeout(30)
def test_the_page_of_a_redirect_is_not_read(tmp_path: Path) -> None:
    sent = []

    def talk(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/x\r\n\r\n")
        while len(sent) < 200:
            connection.sendall(bytes(1 << 20))
            sent.append(1)

    assert cause_of(talk, tmp_path) == "fetch_unavailable"
    assert len(sent) < 100


CHILD = """
import sys
from pathlib import Path
from ups.data import fetch as fetch_module
from ups.data.fetch import fetch
from ups.data.fetch import RemoteFile, RemoteSet
name, url, md5, out = sys.argv[1:]
files = (RemoteFile("0.hdf5", "https://nowhere.invalid/x", "0.hdf5", md5),)
fetch_module.catalog = lambda: {name: RemoteSet(name, files)}
fetch(name, Path(out), mirror=url)
"""


@pytest.mark.processes
@pytest.mark.timeout(90)
@pytest.mark.parametrize("kind", ["header", "trailer", "silent"])
def test_one_interrupt_ends_a_fetch_that_waits_for_its_server(tmp_path: Path, kind: str) -> None:
    """Long before its deadlines, which are those of everyday here."""
    asked = threading.Event()
    slow = endless(*SLOW.get(kind, (CHUNKED, b"")))

    def talk(connection: socket.socket) -> None:
        asked.set()
        slow(connection)

    with serving(talk) as url:
        child = subprocess.Popen([sys.executable, "-c", CHILD, NAME, url, MD5, str(tmp_path)], stderr=subprocess.PIPE)
        try:
            assert asked.wait(60)
            time.sleep(1)
            child.send_signal(signal.SIGINT)
            begun = time.monotonic()
            child.communicate(timeout=20)
            assert time.monotonic() - begun < 10
            assert child.returncode
        finally:
            child.kill()
            child.wait()


WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n" + FILE


@pytest.mark.parametrize("link", ["lock", "0.hdf5", ".fetch"])
def test_nothing_is_written_through_a_link(tmp_path: Path, link: str) -> None:
    folder = tmp_path / NAME / ".fetch"
    if link == ".fetch":
        victim = tmp_path / "mine" / "0.hdf5"
        victim.parent.mkdir()
        folder.parent.mkdir(parents=True)
        folder.symlink_to(victim.parent)
    else:
        victim = tmp_path / "mine"
        folder.mkdir(parents=True)
        (folder / link).symlink_to(victim)
    victim.write_text("precious")
    assert cause_of(saying(WHOLE), tmp_path) == "environment"
    assert victim.read_text() == "precious"


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["verified.json", "0.hdf5.json"])
@pytest.mark.parametrize("kind", ["nested", "pipe", "link"])
def test_notes_of_unknown_origin_are_as_good_as_none(tmp_path: Path, name: str, kind: str) -> None:
    note = tmp_path / NAME / ".fetch" / name
    note.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(note)
    elif kind == "link":
        note.symlink_to("/dev/zero")
    else:
        note.write_text("[" * 100_000)
    with serving(saying(WHOLE)) as url:
        (path,) = fetch(NAME, tmp_path, mirror=url).paths
    assert path.read_bytes() == FILE


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_partial_file_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / NAME / ".fetch"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "0.hdf5")
    assert cause_of(saying(WHOLE), tmp_path) == "environment"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("head", ["Transfer-Encoding: chunked", "Content-Length: 999999999999"], ids=["none", "lie"])
def test_a_server_without_an_end_does_not_fill_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: str
) -> None:
    """The size that is asked for beforehand fits; what is sent does not."""
    asked: list[int] = []
    chunked = "chunked" in head
    first, piece = (CHUNKED.split(b"\r\n\r\n", 1)[1], b"100000\r\n" + bytes(1 << 20) + b"\r\n")
    if not chunked:
        first, piece = HEADER, bytes(1 << 20)

    def talk(connection: socket.socket) -> None:
        asked.append(1)
        if len(asked) == 1:
            connection.sendall(b"HTTP/1.1 206 x\r\nContent-Range: bytes 0-0/1000\r\nContent-Length: 1\r\n\r\n\x89")
            return
        connection.sendall(f"HTTP/1.1 200 OK\r\n{head}\r\n\r\n".encode() + first)
        for _ in range(300):
            connection.sendall(piece)

    monkeypatch.setattr(download, "SPARE_BYTES", shutil.disk_usage(tmp_path).free - (20 << 20))
    assert cause_of(talk, tmp_path) == "disk_full"
    assert (tmp_path / NAME / ".fetch" / "0.hdf5").stat().st_size < 100 << 20


def test_a_disk_that_is_full_is_called_so() -> None:
    file = RemoteFile("0.hdf5", "https://nowhere.invalid/x", "0.hdf5", MD5)
    fetching = download.Fetch(file, Path("a"), Path("b"), lambda _: None, threading.Event())
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(DiskFullError):
        fetching._write(full, b"bytes")


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "address",
    [
        b"http://[bad/",
        b"http://" + b"a" * 70 + b".invalid/x",
        b"http://a..b/x",
        "http://127.0.0.1\u2100/".encode(),
        "http://\u00fc\u0141/".encode(),
        b"file:///\x1b[31mx",
    ],
    ids=["bracket", "label", "dots", "letters", "host", "escape"],
)
def test_a_redirect_to_an_address_that_is_none_is_refused(tmp_path: Path, address: bytes) -> None:
    talk = saying(b"HTTP/1.1 302 Found\r\nLocation: " + address + b"\r\nContent-Length: 0\r\n\r\n")
    with serving(talk) as url, pytest.raises(UpsError) as caught:
        fetch(NAME, tmp_path, mirror=url)
    assert caught.value.cause in ("fetch_refused", "fetch_unavailable")  # a resolver may be asked for some
    assert caught.value.message.isprintable()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("code", [301, 302, 303, 307, 308, 304])
@pytest.mark.parametrize("address", [b"/again", b"", b"/%08d"], ids=["loop", "nowhere", "chain"])
def test_redirects_without_an_end_are_refused(tmp_path: Path, code: int, address: bytes) -> None:
    numbers = itertools.count()

    def talk(connection: socket.socket) -> None:
        location = address % next(numbers) if b"%" in address else address
        head = b"HTTP/1.1 %d x\r\n" % code + (b"Location: " + location + b"\r\n" if location else b"")
        connection.sendall(head + b"Content-Length: 0\r\n\r\n")

    with serving(talk) as url, pytest.raises(FetchRefusedError, match="lead in a circle, or nowhere"):
        fetch(NAME, tmp_path, mirror=url)


@pytest.mark.timeout(30)
def test_a_password_in_an_address_is_not_asked_for_at_a_resolver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    resolve = socket.getaddrinfo

    def noted(host: str, *words: Any, **options: Any) -> Any:
        asked.append(str(host))
        return resolve("127.0.0.1" if "canary" in str(host) else host, *words, **options)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    for mirror in ("https://user:canary@nowhere.invalid:443/x", "http://user:can/ary@nowhere.invalid/x"):
        with pytest.raises(ConfigError, match="carries a user") as caught:
            fetch(NAME, tmp_path, mirror=mirror)
        assert "can" not in caught.value.one_line().replace("carries", "")
    redirect = b"HTTP/1.1 302 x\r\nLocation: http://user:canary@nowhere.invalid:80/\r\nContent-Length: 0\r\n\r\n"
    with serving(saying(redirect)) as url, pytest.raises(FetchRefusedError, match="a user in it") as refused:
        fetch(NAME, tmp_path, mirror=url)
    assert "canary" not in refused.value.one_line()
    assert not any("canary" in host for host in asked)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("wait", [b"\xb2", b"9" * 4000, b"-1", b"Wed"])
def test_a_wait_that_is_no_number_is_none(tmp_path: Path, wait: bytes) -> None:
    talk = saying(b"HTTP/1.1 503 x\r\nRetry-After: " + wait + b"\r\nContent-Length: 0\r\n\r\n")
    assert cause_of(talk, tmp_path) == "fetch_unavailable"


@pytest.mark.parametrize("mirror", ["http://[bad/", "http://", "http:///x"])
def test_a_mirror_that_is_no_address_is_a_mistake_of_the_command(tmp_path: Path, mirror: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        fetch(NAME, tmp_path, mirror=mirror)


def test_a_directory_in_place_of_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / NAME / "0.hdf5").mkdir(parents=True)
    with pytest.raises(DataError, match="is no file"), serving(saying(WHOLE)) as url:
        fetch(NAME, tmp_path, mirror=url)
