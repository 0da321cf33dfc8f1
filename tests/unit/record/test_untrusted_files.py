"""A run directory from an untrusted source: only its own regular files are read, and its words cannot write to the
terminal.
"""

import os
from pathlib import Path

from ups.record.files import inside, read_end, read_object
from ups.record.text import printable


def test_the_end_of_a_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"0123456789")
    assert read_end(tmp_path / "log", 4) == b"6789"
    assert read_end(tmp_path / "log", 100) == b"0123456789"
    assert read_end(tmp_path / "none", 100) is None


def test_devices_pipes_and_links_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    assert read_end(Path("/dev/zero"), 100) is None
    assert read_end(tmp_path / "pipe", 100) is None
    assert read_end(tmp_path / "link", 100) is None
    assert read_end(tmp_path, 100) is None


def test_an_object_is_bounded_and_an_object(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": 1}')
    assert read_object(path) == {"a": 1}
    assert read_object(path, 4) is None
    for text in ("[1]", "{", "[" * 100_000, ""):
        path.write_text(text)
        assert read_object(path) is None


def test_names_that_lead_out_of_the_directory_are_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "logs").symlink_to(tmp_path)
    assert inside(run, "a/b.err") == run / "a/b.err"
    for name in ("/etc/passwd", "../x", "a/../../x", "logs/x", "a\0b"):
        assert inside(run, name) is None


def test_control_characters_are_shown_and_not_sent() -> None:
    assert printable("a\x1b[31mb\n\tä") == "a\\x1b[31mb\\n\\tä"
    assert printable("a\x1b\n\tb", keep="\n\t") == "a\\x1b\n\tb"
