"""Limits are those of the control group where it has some, else of the machine."""

from pathlib import Path

import pytest

from ups.run import preflight as limits


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[Path, Path]:
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16000000 kB\nMemAvailable:   12000000 kB\n")
    (proc / "self" / "cgroup").write_text("0::/slurm/job_7\n")
    (groups / "slurm" / "job_7").mkdir(parents=True)
    return proc, groups


def test_without_a_group_limit_the_machine_counts(kernel: tuple[Path, Path]) -> None:
    proc, groups = kernel
    (groups / "slurm" / "job_7" / "memory.max").write_text("max\n")
    assert limits.memory_limit_bytes(proc, groups) == 16_000_000 * 1024
    assert limits.memory_available_bytes(proc, groups) == 12_000_000 * 1024


def test_a_limit_of_any_group_above_counts(kernel: tuple[Path, Path]) -> None:
    proc, groups = kernel
    (groups / "slurm" / "memory.max").write_text("4000000000\n")
    (groups / "slurm" / "memory.current").write_text("3000000000\n")
    (groups / "slurm" / "memory.stat").write_text("anon 1\ninactive_file 500000000\n")
    assert limits.memory_limit_bytes(proc, groups) == 4_000_000_000
    assert limits.memory_available_bytes(proc, groups) == 1_500_000_000


def test_a_quota_counts_as_processors(kernel: tuple[Path, Path]) -> None:
    proc, groups = kernel
    (groups / "slurm" / "job_7" / "cpu.max").write_text("50000 100000\n")
    assert limits.usable_processors(groups, proc) == 0.5


def test_free_space_is_asked_of_the_nearest_directory(tmp_path: Path) -> None:
    assert limits.free_bytes(tmp_path / "not" / "there" / "yet") > 0
