"""The directory of rings in shared memory: it goes with its supervisor only."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ups.supervise.supervisor_process import box_root, sweep_box_roots

pytestmark = pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs shared memory")

SWEEP = [sys.executable, "-c", "from ups.supervise.supervisor_process import sweep_box_roots; sweep_box_roots()"]
HOLD = """
import sys, time
from pathlib import Path
from ups.supervise.supervisor_process import box_root
with box_root(Path("."), 1) as root:
    print(root, flush=True)
    time.sleep(600)
"""


def test_it_is_removed_at_the_end(tmp_path: Path) -> None:
    with box_root(tmp_path, 1) as root:
        assert root.stat().st_mode & 0o777 == 0o700
        (root / "rank_00000.ring").write_bytes(b"x")
        sweep_box_roots()
        assert (root / "rank_00000.ring").exists()
    assert not root.exists()


def test_that_of_a_killed_supervisor_is_swept() -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        root = Path(process.stdout.readline().strip())
        sweep_box_roots()
        assert root.is_dir()
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    sweep_box_roots()
    assert not root.exists()


def test_a_supervisor_of_another_container_removes_nothing_of_ours(tmp_path: Path) -> None:
    """It shares the memory and does not see our process."""
    space = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], capture_output=True, timeout=20).returncode:
        pytest.skip("namespaces of processes cannot be made here")
    with box_root(tmp_path, 1) as root:
        seen = [sys.executable, "-c", f"import os; os.kill({os.getpid()}, 0)"]
        assert subprocess.run([*space, *seen], capture_output=True, timeout=60).returncode != 0
        subprocess.run([*space, *SWEEP], check=True, timeout=60)
        assert root.is_dir()
