"""Untrusted run directories: `ups runs`, `ups status` and `ups why` answer, and one bad run hides no other."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ups.cli.main import run
from ups.record import blackbox
from ups.record.blackbox import BlackBox, BlackBoxReader, Phase, ring_path
from ups.record.files import load_object, read_object
from ups.record.run_dir import RunDir
from ups.supervise.fault import MAX_CONSEQUENCES, Fault
from ups.supervise.run_file import RunFile, list_runs, read_run, survey_runs

HUGE = 10**400
DEEP = '{"a":' * 500 + "1" + "}" * 500
FAULT = Fault(0, 1, 2, "h", 7, "data", "exception(KeyError)", "a.py:3", 5, 2, "stop(restarts_off)", "x.err").document()
WRONG: list[dict[str, Any]] = [
    {"supervisor_pid": value} for value in ("abc", -1, 1.5, True, [1], {}, HUGE, 2**40, None, float("nan"))
]
WRONG += [{"supervisor_started": "abc"}, {"host": 3}, {"overrides": [1]}, {"format": True, "ranks": -1}]
for _key in ("started", "ended"):
    WRONG += [{_key: value} for value in (1e300, -1e300, -5, "x", True, HUGE, float("nan"), float("inf"), [])]
for _key in ("ranks", "checkpoint", "exit_code"):
    WRONG += [{_key: value} for value in (1e300, "x", True, HUGE, float("nan"), [])]
WRONG += [{"blackbox_dir": "a\0b"}, {"state": None}, {"name": ["x"]}, {"notices": [{"line": 3}]}, {"attempts": {}}]
WRONG += [{"attempts": [{"number": 0, "faults": [{**FAULT, key: value}]}]} for key, value in (
    ("rank", True), ("step", HUGE), ("attempt", "x"), ("checkpoint", 1.5), ("time_wall", float("nan")), ("cause", None),
    ("exit_code", "x"), ("down_after_seconds", "x"), ("consequences", {}),
)]  # fmt: skip
WRONG += [{"attempts": [{"number": value}]} for value in (True, "0", None, 1.0)]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("good", "bad"):
        run_dir = tmp_path / "runs" / name
        run_dir.mkdir(parents=True)
        file = RunFile(run_dir)
        file.begin(ranks=2, max_restarts=1, box_root=run_dir / "blackbox")
        file.document["attempts"].append({"number": 0, "faults": [FAULT]})
        file.save()
        for rank in (0, 1):
            box = BlackBox.create(
                ring_path(run_dir / "blackbox", rank), rank=rank, world_size=2, attempt=0, capacity=16
            )
            box.record(Phase.FORWARD, 3)
    return tmp_path / "runs"


def edit(run_dir: Path, change: dict[str, Any]) -> None:
    document = json.loads((run_dir / "run.json").read_text())
    (run_dir / "run.json").write_text(json.dumps({**document, **change}))


def answers(*arguments: str) -> int:
    started = time.monotonic()
    code = run(list(arguments))
    assert time.monotonic() - started < 10
    return code


def test_a_run_file_with_odd_values_is_unreadable_and_hides_no_other(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = (runs / "bad" / "run.json").read_text()
    for change in WRONG:
        (runs / "bad" / "run.json").write_text(sound)
        edit(runs / "bad", change)
        assert answers("runs") == 0, change
        out = capsys.readouterr().out
        assert "good" in out
        (line,) = [line for line in out.splitlines() if line.split()[0] == "bad"]
        assert "unreadable" in line, change
        assert "run.json" in line, change
        for command in ("status", "why"):
            assert answers(command, "bad") == 3, (command, change)
        assert "a bug in ups" not in capsys.readouterr().err
    assert answers("runs", "--json") == 0
    rows = {row["name"]: row["state"] for row in json.loads(capsys.readouterr().out)}
    assert rows["bad"] == "unreadable"
    assert rows["good"] != "unreadable"


def special(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the address of a socket is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
        os.chdir(here)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(10 * 2**30)
    elif kind == "deep":
        path.write_text(DEEP)
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "digits":
        path.write_text('{"format": ' + "9" * 100_000 + "}")


KINDS = ("fifo", "directory", "loop", "device", "socket", "sparse", "deep", "empty", "digits")


@pytest.mark.parametrize("kind", KINDS)
def test_special_files_in_every_place_do_not_hang_or_break(
    runs: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    bad = runs / "bad"
    for rank in (0, 1):
        special(ring_path(bad / "blackbox", rank), kind)
    stem = RunDir(bad).failure_stem(0, 1)
    stem.parent.mkdir(parents=True)
    for suffix in (".json", ".crash.txt", ".stacks.txt", ".worker_00.crash.txt"):
        special(stem.with_name(stem.name + suffix), kind)
    special(bad / "x.err", kind)
    for command in (
        ("status", "bad"),
        ("status", "bad", "--json"),
        ("why", "bad"),
        ("why", "bad", "--json"),
        ("runs",),
    ):
        assert answers(*command) == 0, command
    special(bad / "run.json", kind)
    assert answers("runs") == 0
    assert "unreadable" in capsys.readouterr().out
    assert answers("status", "bad") == 3


def test_a_directory_that_leads_to_itself_is_passed(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (runs / "loop").symlink_to(runs / "loop")
    (runs / "up").symlink_to(runs)
    assert answers("runs") == 0
    assert "good" in capsys.readouterr().out
    assert [path.name for path, _ in survey_runs(runs)[1]] == []
    assert len(list_runs(runs)) == 2


@pytest.mark.parametrize(
    "record", [{}, {"traceback": None}, {"traceback": ["x"]}, {"traceback": 3}, {"format": 1, "cause": "x"}]
)
def test_a_failure_record_without_traceback_does_not_break_why(
    runs: Path, capsys: pytest.CaptureFixture[str], record: dict[str, Any]
) -> None:
    stem = RunDir(runs / "bad").failure_stem(0, 1)
    stem.parent.mkdir(parents=True)
    stem.with_name(stem.name + ".json").write_text(json.dumps(record))
    assert answers("why", "bad") == 0
    assert capsys.readouterr().out.startswith("FAILED rank=1/2")


def test_escape_sequences_in_a_run_are_shown_and_not_sent(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\r\x7f"
    fault = {**FAULT, "cause": evil, "message": evil, "hint": evil, "log": evil, "host": evil}
    change = {"name": evil, "cause": evil, "verdict": evil, "state": evil, "notices": [{"line": evil}]}
    edit(runs / "bad", {**change, "attempts": [{"number": 0, "faults": [fault]}]})
    stem = RunDir(runs / "bad").failure_stem(0, 1)
    stem.parent.mkdir(parents=True)
    stem.with_name(stem.name + ".json").write_text(json.dumps({"traceback": evil}))
    (runs / f"x{chr(27)}[31m").mkdir()
    (runs / f"x{chr(27)}[31m" / "run.json").write_text("{}")
    for command in (("status", "bad"), ("why", "bad"), ("runs",), ("runs", "--json"), ("why", "bad", "--json")):
        assert answers(*command) == 0
        printed = capsys.readouterr().out
        assert not [c for c in printed if not c.isprintable() and c != "\n"], command
        if "--json" in command:
            json.loads(printed)


def forged(path: Path, change: Callable[[bytearray], None]) -> Path:
    content = bytearray(path.read_bytes())
    change(content)
    head = bytes(content[: blackbox._HEADER.size - 4])
    content[blackbox._HEADER.size - 4 : blackbox._HEADER.size] = struct.pack("<I", zlib.crc32(head))
    path.write_bytes(content)
    return path


def test_a_ring_that_claims_a_huge_capacity_is_not_searched(runs: Path) -> None:
    path = ring_path(runs / "bad" / "blackbox", 0)
    capacity = 100_000_000
    forged(path, lambda content: content.__setitem__(slice(16, 20), struct.pack("<I", capacity)))
    with path.open("r+b") as file:
        file.truncate(capacity * 64 + 100_000)
    assert answers("status", "bad") == 0
    with pytest.raises(Exception, match="another layout"):
        BlackBoxReader(path)


def test_a_record_with_an_unknown_phase_or_mark_is_left_out(runs: Path) -> None:
    path = ring_path(runs / "bad" / "blackbox", 0)
    content = bytearray(path.read_bytes())
    start = blackbox._RECORDS_OFFSET
    body = list(blackbox._BODY.unpack(content[start : start + blackbox._BODY.size]))
    for index, value in ((8, 200), (9, 77)):
        wrong = blackbox._BODY.pack(*[value if i == index else v for i, v in enumerate(body)])
        content[start : start + len(wrong) + 4] = wrong + struct.pack("<I", zlib.crc32(wrong))
        path.write_bytes(content)
        with contextlib.closing(BlackBoxReader(path)) as reader:
            assert [record.number for record in reader.tail(10)] == [2]


def test_documents_are_bounded_in_size_and_depth(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a":' * 99 + "1" + "}" * 99)
    assert load_object(path)
    for text in (DEEP, '{"a":' * 101 + "1" + "}" * 101, '{"a":' + "[" * 200 + "]" * 200 + "}", '{"a":' * 10**6):
        path.write_text(text)
        with pytest.raises(ValueError, match="JSON"):
            load_object(path)
        assert read_object(path) is None


def test_an_older_run_file_is_still_read(runs: Path) -> None:
    document = json.loads((runs / "good" / "run.json").read_text())
    for key in ("max_restarts", "overrides", "host", "supervisor_started", "updated"):
        document.pop(key)
    (runs / "good" / "run.json").write_text(json.dumps({**document, "state": "completed"}))
    assert read_run(runs / "good")["state"] == "completed"


def test_a_run_file_that_is_too_large_is_unreadable_at_once(runs: Path) -> None:
    path = runs / "bad" / "run.json"
    path.write_text(path.read_text().rstrip()[:-1] + ',"x":[' + "[]," * 3_000_000 + "[]]}")
    started = time.monotonic()
    assert [path.name for path, _ in survey_runs(runs)[1]] == ["bad"]
    assert time.monotonic() - started < 1


def test_a_run_of_many_ranks_and_attempts_stays_readable(tmp_path: Path) -> None:
    seen = {"rank": 1000, "phase": "step", "cause": "peer_lost", "step": 10**6, "at": "a" * 60, "message": "m" * 200}
    fault = Fault(0, 3, 1024, "host", 7, "step", "oom", message="m" * 2000)
    file = RunFile(tmp_path)
    file.begin(ranks=1024, max_restarts=3, box_root=tmp_path)
    for number in range(500):
        one = {**fault.document(), "attempt": number, "consequences": [seen] * MAX_CONSEQUENCES}
        file.document["attempts"].append({"number": number, "started": 1.0, "faults": [one]})
    assert not file.save()
    attempts = read_run(tmp_path)["attempts"]
    assert len(attempts) == 500
    assert len(attempts[0]["faults"][0]["consequences"]) == MAX_CONSEQUENCES
