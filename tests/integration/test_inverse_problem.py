"""The viscosity of a trajectory is found from noisy sensors, by a simulator that was just trained."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.environments import ROOT

SCRIPT = ROOT / "examples" / "inverse_problem.py"


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"HOME": str(folder), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), *options], cwd=folder, env=environment, capture_output=True, text=True,
        timeout=360, check=False,
    )  # fmt: skip


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_the_viscosity_is_found_within_five_percent(tmp_path: Path) -> None:
    pytest.importorskip("exponax")
    first = run(tmp_path)
    made = ("--bundle", str(tmp_path / "runs/inverse_problem/bundle"), "--data", str(tmp_path / "data/burgers1d.zarr"))
    # With other sensors of what the first one made, whose noise is three times as large.
    second = run(tmp_path, *made, "--guess", "0.1", "--noise", "0.03")
    for done, guess in ((first, 0.02), (second, 0.1)):
        assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
        match = re.search(r"guess (\S+), found nu = (\S+), truth (\S+):", done.stdout)
        assert match is not None, done.stdout[-2000:]
        start, result, truth = (float(number) for number in match.groups())
        assert start == pytest.approx(guess)
        assert abs(start / truth - 1) > 0.5, "a guess that is right already shows nothing"
        assert abs(result / truth - 1) < 0.05
        assert "None" not in done.stdout, "the answer was compared with the solver"
    assert "VERDICT" not in second.stdout, "nothing is trained where a bundle is given"
