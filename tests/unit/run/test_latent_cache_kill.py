"""kill -9 at any moment of `ups data cache` leaves the old cache or the new one, never a mixture; it then continues."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import path_with

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

DRIVER = Path(__file__).with_name("latent_cache_kill_driver.py")
OFFSETS = 20


def test_20_kills_leave_the_old_or_the_new_and_the_next_writer_ends_with_the_same_bytes(tmp_path: Path) -> None:
    command = [sys.executable, str(DRIVER), str(tmp_path), str(OFFSETS)]
    done = subprocess.run(command, env={**os.environ, **path_with()}, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    cases = document["cases"]
    assert len(cases) == OFFSETS
    for case in cases:
        before = document["old"] if case["replacing"] else "none"
        assert case["found"] in {before, document["new"]}, case
        assert case["again"] == document["new"], case
        assert case["left"] == ["latents"], case
    assert sum(case["killed"] for case in cases) >= OFFSETS - 2
    assert any(case["kept"] for case in cases), "kills must fall between the files too"
