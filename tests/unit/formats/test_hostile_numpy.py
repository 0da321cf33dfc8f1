"""Damaged and planted NumPy files end in a DataError, whatever their parsers raise."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

from ups.errors import DataError
from ups.formats.open_container import open_container

U = np.random.default_rng(0).normal(size=(6, 20, 32)).astype(np.float32)
REGION = tuple(slice(0, n, 1) for n in U.shape)


@pytest.mark.parametrize(("begin", "end"), [(45, 60), (2000, 2200), (9000, 9001)])
def test_a_damaged_compressed_member_is_refused(tmp_path: Path, begin: int, end: int) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, u=U)
    content = bytearray(path.read_bytes())
    content[begin:end] = bytes(255 - b for b in content[begin:end])
    path.write_bytes(content)
    with pytest.raises(DataError):
        open_container(path).read("u", REGION)


def test_a_member_beyond_the_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez(path, u=U)
    content = bytearray(path.read_bytes())
    struct.pack_into("<I", content, content.rfind(b"PK\x01\x02") + 42, len(content) - 10)
    path.write_bytes(content)
    with pytest.raises(DataError, match="no sound NumPy file"):
        open_container(path)


@pytest.mark.parametrize(
    "header",
    [
        "{'descr':'<f4','fortran_order':False,'shape':(((",
        "{'descr':'<f4','fortran_order':False,'shape':(18446744073709551616,0)}",
        "{'descr':'<f4','fortran_order':False,'shape':(0, %s)}" % ("9" * 30),
        "-" * 4000 + "1",
        "  {'descr':\n\t '<f4'\n  'x",
        "{'descr':'<f0','fortran_order':False,'shape':(4,4,32)}",
    ],
)
def test_a_header_that_makes_no_sense_is_refused(tmp_path: Path, header: str) -> None:
    text = header.encode() + b" " * ((-len(header) - 11) % 64) + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text)
    with pytest.raises(DataError):
        open_container(tmp_path / "a.npy").read("a", (slice(0, 1, 1),) * 2)


def test_compressed_arrays_are_limited_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ups.formats.container.MAX_UNPACKED_BYTES", 2 * U.nbytes)
    np.savez_compressed(tmp_path / "a.npz", u=U, v=U, x=np.arange(32.0))
    container = open_container(tmp_path / "a.npz")
    assert set(container.variables) == {"u", "x"}
    assert "array 'v', which has 0 MiB compressed" in container.left_out[0]
