"""kill -9 at any moment of a commit leaves the old or the new directory, never a mixture (real processes)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

DRIVER = "tests.unit.record.manifest_kill_driver"
ROOT = Path(__file__).parents[3]
OFFSETS = 20


def kills(where: Path, kind: str, *, replacing: bool, exchange: bool = True) -> list[dict[str, object]]:
    arguments = ["replacing" if replacing else "first", "exchange" if exchange else "two-renames", str(OFFSETS)]
    command = [sys.executable, "-m", DRIVER, str(where), kind, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    cases: list[dict[str, object]] = json.loads(done.stdout)
    assert len(cases) == OFFSETS
    return cases


def assert_old_or_new(cases: list[dict[str, object]], old: str, *, gap: bool = False) -> None:
    for case in cases:
        assert case["killed"], case
        # `gap`: between two renames a reader finds nothing until the writer's next start has put the old one back.
        assert case["before"] in {old, "new", *(["none"] if gap else [])}, case
        assert case["after"] in {old, "new"}, case
        assert case["left"] == (["final"] if case["after"] != "none" else []), case
        assert case["next"] == "next", case


@pytest.mark.parametrize("kind", ["call", "line", "time"])
def test_a_first_commit_is_there_or_not_at_20_kills(tmp_path: Path, kind: str) -> None:
    assert_old_or_new(kills(tmp_path, kind, replacing=False), "none")


@pytest.mark.parametrize("kind", ["call", "line", "time"])
def test_a_replacement_leaves_the_old_or_the_new_at_20_kills(tmp_path: Path, kind: str) -> None:
    cases = kills(tmp_path, kind, replacing=True)
    assert_old_or_new(cases, "old")
    if kind != "time":
        assert {case["before"] for case in cases} == {"old", "new"}, "the kills must fall on both sides of the commit"


@pytest.mark.parametrize("kind", ["call", "line"])
def test_two_renames_recover_the_old_or_the_new_at_20_kills(tmp_path: Path, kind: str) -> None:
    assert_old_or_new(kills(tmp_path, kind, replacing=True, exchange=False), "old", gap=True)
