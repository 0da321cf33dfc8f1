"""Data that a recipe names and that is not there: fetched to where the task looks for it."""

from __future__ import annotations

import hashlib
import io
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from pydantic import ValidationError

from tests.support.file_server import serve
from ups.config.schema import TaskConfig
from ups.data import fetch as fetch_module
from ups.data.fetch import RemoteFile, RemoteSet
from ups.errors import ConfigError, FetchUnavailableError
from ups.library.recipe_steps import make_data, source_facts

NAME = "pdebench/small"


def content() -> bytes:
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        file["tensor"] = np.arange(1000.0)
    return stream.getvalue()


@pytest.fixture(autouse=True)
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data set of two files."""
    md5 = hashlib.md5(content(), usedforsecurity=False).hexdigest()
    files = tuple(RemoteFile(f"{i}.hdf5", "https://nowhere.invalid/x", f"there/{i}.hdf5", md5) for i in range(2))
    monkeypatch.setattr(fetch_module, "catalog", lambda: {NAME: RemoteSet(NAME, files)})


def task(path: Any, **source: Any) -> TaskConfig:
    return TaskConfig.model_validate(
        {"name": "a", "path": path, "source": {"type": "fetch", "dataset": NAME, **source}}
    )


def test_files_that_the_path_names_are_fetched_and_no_others(tmp_path: Path) -> None:
    folder = tmp_path / "data" / NAME
    with serve(content()) as server:
        seen: list[tuple[int, int]] = []
        wanted = task([str(folder / "1.hdf5")], mirror=server.url)
        assert make_data(wanted, lambda *now: seen.append(now)) == f"fetched 1 of 1 files of {NAME}"
        asked = len(server.requests)
        assert make_data(wanted) == f"fetched 0 of 1 files of {NAME}"
        assert len(server.requests) == asked, "what is there is not asked for"
    assert (folder / "1.hdf5").read_bytes() == content()
    assert not (folder / "0.hdf5").exists()
    assert seen[-1][0] == len(content())


def test_a_directory_is_fetched_whole_or_by_patterns(tmp_path: Path) -> None:
    with serve(content()) as server:
        make_data(task(str(tmp_path / NAME), mirror=server.url, only=["0*"]))
        assert [path.name for path in (tmp_path / NAME).glob("*.hdf5")] == ["0.hdf5"]
        make_data(task(str(tmp_path / NAME), mirror=server.url))
    assert sorted(path.name for path in (tmp_path / NAME).glob("*.hdf5")) == ["0.hdf5", "1.hdf5"]


@pytest.mark.parametrize(
    ("path", "source", "says"),
    [
        ("data/small.zarr", {}, "is not where pdebench/small would be fetched to"),
        (["a/pdebench/small/0.hdf5", "b/pdebench/small/1.hdf5"], {}, "lie in several copies"),
        ("a/pdebench/small/0.hdf5", {"only": ["0*"]}, "its path names files, and `only`"),
        ("a/pdebench/small/3.hdf5", {}, "no file of pdebench/small is called 3.hdf5"),
    ],
)
def test_a_path_that_does_not_fit_is_refused(path: Any, source: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_data(task(path, **source))


def test_settings_of_other_sources_are_refused() -> None:
    for wrong in ({"seed": 3}, {"files": "a.npy"}, {"dataset": None}):
        with pytest.raises(ValidationError, match=r"no meaning|needs a dataset"):
            task("a/pdebench/small", **wrong)


def test_a_mirror_changes_where_and_not_what() -> None:
    assert source_facts(task("a/pdebench/small")) == source_facts(task("a/pdebench/small", mirror="https://b"))


def test_without_a_server_there_is_a_named_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ups.data import download

    monkeypatch.setattr(download, "FIRST_WAIT_SECONDS", 0.01)
    with serve(content()) as server:
        gone = server.url
    with pytest.raises(FetchUnavailableError):
        make_data(task(str(tmp_path / NAME), mirror=gone))
