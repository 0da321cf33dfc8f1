"""Our reader of The Well against that project's own package, which lives in an environment of its own.

UPS_THE_WELL_PYTHON=/path/to/python pytest tests/unit/formats/test_the_well_package.py

python -m venv there; there/bin/pip install torch==2.13.0 h5py einops pyyaml fsspec==2024.10.0
there/bin/pip install --no-deps the-well
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.support import the_well_files as files
from tests.support import the_well_program
from ups.formats.the_well import WellReader

OTHER = os.environ.get("UPS_THE_WELL_PYTHON", "")
FRAMES = 3
STORAGE: dict[str, dict[str, object]] = {"plain": {}, "gzip": {"chunks": True, "compression": "gzip"}}
CODES = {"wall": 0.0, "open": 1.0, "periodic": 2.0}

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.skipif(not OTHER, reason="UPS_THE_WELL_PYTHON names no Python with the package the-well"),
]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each kind, and beside it what one process with the package read of it."""
    base = tmp_path_factory.mktemp("well")
    lines = []
    for kind, make in files.KINDS.items():
        for name, storage in STORAGE.items():
            folder = base / f"{kind}-{name}"
            files.write_set(folder, {"train": [make(), make()], "valid": [make()]}, **storage)
            lines += [f"open {folder} train {FRAMES}", f"dump {folder}.npz"]
    command = [OTHER, str(the_well_program.__file__)]
    subprocess.run(command, input="\n".join(lines), text=True, check=True, timeout=200, capture_output=True)
    return base


@pytest.mark.timeout(600)
@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("kind", files.KINDS)
def test_every_window_is_what_the_package_reads(dumped: Path, kind: str, storage: str) -> None:
    folder = dumped / f"{kind}-{storage}"
    with np.load(f"{folder}.npz") as archive:
        theirs = dict(archive)
    reader = WellReader(folder)
    obstacles = sum(field.name.endswith("_mask") for field in reader.task.fields)
    number = 0
    for trajectory in range(reader.splits["train"]):
        for start in range(reader.frames_in("train", trajectory) - FRAMES + 1):
            window = reader.read("train", trajectory, start, FRAMES)
            one = {name.split("/")[1]: values for name, values in theirs.items() if name.startswith(f"{number}/")}
            state = np.concatenate([one["input_fields"], one["output_fields"]])  # (T, *S, C)
            np.testing.assert_allclose(window.state, np.moveaxis(state, -1, 1), rtol=0, atol=1e-6)
            static = window.static[: len(window.static) - obstacles]
            assert ("constant_fields" in one) == bool(len(static))
            if len(static):
                np.testing.assert_allclose(static, np.moveaxis(one["constant_fields"], -1, 0), rtol=0, atol=1e-6)
            if "constant_scalars" in one:
                np.testing.assert_allclose(window.parameters, one["constant_scalars"], rtol=1e-6)
            codes = [[CODES[end] for end in axis.ends] for axis in reader.task.axes]
            np.testing.assert_array_equal(codes, one["boundary_conditions"])
            times = reader.times_in("train", trajectory)[start : start + FRAMES]
            theirs_at = np.concatenate([one["input_time_grid"], one["output_time_grid"]])
            np.testing.assert_allclose(times, theirs_at, rtol=0, atol=1e-6)
            for axis, points in enumerate(reader.coordinates):
                along = one["space_grid"].take(axis, axis=-1)
                for _ in range(len(reader.coordinates) - 1):
                    along = along.take(0, axis=-1 if axis == 0 or along.ndim - 1 > axis else 0)
                np.testing.assert_allclose(points, along, rtol=0, atol=1e-6)
            number += 1
    assert number == len({name.split("/")[0] for name in theirs})
