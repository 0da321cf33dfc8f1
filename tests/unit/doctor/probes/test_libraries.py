"""A library that is loaded twice is found by its name, whatever the packager called the file."""

from pathlib import Path

import pytest

from ups.doctor.probes.libraries import check_duplicates, duplicates, mapped_files
from ups.run.preflight import CheckFailed, Report


def test_two_builds_are_seen_under_any_name() -> None:
    files = [
        "/env/h5py.libs/libhdf5-04f1e7a9.so.310.5.1",
        "/usr/lib/x86_64-linux-gnu/libhdf5.so.103.3.0",
        "/env/h5py.libs/libhdf5_hl-9c3d1f0a.so.310.0.6",
        "/env/torch/lib/libgomp.so.1",
        "/env/sklearn.libs/libgomp-a34b3233.so.1.0.0",
        "/usr/lib/libc.so.6",
    ]
    copies = duplicates(files)
    assert set(copies) == {"libhdf5", "libgomp"}
    assert len(copies["libhdf5"]) == 2


def test_one_file_mapped_many_times_is_no_duplicate() -> None:
    assert duplicates(["/env/libnccl.so.2", "/env/libnccl.so.2"]) == {}


def test_deadly_ones_are_refused_and_others_reported() -> None:
    report = Report("libraries")
    check_duplicates({"libgomp": ["/a/libgomp.so.1", "/b/libgomp.so.1"]}, report)
    assert report.warnings
    with pytest.raises(CheckFailed, match="libnccl is loaded 2 times"):
        check_duplicates({"libnccl": ["/a/libnccl.so.2", "/b/libnccl.so.2"]}, report)


def test_the_map_of_a_process_is_read(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_text(
        "7f00-7f01 r-xp 00000000 08:01 12   /env/with space/libhdf5.so.310\n"
        "7f01-7f02 rw-p 00000000 00:00 0 \n"
        "7f02-7f03 r--p 00000000 08:01 13   [heap]\n"
    )
    assert "/env/with space/libhdf5.so.310" in mapped_files(maps)
