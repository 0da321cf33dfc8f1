"""What is wrong with data is found and named; what is right is left in peace."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ups.data.validate import Finding, validate_paths
from ups.formats.store_writer import StoreWriter
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

TASK = TaskSpec(
    name="advection1d",
    fields=(FieldSpec("u"),),
    axes=(AxisSpec("x"),),
    parameters=(ParameterSpec("beta", maximum=4.0),),
    dt=0.1,
    conserved=("u",),
)
X = np.arange(32) / 32


def wave(number: int) -> np.ndarray:
    """(9, 1, 32): a sine of its own phase, shape and mean that travels."""
    random = np.random.default_rng(number)
    phase, mean, second = random.uniform(0, 6), random.normal(), random.normal()
    moved = X[None] - 0.07 * np.arange(9)[:, None]
    return (mean + np.sin(2 * np.pi * moved + phase) + second * np.cos(4 * np.pi * moved))[:, None].astype(np.float32)


Splits = dict[str, list[np.ndarray]]


def write(path: Path, change: Callable[[Splits], object] = lambda splits: None) -> Path:
    splits: Splits = {"train": [wave(i) for i in range(6)], "test": [wave(i) for i in range(6, 9)]}
    change(splits)
    with StoreWriter(path, TASK, [X], 9) as writer:
        for split, trajectories in splits.items():
            for i, state in enumerate(trajectories):
                writer.append(split, state=state, parameters=[i / 10])
    return path


def locations(findings: list[Finding]) -> list[tuple[str, str, int, int]]:
    return [(f.kind, f.split, f.trajectory, f.frame) for f in findings]


def test_sane_data_has_no_findings(tmp_path: Path) -> None:
    report = validate_paths(write(tmp_path / "a.zarr"))
    assert report.findings == []
    assert report.num_trajectories == 9


def _nan(splits: Splits) -> None:
    splits["train"][2][4:, 0, 7] = np.nan


def _decayed(splits: Splits) -> None:
    fading = splits["train"][0] - splits["train"][0].mean()
    splits["train"][0] = (fading * 10.0 ** -np.arange(9)[:, None, None]).astype(np.float32)


def _infinite(splits: Splits) -> None:
    splits["test"][1][8, 0, 0] = np.inf


def _constant(splits: Splits) -> None:
    splits["train"][1][5] = splits["train"][1][5].mean()


def _repeated(splits: Splits) -> None:
    splits["train"][3][6] = splits["train"][3][5]


def _duplicate(splits: Splits) -> None:
    splits["train"][5] = splits["train"][0].copy()


def _leaked(splits: Splits) -> None:
    splits["test"][0] = splits["train"][4].copy()


def _nearly_leaked(splits: Splits) -> None:
    noise = np.random.default_rng(0).normal(size=(9, 1, 32)).astype(np.float32)
    splits["test"][2] = splits["train"][4] + 1e-6 * noise


def _drifting(splits: Splits) -> None:
    splits["train"][0] += np.linspace(0, 0.1, 9, dtype=np.float32)[:, None, None]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (_nan, ("not_finite", "train", 2, 4)),
        (_infinite, ("not_finite", "test", 1, 8)),
        (_constant, ("constant_frame", "train", 1, 5)),
        (_repeated, ("repeated_frame", "train", 3, 6)),
        (_duplicate, ("duplicate", "train", 5, -1)),
        (_leaked, ("leakage", "test", 0, -1)),
        (_nearly_leaked, ("leakage", "test", 2, -1)),
        (_drifting, ("not_conserved", "train", 0, 8)),
    ],
)
def test_each_kind_is_found_where_it_is_and_nothing_else(
    tmp_path: Path, change: Callable[[Splits], object], expected: tuple[str, str, int, int]
) -> None:
    report = validate_paths(write(tmp_path / "a.zarr", change))
    assert locations(report.findings) == [expected]
    assert "a.zarr" in report.findings[0].where
    assert validate_paths(tmp_path / "a.zarr", allow=[expected[0]]).findings == []


def test_blocks_of_frames_find_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(splits: Splits) -> None:
        for damage in (_nan, _constant, _repeated, _drifting):
            damage(splits)

    path = write(tmp_path / "a.zarr", change)
    whole = locations(validate_paths(path).findings)
    monkeypatch.setattr("ups.data.validate.BLOCK_BYTES", 2 * 32 * 4)
    located = locations(validate_paths(path).findings)
    drift = [f for f in located if f[0] == "not_conserved"]
    assert [f for f in located if f not in drift] == [f for f in whole if f[0] != "not_conserved"]
    assert len(drift) == 1


def test_a_damaged_byte_is_found_by_its_hash(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    shard = path / "train/state/c/0/0/0/0"
    data = bytearray(shard.read_bytes())
    data[1] ^= 1
    shard.write_bytes(data)
    report = validate_paths(path)
    assert report.counts["damaged"] == 1
    assert "train/state/c/0/0/0/0" in report.findings[0].message
    assert "damaged" not in validate_paths(path, deep=False).counts


def test_a_missing_file_and_a_missing_store_are_findings(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zarr")
    (path / "test/state/c/0/0/0/0").unlink()
    report = validate_paths(path)
    assert report.counts["unreadable"] == 3
    assert report.counts["damaged"] >= 1
    assert validate_paths(tmp_path / "none.zarr").counts == {"unreadable": 1}


@pytest.mark.parametrize(
    ("name", "values"), [("x", X[::-1]), ("time", np.zeros(9)), ("time", np.arange(8) * 0.1), ("x", X[:-1])]
)
def test_unsorted_and_mislength_coordinates_are_found(tmp_path: Path, name: str, values: np.ndarray) -> None:
    path = write(tmp_path / "a.zarr")
    (path / "train" / name / "c/0").write_bytes(np.asarray(values, "<f8").tobytes())
    report = validate_paths(path)
    assert report.counts == {"unreadable": 1}
    assert name in report.findings[0].message


def test_rounding_of_a_field_that_decays_to_nothing_is_no_drift(tmp_path: Path) -> None:
    assert validate_paths(write(tmp_path / "a.zarr", _decayed)).findings == []
