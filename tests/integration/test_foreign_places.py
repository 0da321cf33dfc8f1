"""A number without a name or a home, a directory without write permission, a file system that is read-only: as in a
container of a foreign cluster. Real uids and real mounts: the tests need root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STORED = Path(__file__).parent / "runs"
NUMBER = "54321"
# May read everything, because the interpreter of these tests may lie in a user's home; may write what its uid may.
NOBODY = ["setpriv", f"--reuid={NUMBER}", f"--regid={NUMBER}", "--clear-groups"]
NOBODY += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(600),
    pytest.mark.skipif(os.getuid() != 0, reason="only root can take another uid and mount"),
    pytest.mark.skipif(not shutil.which("setpriv") or not shutil.which("unshare"), reason="needs util-linux"),
]


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A directory with data and a recipe that anybody may read and only root may write to."""
    # `access` asks without capabilities: others must get through the directories above, too.
    for parent in tmp_path.parents[:-2]:
        parent.chmod(parent.stat().st_mode | 0o011)
    tmp_path.chmod(0o755)
    desk = tmp_path / "desk"
    shutil.copytree(STORED / "data", desk / "data")
    shutil.copytree(STORED / "v1", desk / "v1")
    (tmp_path / "free").mkdir(mode=0o777)
    (tmp_path / "free").chmod(0o777)
    return desk


def environment(**more: str) -> dict[str, str]:
    variables = {name: value for name, value in os.environ.items() if name != "HOME" and not name.startswith("XDG_")}
    # Bytecode of a foreign package is not written by who may not.
    return variables | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONDONTWRITEBYTECODE": "1", **more}


def ups(
    folder: Path, *arguments: str, before: tuple[str, ...] = tuple(NOBODY), **more: str
) -> subprocess.CompletedProcess[str]:
    command = [*before, sys.executable, "-m", "ups", *arguments]
    return subprocess.run(command, cwd=folder, env=environment(**more), capture_output=True, text=True, timeout=180)


def read_only(folder: Path) -> tuple[str, ...]:
    """Runs what follows, as root, where `place` is mounted read-only."""
    script = 'mount --bind "$0" "$0" && mount -o remount,ro,bind "$0" && cd "$0" && exec "$@"'
    return ("unshare", "--mount", "sh", "-c", script, str(folder))


def short(result: subprocess.CompletedProcess[str], *words: str) -> None:
    """An error in one line, with cause and exit code, and no traceback."""
    assert result.returncode == 5, result.stdout + result.stderr
    assert "Traceback" not in result.stderr, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("error: environment: "), result.stderr
    for word in words:
        assert word in last, last


@pytest.mark.long
def test_a_number_without_a_name_and_a_home_trains_scores_and_simulates(desk: Path) -> None:
    run_dir = desk.parent / "free" / "run"
    options = ("--set", f"run.dir={run_dir}", "--set", "stages.0.steps=2")
    done = ups(desk, "train", "v1/config.yaml", *options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "VERDICT state=completed" in done.stdout
    short(ups(desk, "rollout", str(run_dir), "data/wave1d.zarr", "-o", "result.zarr"), "Permission denied")
    film = run_dir.parent / "film.mp4"
    done = ups(desk, "rollout", str(run_dir), "data/wave1d.zarr", "--film", str(film))
    assert done.returncode == 0, done.stdout + done.stderr
    assert film.stat().st_size > 0
    assert sorted(path.name for path in desk.iterdir()) == ["data", "v1"]  # no directory called "~"


def test_help_and_errors_need_no_home(desk: Path) -> None:
    done = ups(desk, "--help")
    assert done.returncode == 0
    assert "Set XDG_STATE_HOME to keep tracebacks" in done.stdout
    assert ups(desk, "status", "nothing").returncode == 3
    assert not (desk / "~").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ("train", "v1/config.yaml"),
        ("export", "bundle", "v1"),
        ("data", "inspect", "data/wave1d.zarr", "--picture", "x.png"),
        ("data", "pack", "data/wave1d.zarr", "-o", "packed.zarr"),
    ],
)
def test_a_place_that_is_not_ours_is_one_line(desk: Path, arguments: tuple[str, ...]) -> None:
    short(ups(desk, *arguments), "Permission denied" if arguments[0] != "train" else "cannot be written")


@pytest.mark.parametrize("arguments", [("train", "v1/config.yaml"), ("eval", "v1")])
def test_a_read_only_file_system_is_one_line(desk: Path, arguments: tuple[str, ...]) -> None:
    short(ups(desk, *arguments, before=read_only(desk)))
