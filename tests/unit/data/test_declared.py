"""Data that are not what their task declares are found, with frame and channel; data that are, are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ups.data.validate import contradictions, validate_paths
from ups.formats.store_writer import StoreWriter
from ups.spec.task import AxisSpec, BoundaryValue, FieldSpec, TaskSpec

FLOW = TaskSpec(
    "flow",
    (FieldSpec("height"), FieldSpec("velocity", tensor_rank=1)),
    (AxisSpec("x", extent=2.0), AxisSpec("y")),
    dt=0.1,
    positive=("height",),
    divergence_free=("velocity",),
)
ROD = TaskSpec(
    "rod",
    (FieldSpec("heat"),),
    (AxisSpec("x", boundary="dirichlet"),),
    dt=0.1,
    boundary_values=(BoundaryValue("heat", "x", "first", 0.0), BoundaryValue("heat", "x", "last", 2.0)),
)


def flow(frames: int = 4) -> np.ndarray:
    """(T, C, X, Y) as declared: a height above 0, and a flow around a stream function."""
    x, y = np.arange(16) / 16 * 2 * np.pi, np.arange(8) / 8 * 2 * np.pi
    size = np.linspace(1.0, 2.0, frames)[:, None, None]
    height = 1.0 + 0.5 * size * np.sin(x)[:, None]
    along = np.sin(x)[:, None] * np.cos(y) * size  # extents 2 and 1: k is pi and 2 pi
    across = -0.5 * np.cos(x)[:, None] * np.sin(y) * size
    return np.stack([height + 0 * along, along, across], axis=1).astype(np.float32)


def rod(frames: int = 4) -> np.ndarray:
    x = np.linspace(0.0, 1.0, 17)
    bump = np.sin(np.pi * x) * np.linspace(1.0, 0.3, frames)[:, None]
    return (2 * x + bump)[:, None].astype(np.float32)


def test_data_as_declared_have_no_contradiction() -> None:
    assert list(contradictions(flow(), FLOW)) == []
    assert list(contradictions(rod(), ROD)) == []


def test_each_contradiction_is_found_in_its_frame() -> None:
    bad = flow()
    bad[2, 0, 3, 3] = -0.5
    bad[3, 1] += np.sin(np.arange(16) / 16 * 2 * np.pi)[:, None]
    problems = [(kind, frame, channel) for kind, frame, channel, _ in contradictions(bad, FLOW)]
    assert problems == [("negative", 2, "height"), ("divergence", 3, "velocity_x")]
    warm = rod()
    warm[1, 0, 0], warm[3, 0, -1] = 0.01, np.nan
    problems = [(kind, frame, channel) for kind, frame, channel, _ in contradictions(warm, ROD)]
    # What is not finite counts as 0 here, and has a finding of its own.
    assert problems == [("boundary_value", 1, "heat"), ("boundary_value", 3, "heat")]


def test_rounding_is_no_contradiction() -> None:
    nearly = flow()
    nearly[:, 0] -= nearly[:, 0].min() + 1e-5
    assert list(contradictions(nearly, FLOW)) == []


@pytest.mark.parametrize("block_bytes", [1 << 20, 1])
def test_validate_names_file_trajectory_and_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int
) -> None:
    monkeypatch.setattr("ups.data.validate.BLOCK_BYTES", block_bytes)
    with StoreWriter(tmp_path / "rod.zarr", ROD, [np.linspace(0.0, 1.0, 17)], 4) as writer:
        for number, split in enumerate(("train", "train", "valid", "test")):
            state = rod() + 0.1 * number * np.sin(np.pi * np.linspace(0.0, 1.0, 17)).astype(np.float32)
            if number == 1:
                state[2:, 0, -1] = 1.9
            writer.append(split, state=state)
    report = validate_paths(tmp_path / "rod.zarr")
    problems = [(f.kind, f.split, f.trajectory, f.frame, f.field) for f in report.findings]
    assert problems == [("boundary_value", "train", 1, 2, "heat")]
    assert "off by 0.1 from 2" in report.findings[0].message
    assert not validate_paths(tmp_path / "rod.zarr", allow=["boundary_value"]).findings
