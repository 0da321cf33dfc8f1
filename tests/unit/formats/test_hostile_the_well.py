"""What an untrusted file of The Well may try, and that it ends in a DataError."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support import damaged_files
from tests.support import the_well_files as files
from tests.support.checkout import path_with
from ups.errors import DataError
from ups.formats.hdf5 import survey_files
from ups.formats.the_well import WellReader

FIELD = "t0_fields/density"


def _put(file: h5py.File, name: str, *arguments: object, **options: object) -> None:
    attributes = dict(file[name].attrs)
    del file[name]
    file.create_dataset(name, *arguments, **options).attrs.update(attributes)


def _external_link(file: h5py.File, folder: Path) -> None:
    files.write(folder / "secret.h5", files.two_dims())
    del file[FIELD]
    file[FIELD] = h5py.ExternalLink(str(folder / "secret.h5"), FIELD)


def _linked_group(file: h5py.File, folder: Path) -> None:
    file.move("t0_fields", "other")
    file["t0_fields"] = h5py.SoftLink("/other")


def _linked_mask(file: h5py.File, folder: Path) -> None:
    del file["boundary_conditions/x_periodic/mask"]
    file["boundary_conditions/x_periodic/mask"] = h5py.SoftLink("/dimensions/x")


def _external_storage(file: h5py.File, folder: Path) -> None:
    (folder / "raw.bin").write_bytes(bytes(4 * 9 * 12 * 8 * 4))
    where = [(str(folder / "raw.bin"), 0, h5py.h5f.UNLIMITED)]
    _put(file, FIELD, (4, 9, 12, 8), "f4", external=where)


def _virtual(file: h5py.File, folder: Path) -> None:
    layout = h5py.VirtualLayout((4, 9, 12, 8), "f4")
    layout[:] = h5py.VirtualSource(str(folder / "source.h5"), "a", (4, 9, 12, 8))
    del file[FIELD]
    file.create_virtual_dataset(FIELD, layout)


def _never_written(file: h5py.File, folder: Path) -> None:
    _put(file, FIELD, (10**6, 10**4, 12, 8), "f4")


def _never_written_chunks(file: h5py.File, folder: Path) -> None:
    _put(file, FIELD, (4, 9, 12, 8), "f4", chunks=(1, 1, 12, 8))


def _objects(file: h5py.File, folder: Path) -> None:
    _put(file, FIELD, (4, 9, 12, 8), h5py.string_dtype())


def _many_names(file: h5py.File, folder: Path) -> None:
    file["t0_fields"].attrs["field_names"] = [f"f{i}" for i in range(100)]


def _unknown_name(file: h5py.File, folder: Path) -> None:
    file["t0_fields"].attrs["field_names"] = ["../../etc/passwd"]


def _wrong_shape(file: h5py.File, folder: Path) -> None:
    _put(file, FIELD, data=np.zeros((4, 9, 8, 12), np.float32))


def _falling_time(file: h5py.File, folder: Path) -> None:
    file["dimensions/time"][3] = -1.0


def _no_number(file: h5py.File, folder: Path) -> None:
    file["dimensions/x"][3] = np.nan


def _four_axes(file: h5py.File, folder: Path) -> None:
    file["dimensions"].attrs["spatial_dims"] = ["x", "y", "x", "y"]


def _deep(file: h5py.File, folder: Path) -> None:
    file.create_group("boundary_conditions/a/b/c")


def _circle(file: h5py.File, folder: Path) -> None:
    file["boundary_conditions/loop"] = file["boundary_conditions"]


ATTACKS: list[Callable[[h5py.File, Path], None]] = [
    _external_link,
    _linked_group,
    _linked_mask,
    _external_storage,
    _virtual,
    _never_written,
    _never_written_chunks,
    _objects,
    _many_names,
    _unknown_name,
    _wrong_shape,
    _falling_time,
    _no_number,
    _four_axes,
    _deep,
    _circle,
]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file per attack, all surveyed by one child."""
    paths = {}
    for attack in ATTACKS:
        folder = tmp_path_factory.mktemp("attack")
        path = folder / "a.h5"
        files.write(path, files.two_dims())
        with h5py.File(path, "r+") as file:
            attack(file, folder)
        paths[attack.__name__] = path
    survey_files(list(paths.values()), "the_well")
    return paths


@pytest.mark.parametrize("attack", [a.__name__ for a in ATTACKS])
def test_a_file_that_reaches_outside_or_contradicts_itself_is_refused(attacked: dict[str, Path], attack: str) -> None:
    with pytest.raises(DataError):
        WellReader(attacked[attack])


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_300_damaged_files_are_read_or_refused_without_crash_hang_or_a_gigabyte(tmp_path: Path) -> None:
    bases = files.damaged_bases(tmp_path)
    paths = [tmp_path / f"{i}.h5" for i in range(300)]
    for i, path in enumerate(paths):
        data, other = bases[i % len(bases)], bases[(i + 1 + i // len(bases)) % len(bases)]
        path.write_bytes(damaged_files.mutate(data, other, i))
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.read_damaged", "--well"],
        env={**os.environ, **path_with()},
        input="\n".join(map(str, paths)),
        capture_output=True,
        text=True,
        timeout=200,
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, f"died after {len(rows)} files: {result.stderr[-2000:]}"
    assert [row["path"] for row in rows] == [str(p) for p in paths]
    strange = [row for row in rows if row["outcome"] not in ("read", "data")]
    assert not strange, strange
    assert sum(row["outcome"] == "data" for row in rows) > 50
    assert max(row["peak_mib"] for row in rows) < 1024
    assert max(row["seconds"] for row in rows) < 20
