"""Examples of an export, in Python without torch and with onnxruntime-web under Node, give what `Simulator` gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ups
from tests.integration.environments import ROOT
from tests.support.calibrated_bundle import calibrated_bundle
from tests.support.small_bundle import ADVECTION, grid
from ups.inference.bundle import load_bundle
from ups.inference.export import export

EXAMPLES = ROOT / "examples"
STEPS = 40
pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(1200)]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_python_and_node_roll_out_as_the_simulator_does(tmp_path: Path) -> None:
    path = calibrated_bundle(tmp_path / "b")
    folder = export(load_bundle(path), tmp_path / "b-onnx", "onnx", ["advection"])
    state = np.sin(2 * np.pi * grid(ADVECTION)[0])[None].astype(np.float32)
    np.save(tmp_path / "state.npy", state)
    state.tofile(tmp_path / "state.f32")
    result = ups.Simulator.load(path).rollout(state, STEPS, {"beta": 1.5}, task="advection", level=0.9)
    expected, size = result.u.values, float(np.sqrt((result.u.values**2).mean()))

    arguments = [str(folder), "advection"]
    printed = run([sys.executable, str(EXAMPLES / "onnx_rollout.py"), *arguments, "state.npy", "beta=1.5"], tmp_path)
    frames = np.load(tmp_path / "frames.npy")[1:, 0]
    assert np.abs(frames - expected).max() <= 1e-4 * size
    assert f"error of each field below [{result.u_error.values[0]:.3f}".rstrip("0") in printed

    run(["npm", "install", "--no-audit", "--no-fund", "onnxruntime-web@1.30.0"], tmp_path)
    (tmp_path / "onnx_rollout.mjs").write_text((EXAMPLES / "onnx_rollout.mjs").read_text())
    printed = run(["node", "onnx_rollout.mjs", *arguments, "state.f32", "beta=1.5"], tmp_path)
    frames = np.fromfile(tmp_path / "frames.f32", np.float32).reshape(STEPS + 1, -1)[1:]
    assert np.abs(frames - expected).max() <= 1e-4 * size
    assert f"error of each field below {result.u_error.values[0]:#.3g} " in printed
