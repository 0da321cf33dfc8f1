"""The machine is refused before it can fail a run: full disk, small shared memory, few open files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ups.config.recipe import resolve
from ups.config.schema import Recipe
from ups.doctor.probes.wrap import check_space, judge_memory
from ups.run import preflight
from ups.run.preflight import CheckFailed, Report

RECIPES = Path(__file__).resolve().parents[3] / "recipes"


def tiny(*changes: str) -> Recipe:
    return resolve(RECIPES / "tiny.yaml", list(changes)).recipe


def test_this_machine_passes(tmp_path: Path) -> None:
    report = Report("machine")
    preflight.examine_machine(tiny(), 2, tmp_path / "run", report)
    assert "processors" in report.says
    assert not list(tmp_path.iterdir()), "nothing is left where the run will live"


def test_open_files_grow_with_ranks_workers_and_files() -> None:
    many = tiny("data.loader.workers=8")
    few, workers = preflight.open_files_needed(tiny(), 2), preflight.open_files_needed(many, 2)
    assert few < workers < preflight.open_files_needed(many, 512)


def test_a_run_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(CheckFailed, match="cannot be written"):
        preflight.check_disk(tmp_path / "run", Report("machine"))


def test_too_many_ranks_for_the_processors_is_a_warning() -> None:
    report = Report("machine")
    preflight.check_processors(tiny(), 8, report, 2.0)
    assert "8 ranks share 2 processors" in report.warnings[0]


@pytest.mark.processes
def test_small_shared_memory_is_refused(tmp_path: Path) -> None:
    program = (
        "from pathlib import Path; from ups.run.preflight import Report, check_shared_memory; import sys; "
        "check_shared_memory(2, Report('machine'), Path(sys.argv[1]))"
    )
    mounted = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]
    script = 'mount -t tmpfs -o size=64k none "$1" || exit 77; exec "$2" -c "$3" "$1"'
    done = subprocess.run(
        [*mounted, script, "sh", str(tmp_path), sys.executable, program], capture_output=True, text=True, timeout=60
    )
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip("this machine does not let a test mount its own tmpfs")
    assert "64 kB left" in done.stderr or "65.5 kB left" in done.stderr, done.stderr
    assert "CheckFailed" in done.stderr


def test_a_disk_too_small_for_the_checkpoints_is_refused() -> None:
    check_space(num_bytes=10**9, keep=3, free=4 * 10**9)
    with pytest.raises(CheckFailed, match="4 checkpoints of 1 GB need 4 GB"):
        check_space(num_bytes=10**9, keep=3, free=4 * 10**9 - 1)


def test_ranks_that_do_not_fit_in_memory_together_are_refused() -> None:
    report = Report("memory")
    judge_memory(17 * 10**9, 20 * 10**9, 4, report)
    assert report.warnings, "close to the limit is reported"
    with pytest.raises(CheckFailed, match=r"4 ranks with workers need 19.5 GB of 20 GB"):
        judge_memory(int(19.5e9), 20 * 10**9, 4, report)
