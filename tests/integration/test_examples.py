"""The examples run unchanged, in an empty directory."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.environments import ROOT

EXAMPLES = ROOT / "examples"

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1200)]


@pytest.mark.long
def test_train_prints_scores_and_a_rollout(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "train.py")],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for words in (
        "Dataset('advection1d', 32 train",
        "VERDICT state=completed",
        "Errors on the valid split",
        "<xarray.",
    ):
        assert words in done.stdout
    assert len((EXAMPLES / "train.py").read_text().splitlines()) <= 20


@pytest.mark.long
def test_the_notebook_runs_and_draws_its_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(EXAMPLES / "first_look.ipynb", as_version=4)
    client = NotebookClient(
        notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs: list[Any] = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", {})]
    assert len(pictures) == 3
    assert all(len(base64.b64decode(picture)) > 5_000 for picture in pictures)
    text = "".join(str(output.get("text", "")) for output in outputs)
    assert "VERDICT state=completed" in text
    assert "\r" in text, "the progress line is rewritten in place"
    folder = os.environ.get("UPS_KEEP_NOTEBOOK")
    if folder:  # to look at the pictures
        nbformat.write(notebook, Path(folder) / "first_look.ipynb")
