"""Numbers of two environments: what is rounding, what is a difference, and what is said where ups is missing."""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import pytest

from ups.doctor.other_python import differences, versions_of
from ups.errors import MachineError

FLOAT32 = 2**-23


def rows(rounding: float = 0.0) -> list[dict[str, Any]]:
    """Three steps whose numbers are off by a relative `rounding`."""
    return [
        {
            "stage": 0,
            "step": step,
            "batch": 7 * step,
            "loss": (2.0 - 0.1 * step) * (1 + rounding),
            "gradient_norm": (1.0 / step) * (1 + rounding),
            "gradients": {"a.weight": 0.8 / step * (1 + rounding), "b.weight": 0.6 / step * (1 + rounding)},
        }
        for step in (1, 2, 3)
    ]


def test_rounding_is_no_difference() -> None:
    compared, first = differences(rows(), rows(3e-7), rows(1e-7), FLOAT32)
    assert first is None
    assert len(compared) == 3
    assert compared[0]["loss"]["apart"] == pytest.approx(3e-7, rel=1e-3)


def test_the_first_step_and_quantity_that_differ_are_named() -> None:
    theirs = copy.deepcopy(rows())
    theirs[1]["gradient_norm"] *= 1.01
    theirs[1]["gradients"]["b.weight"] *= 1.02
    theirs[2]["loss"] *= 2
    _, first = differences(rows(), theirs, rows(1e-7), FLOAT32)
    assert first is not None
    assert (first["step"], first["quantity"], first["tensor"]) == (2, "gradient norm", "b.weight")


def test_a_tensor_that_differs_under_an_equal_norm_is_named() -> None:
    theirs = copy.deepcopy(rows())
    theirs[0]["gradients"]["a.weight"] *= 1.01
    _, first = differences(rows(), theirs, rows(1e-7), FLOAT32)
    assert first is not None
    assert (first["step"], first["quantity"]) == (1, "gradient norm of a.weight")


def test_other_data_comes_before_other_numbers() -> None:
    theirs = copy.deepcopy(rows())
    theirs[0]["batch"] = 1
    theirs[0]["loss"] = 9.0
    _, first = differences(rows(), theirs, rows(1e-7), FLOAT32)
    assert first is not None
    assert first["quantity"] == "the data that was read"


def test_a_python_without_ups_is_refused_with_what_to_install(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # -S: no installed packages
    bare.chmod(0o755)
    with pytest.raises(MachineError, match="ups is not installed in the environment of"):
        versions_of(str(bare))
    with pytest.raises(MachineError, match="cannot be run"):
        versions_of(str(tmp_path / "none"))
    assert versions_of(sys.executable)["torch"]


def test_packages_with_parts_of_ours_are_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "crinkle-0.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: crinkle\nVersion: 0.2\n")
    (folder / "entry_points.txt").write_text("[ups.models]\ncrinkle = crinkle.model:build\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert versions_of(sys.executable)["crinkle"] == "0.2"
