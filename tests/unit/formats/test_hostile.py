"""What an untrusted file may try, and that it ends in a DataError."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from tests.support import damaged_files
from tests.support import pdebench_files as files
from tests.support.checkout import path_with
from ups.errors import DataError
from ups.formats import hdf5
from ups.formats.pdebench import PdebenchReader
from ups.formats.store_writer import StoreWriter
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

NAME = "1D_Advection_Sols_beta0.4.hdf5"


def _external_link(file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "secret.h5", "w") as other:
        other["tensor"] = np.zeros((10, 7, 16), np.float32)
    del file["tensor"]
    file["tensor"] = h5py.ExternalLink(str(folder / "secret.h5"), "/tensor")


def _soft_link(file: h5py.File, folder: Path) -> None:
    file.move("tensor", "other")
    file["tensor"] = h5py.SoftLink("/other")


def _external_storage(file: h5py.File, folder: Path) -> None:
    (folder / "raw.bin").write_bytes(bytes(10 * 7 * 16 * 4))
    del file["tensor"]
    file.create_dataset("tensor", (10, 7, 16), "f4", external=[(str(folder / "raw.bin"), 0, h5py.h5f.UNLIMITED)])


def _virtual(file: h5py.File, folder: Path) -> None:
    with h5py.File(folder / "source.h5", "w") as other:
        other["a"] = np.zeros((10, 7, 16), np.float32)
    layout = h5py.VirtualLayout((10, 7, 16), "f4")
    layout[:] = h5py.VirtualSource(str(folder / "source.h5"), "a", (10, 7, 16))
    del file["tensor"]
    file.create_virtual_dataset("tensor", layout)


def _larger_than_the_file(file: h5py.File, folder: Path) -> None:
    del file["tensor"]
    file.create_dataset("tensor", (10**6, 10**4, 16), "f4")  # never written: no bytes behind it


def _never_written_chunks(file: h5py.File, folder: Path) -> None:
    del file["tensor"]
    file.create_dataset("tensor", (10**5, 7, 16), "f4", chunks=(100, 7, 16))


def _huge_chunks(file: h5py.File, folder: Path) -> None:
    del file["tensor"]
    file.create_dataset("tensor", (10, 7, 2**27), "f4", chunks=(1, 1, 2**27), compression="gzip")


def _objects(file: h5py.File, folder: Path) -> None:
    del file["tensor"]
    file.create_dataset("tensor", (10, 7, 16), h5py.string_dtype())


def _compound(file: h5py.File, folder: Path) -> None:
    del file["tensor"]
    file.create_dataset("tensor", (10, 7, 16), np.dtype([("a", "f4"), ("b", "f4")]))


def _integers(file: h5py.File, folder: Path) -> None:
    del file["tensor"]
    file.create_dataset("tensor", data=np.zeros((10, 7, 16), np.int32))


def _large_attribute(file: h5py.File, folder: Path) -> None:
    file.attrs["config"] = "x" * 60_000 + "y" * 60_000


def _many_attributes(file: h5py.File, folder: Path) -> None:
    for i in range(100):
        file.attrs[f"a{i}"] = i


def _unknown_filter(file: h5py.File, folder: Path) -> None:
    del file["tensor"]
    file.create_dataset("tensor", data=np.zeros((10, 7, 16), np.float32), chunks=True, scaleoffset=2)


def _deep_groups(file: h5py.File, folder: Path) -> None:
    file.create_group("0000/a/b/c/d/e")


def _many_datasets(file: h5py.File, folder: Path) -> None:
    for i in range(70):
        file[f"d{i}"] = np.zeros(2, np.float32)


ATTACKS: list[Callable[[h5py.File, Path], None]] = [
    _external_link,
    _soft_link,
    _external_storage,
    _virtual,
    _larger_than_the_file,
    _never_written_chunks,
    _huge_chunks,
    _objects,
    _compound,
    _integers,
    _large_attribute,
    _many_attributes,
    _unknown_filter,
    _deep_groups,
    _many_datasets,
]


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One file per attack, all surveyed by one child."""
    paths = {}
    for attack in ATTACKS:
        folder = tmp_path_factory.mktemp("attack")
        path = folder / NAME
        files.single(path)
        with h5py.File(path, "r+") as file:
            attack(file, folder)
        paths[attack.__name__] = path
    hdf5.survey_files(list(paths.values()))
    return paths


@pytest.mark.parametrize("attack", [a.__name__ for a in ATTACKS])
def test_an_hdf5_file_that_reaches_outside_or_claims_too_much_is_refused(
    attacked: dict[str, Path], attack: str
) -> None:
    with pytest.raises(DataError):
        PdebenchReader(attacked[attack])


def test_a_deflated_chunk_cannot_expand_beyond_its_declared_size(tmp_path: Path) -> None:
    path = tmp_path / NAME
    files.single(path)
    with h5py.File(path, "r+") as file:
        del file["tensor"]
        tensor = file.create_dataset("tensor", (10, 7, 2048), "f4", chunks=(10, 7, 2048), compression="gzip")
        tensor.id.write_direct_chunk((0, 0, 0), zlib.compress(bytes(64 << 20)))
        del file["x-coordinate"]
        file["x-coordinate"] = np.linspace(0, 1, 2048, dtype=np.float32)
    reader = PdebenchReader(path)
    with pytest.raises(DataError, match="or more instead of"):
        reader.read("train", 0, 0, 1)


def test_a_yaml_text_with_anchors_or_nonsense_is_ignored(tmp_path: Path) -> None:
    bomb = "a: &a [x, x]\nb: &b [*a, *a]\nD: 0.5\n"
    for number, text in enumerate((bomb, "[" * 5000, "D: !!python/object/apply:os.system [echo]", "\x00")):
        path = tmp_path / f"1D_diff-sorp_{number}.h5"
        files.grouped(path, (6, 16, 1), text.replace("\x00", "?"))
        assert PdebenchReader(path).task.parameters == ()


