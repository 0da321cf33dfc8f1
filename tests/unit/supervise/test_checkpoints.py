"""The checkpoint that the line of a fault names is the one that a restart will use."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups.errors import CheckpointError
from ups.record.checkpoints import latest_verified
from ups.record.manifest import commit_directory, make_temporary
from ups.supervise.checkpoints import find_usable, last_commit


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    for step in (5, 10, 15):
        final = tmp_path / "checkpoints" / f"step_{step:08d}"
        temporary = make_temporary(final)
        (temporary / "data").write_bytes(bytes(1000))
        commit_directory(temporary, final)
    return tmp_path


def test_the_newest_whole_checkpoint_is_used(run_dir: Path) -> None:
    assert find_usable(run_dir).step == last_commit(run_dir) == 15


def test_one_flipped_bit_means_the_older_one(run_dir: Path) -> None:
    (run_dir / "checkpoints/step_00000015/data").write_bytes(bytes(999) + b"1")
    assert find_usable(run_dir).step == 10
    assert last_commit(run_dir) == 15
    assert find_usable(run_dir, hash_below_bytes=999).step == 15


def test_what_is_cut_or_not_committed_is_passed_over(run_dir: Path) -> None:
    (run_dir / "checkpoints/step_00000015/data").write_bytes(bytes(999))
    (run_dir / "checkpoints/step_00000010/COMMITTED").unlink()
    assert find_usable(run_dir).step == 5


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert find_usable(tmp_path).step is None


def test_what_a_link_points_to_is_not_a_checkpoint_of_the_run(run_dir: Path, tmp_path: Path) -> None:
    newest = run_dir / "checkpoints/step_00000015"
    elsewhere = newest.rename(tmp_path / "elsewhere")
    newest.symlink_to(elsewhere)
    assert find_usable(run_dir).step == last_commit(run_dir) == 10


def test_a_checkpoint_that_is_skipped_is_named_with_its_damage(run_dir: Path) -> None:
    (run_dir / "checkpoints/step_00000015/data").write_bytes(bytes(999) + b"1")
    (run_dir / "checkpoints/step_00000010/data").write_bytes(bytes(999))
    usable = find_usable(run_dir)
    assert (usable.step, list(usable.damaged)) == (5, [15, 10])
    assert "data" in usable.damaged[15]
    assert "size" in usable.damaged[10]
    noted: list[int] = []
    (run_dir / "checkpoints/step_00000005/progress.json").write_text("extra")
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints"):
        latest_verified(run_dir, on_damage=lambda step, problem: noted.append(step))
    assert noted == [15, 10, 5]
