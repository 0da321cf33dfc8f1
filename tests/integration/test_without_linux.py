"""What a laptop with macOS lacks is hidden: /proc and /dev/shm by real mounts, functions of the C library and of Python
by `without_linux/sitecustomize.py`. Rollout, demo and `ups.fit` do without; what cannot says so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.environments import ROOT
from tests.support.calibrated_bundle import make_shipped

HIDDEN = ROOT / "tests" / "support" / "without_linux"
MOUNTS = 'mount -t tmpfs none /proc && mount -t tmpfs -o ro none /dev/shm && exec "$@"'
SPACE = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", MOUNTS, "sh"]
FIT = """
import os, ups
from pathlib import Path
assert not os.listdir("/proc") and not os.access("/dev/shm", os.W_OK) and not hasattr(os, "memfd_create")
recipe = {
    "version": 1,
    "run": {"name": "first"},
    "data": {"batch_size": 2, "tasks": [{"name": "advection", "path": "advection.zarr"}]},
    "model": {"type": "multiscale", "widths": [8, 8], "blocks": [1, 1], "num_heads": 2, "propagator": False},
    "stages": [{"type": "operator", "steps": 3}],
}
run = ups.fit(recipe, progress=False)
state = ups.open_data("advection.zarr").trajectory("test").isel(time=0)
assert "<td>completed</td>" in run._repr_html_() and "<td>one step</td>" in ups.evaluate(run)._repr_html_()
print(run.state, run.simulator().rollout(state, 2).sizes["time"])
workers = {"run.name": "third", "data.loader.workers": 1}
for start, changes in ((ups.train, {"run.name": "other"}), (ups.fit, workers)):
    try:
        start(recipe, progress=False, **changes)
    except ups.errors.MachineError as error:
        print(error.message)
"""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        shutil.which("unshare") is None
        or subprocess.run([*SPACE, "true"], capture_output=True, timeout=20).returncode != 0,
        reason="needs a mount namespace",
    ),
]


def hidden(desk: Path, *command: str) -> str:
    """Standard output of Python with these arguments, which must succeed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (HIDDEN, ROOT / "src", ROOT)))}
    done = subprocess.run(
        [*SPACE, sys.executable, *command], cwd=desk, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    desk = tmp_path_factory.mktemp("desk")
    make_shipped(desk / "shipped" / "ups-joint")
    shutil.copytree(desk / "shipped" / "ups-joint" / "states" / "advection.zarr", desk / "advection.zarr")
    return desk


def test_training_in_one_process_needs_nothing_of_linux_and_other_processes_say_that_they_do(desk: Path) -> None:
    said = ["completed 2", "supervised ranks need Linux", "reader processes need Linux"]
    assert hidden(desk, "-c", FIT).splitlines() == said


def test_demo_and_rollout_need_nothing_of_linux(desk: Path) -> None:
    shown = "import sys; from pathlib import Path; from ups.record import run_dir; run_dir.SHIPPED = Path('shipped')"
    code = f"{shown}; from ups.cli.main import run; sys.exit(run(sys.argv[1:]))"
    assert "wrote ups-demo-flow." in hidden(desk, "-c", code, "demo", "flow")
    written = ("-o", "out.nc", "--film", "out.gif")
    said = hidden(desk, "-m", "ups", "rollout", "shipped/ups-joint", "--task", "advection", *written)
    assert said.endswith("wrote out.nc\nwrote out.gif\n")
