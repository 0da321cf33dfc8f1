"""The commit of a run is read without git, from every form in which git keeps it, and from hostile ones not at all."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from ups.run.software import head_commit

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="the repositories are made by git")


def git(folder: Path, *words: str) -> str:
    own = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run([*own, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "inside").mkdir(parents=True)
    (folder / "file").write_text("1")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def test_the_commit_is_that_of_git(repository: Path, tmp_path: Path) -> None:
    commit = git(repository, "rev-parse", "HEAD")
    assert head_commit(repository / "inside") == commit
    git(repository, "pack-refs", "--all")
    assert head_commit(repository) == commit, "in packed-refs"
    git(repository, "worktree", "add", "-q", "-b", "other", str(tmp_path / "tree"))
    git(tmp_path / "tree", "commit", "-q", "--allow-empty", "-m", "second")
    assert head_commit(tmp_path / "tree") == git(tmp_path / "tree", "rev-parse", "HEAD") != commit
    git(repository, "checkout", "-q", "--detach")
    assert head_commit(repository) == commit, "HEAD is a commit itself"
    assert head_commit(tmp_path) is None


@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    "head", ["ref: ../../secret", "ref: /etc/passwd", "ref: refs/heads/none", "\0", "f" * 39, "pipe"]
)
def test_nothing_but_a_commit_comes_out(repository: Path, head: str) -> None:
    (repository / "secret").write_text("canary")
    (repository / ".git" / "HEAD").unlink()
    if head == "pipe":
        os.mkfifo(repository / ".git" / "HEAD")
    else:
        (repository / ".git" / "HEAD").write_text(head)
    assert head_commit(repository) is None
    shutil.rmtree(repository / ".git")
    (repository / ".git").write_text("gitdir: /dev\n")
    assert head_commit(repository) is None
