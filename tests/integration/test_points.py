"""Data on points through every command: from files of a mesh to values at its points, in an export, on two ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ups.formats.mesh_files import read_mesh_file

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.processes


def ups(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ups", *arguments],
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tutorial of docs/points.md, with two steps of training."""
    folder = tmp_path_factory.mktemp("points")
    page = (ROOT / "docs" / "points.md").read_text()
    page = page[page.index("## From a mesh to a film") : page.index("## What the network sees")]
    for kind, block in re.findall(r"^```(python|bash)\n(.*?)^```", page, re.M | re.S):
        if kind == "python":
            subprocess.run([sys.executable, "-c", block], cwd=folder, check=True, timeout=600)
            continue
        for line in block.splitlines():
            words = line.split("#")[0].split()
            if words[1] == "train":
                recipe = folder / words[2]
                text = re.sub(r"^    steps: .*", "    steps: 4", recipe.read_text(), flags=re.M)
                text = text.replace(
                    "  type: multiscale\n", "  type: multiscale\n  widths: [8, 16]\n  blocks: [1, 1]\n  num_heads: 1\n"
                )
                recipe.write_text(text)
            if words[1:3] == ["data", "generate"]:
                words[-1] = "8,2,2"
            ups(folder, *words[1:])
    return folder


def test_the_tutorial_ends_with_values_at_the_points_and_a_film(trained: Path) -> None:
    given, made = read_mesh_file(trained / "new.npz"), read_mesh_file(trained / "predicted.npz")
    assert np.array_equal(made.points, given.points)
    assert made.fields["u"].shape == (20, len(given.points))
    assert np.isfinite(made.fields["u"]).all()
    assert (trained / "heat.gif").stat().st_size > 3_000


def test_errors_are_those_at_the_points(trained: Path) -> None:
    facts, _ = json.JSONDecoder().raw_decode(ups(trained, "rollout", "heat", "-o", "again.npz", "--json"))
    assert {"model at the points", "interpolated truth at the points"} <= facts["errors"].keys()


@pytest.mark.long
def test_an_export_computes_the_same(trained: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    ups(trained, "export", "onnx", "heat", "-o", "exported")
    assert list((trained / "exported").glob("*.onnx"))


@pytest.mark.long
def test_two_ranks_train_as_one_does_and_a_stopped_run_continues(trained: Path) -> None:
    shown = ups(trained, "doctor", "heat/recipe.yaml", "--ranks", "2")
    assert re.search(r"ok +parity", shown), shown
