"""A run that was interrupted under an earlier version continues under this one, and ends in a scored bundle.

runs/v0 was written before checkpoints carried the identity of their run, runs/v1 after. runs/v2 was written before
`multiscale` became the default, from a recipe without model.type. They are never written again: a change that cannot
continue them breaks a user's run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STORED = Path(__file__).parent / "runs"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(260)]


@pytest.mark.parametrize("version", ["v0", "v1", "v2"])
def test_a_stored_run_continues(version: str, tmp_path: Path) -> None:
    shutil.copytree(STORED / "data", tmp_path / "data")
    shutil.copytree(STORED / version, tmp_path / "runs" / "stored")
    if version == "v2":  # as if the type had not been stored
        config = tmp_path / "runs" / "stored" / "config.yaml"
        config.write_text(config.read_text().replace("  type: latent_operator\n", ""))
    done = subprocess.run(
        [sys.executable, "-m", "ups", "train", "runs/stored"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERDICT state=completed" in done.stdout
    assert (tmp_path / "runs" / "stored" / "bundle" / "model.safetensors").is_file()
    log = "".join(path.read_text() for path in tmp_path.glob("runs/stored/logs/attempt_*/rank_00000.err"))
    assert ("carries no identity" in log) == (version == "v0")