def test_something_else_under_that_name_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(b"PK\x03\x04" + bytes(1000))
    (tmp_path / "b.h5").write_bytes(b"")
    (tmp_path / "c.h5").mkdir()
    for name in ("a.h5", "b.h5", "c.h5", "missing.h5"):
        with pytest.raises(DataError):
            PdebenchReader(tmp_path / name)


def test_a_guard_that_is_killed_or_hangs_blames_the_file_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [tmp_path / f"{i}_Advection.h5" for i in range(3)]
    for path in paths:
        files.single(path)
    calls = []

    def ask(names: list[str], form: str) -> tuple[list[object], str]:
        calls.append(names)
        if names[0].endswith("1_Advection.h5"):
            return [], "crashed (signal 11)"
        answers, problem = original(names[:1], form)
        return list(answers), problem or ("crashed (signal 11)" if len(names) > 1 else "")

    original = hdf5._ask_child
    monkeypatch.setattr(hdf5, "_ask_child", ask)
    first, second, third = hdf5.survey_files(paths)
    assert not isinstance(first, DataError)
    assert isinstance(second, DataError)
    assert "crashed" in second.message
    assert not isinstance(third, DataError)


def test_the_survey_of_a_file_is_kept_between_commands_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path, asked = tmp_path / NAME, []

    def ask(names: list[str], form: str) -> tuple[list[object], str]:
        asked.append(names)
        answers, problem = original(names, form)
        return list(answers), problem

    def survey() -> object:
        monkeypatch.setattr(hdf5, "_surveys", {})  # as a new process has it
        return hdf5.survey_files([path])[0]

    original = hdf5._ask_child
    monkeypatch.setattr(hdf5, "_ask_child", ask)
    files.single(path)
    first = survey()
    assert survey() == first
    assert len(asked) == 1
    (stored,) = (tmp_path / "cache" / "ups" / "surveys").iterdir()
    stored.write_text("{}")  # damaged
    assert survey() == first
    assert len(asked) == 2
    os.utime(path, ns=(0, 0))
    survey()
    assert len(asked) == 3


def _store(path: Path, compression: str | None) -> None:
    task = TaskSpec(
        name="t",
        fields=(FieldSpec("u"), FieldSpec("f", role="static")),
        axes=(AxisSpec("x"),),
        parameters=(ParameterSpec("p"),),
        dt=1.0,
    )
    with StoreWriter(path, task, [np.arange(16.0)], 5, compression=compression) as writer:
        for i in range(4):
            writer.append(
                "train" if i < 3 else "test",
                state=files.numbers(5, 1, 16, seed=i),
                static=files.numbers(1, 16, seed=i),
                parameters=[i],
            )


def _mutated_hdf5(folder: Path, count: int) -> list[Path]:
    bases = folder / "bases"
    bases.mkdir()
    files.single(bases / "a")
    files.single(bases / "b", chunks=(2, 3, 8), compression="gzip", shuffle=True)
    files.grouped(bases / "c", (6, 8, 4, 2), files.CONFIG_DIFFREACT)
    files.grouped(bases / "d", (6, 8, 4, 2), files.CONFIG_DIFFREACT, chunks=(2, 4, 4, 2), compression="gzip")
    files.incompressible(bases / "e")
    files.darcy(bases / "f")
    files.compressible(bases / "g", 2, chunks=True)
    contents = [path.read_bytes() for path in sorted(bases.iterdir())]
    paths = [folder / f"{i}_Advection_periodic.h5" for i in range(count)]
    for i, path in enumerate(paths):
        path.write_bytes(damaged_files.mutate(contents[i % 7], contents[(i + 1 + i // 7) % 7], i))
    return paths


def _mutated_stores(folder: Path, count: int) -> list[Path]:
    bases = [folder / "plain.zarr", folder / "packed.zarr"]
    for base, compression in zip(bases, (None, "zstd"), strict=True):
        _store(base, compression)
    paths = []
    for i in range(count):
        base, turn = bases[i % 2], i // 2
        names = sorted(p.relative_to(base) for p in base.rglob("*") if p.is_file())
        path = folder / f"{i}.zarr"
        for number, name in enumerate(names):
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            data = (base / name).read_bytes()
            if number == turn % len(names):
                other = names[(number + 1 + turn // len(names)) % len(names)]
                data = damaged_files.mutate(data, (base / other).read_bytes(), i)
            (path / name).write_bytes(data)
        paths.append(path)
    return paths


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_300_damaged_files_are_read_or_refused_without_crash_hang_or_a_gigabyte(tmp_path: Path) -> None:
    paths = [*_mutated_hdf5(tmp_path, 200), *_mutated_stores(tmp_path, 100)]
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.read_damaged"],
        env={**os.environ, **path_with()},
        input="\n".join(map(str, paths)),
        capture_output=True,
        text=True,
        timeout=200,
    )
    rows = [json.loads(line) for line in result.stdout.splitlines()]
    assert result.returncode == 0, f"died after {len(rows)} files: {result.stderr[-2000:]}"
    assert [row["path"] for row in rows] == [str(p) for p in paths]
    assert {row["outcome"] for row in rows} <= {"read", "data"}, [
        r for r in rows if r["outcome"] not in ("read", "data")
    ]
    assert sum(row["outcome"] == "data" for row in rows) > 100
    assert max(row["peak_mib"] for row in rows) < 1024
    assert max(row["seconds"] for row in rows) < 20
