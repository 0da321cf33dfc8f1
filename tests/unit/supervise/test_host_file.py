"""What hosts leave in the run directory for readers on other hosts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ups.record.blackbox import BlackBox, Phase, ring_path
from ups.supervise.options import HostInfo
from ups.supervise.run_file import RunFile, read_run
from ups.supervise.status import HostFile, rows_of_hosts

PLACE = HostInfo(1, 2, "gpu-17", "10.0.0.1", 29500, "eth0")


def test_the_ranks_of_a_host_are_seen_by_others(tmp_path: Path) -> None:
    box_dir = tmp_path / "box"
    box_dir.mkdir()
    box = BlackBox.create(ring_path(box_dir, 3), rank=3, world_size=4, attempt=0)
    box.record(Phase.FORWARD, 12)
    HostFile(tmp_path, PLACE, range(2, 4)).look(box_dir)
    (row,) = rows_of_hosts(tmp_path)
    assert (row.rank, row.host, row.step, row.phase, row.pid) == (3, "1:gpu-17", 12, "forward", os.getpid())
    assert row.document()["host"] == "1:gpu-17"


@pytest.mark.parametrize(
    "content",
    ["", "[]", "{}", '{"host": 1, "ranks": []}', '{"host": "1:x", "ranks": [1, {}, {"rank": "0"}]}'],
)
def test_a_file_that_is_no_summary_shows_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "hosts").mkdir()
    (tmp_path / "hosts" / "00001.json").write_text(content)
    assert rows_of_hosts(tmp_path) == []


def begin(run_dir: Path, **changes: Any) -> Path:
    file = RunFile(run_dir)
    file.begin(ranks=2, max_restarts=0, box_root=run_dir / "box")
    file.document.update({"hosts": ["0:a", "1:gpu-17"], "supervisor_pid": 2**30, **changes})
    file.save()
    return file.path


def test_a_head_of_the_same_name_elsewhere_is_not_judged_by_its_process_number(tmp_path: Path) -> None:
    """Containers often have one name; its number is then that of another process here."""
    begin(tmp_path, machine="another one")
    assert read_run(tmp_path)["state"] == "running"
    begin(tmp_path)
    assert read_run(tmp_path)["state"] == "died"


def test_a_head_that_others_have_lost_is_dead_until_it_writes_again(tmp_path: Path) -> None:
    path = begin(tmp_path, machine="another one")
    note = HostFile(tmp_path, PLACE, range(1, 2))
    note.leave("head_lost")
    now = path.stat().st_mtime_ns
    os.utime(tmp_path / "hosts/00001.json", ns=(now + 1, now + 1))
    assert json.loads((tmp_path / "hosts/00001.json").read_text())["left"] == "head_lost"
    document = read_run(tmp_path)
    assert (document["state"], document["cause"]) == ("died", "supervisor_died")
    os.utime(path, ns=(now + 2, now + 2))
    assert read_run(tmp_path)["state"] == "running"
