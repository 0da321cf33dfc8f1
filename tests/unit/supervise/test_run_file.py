"""run.json: what was written stays, a dead supervisor is seen."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ups.errors import EXIT_CODES, ConfigError
from ups.supervise.fault import Fault
from ups.supervise.run_file import RunFile, find_run, hold_steps, left, list_runs, note_gate, read_run
from ups.supervise.why import explain


def fault(rank: int, time_wall: float = 0.0) -> dict[str, Any]:
    return Fault(0, rank, 16, "h", 7, "data", "killed(SIGKILL)", time_wall=time_wall).document()


def begin(run_dir: Path, ranks: int = 2) -> RunFile:
    run_dir.mkdir(parents=True, exist_ok=True)
    file = RunFile(run_dir)
    file.begin(ranks=ranks, max_restarts=3, box_root=run_dir / "box")
    return file


def test_a_living_run_is_running(tmp_path: Path) -> None:
    begin(tmp_path / "a")
    assert read_run(tmp_path / "a")["state"] == "running"


def test_a_run_whose_supervisor_is_gone_died(tmp_path: Path) -> None:
    program = (
        "import sys, os; from pathlib import Path; from ups.supervise.run_file import RunFile;"
        "f = RunFile(Path(sys.argv[1])); f.begin(ranks=1, max_restarts=0, box_root=Path('x')); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=False)
    document = read_run(tmp_path)
    assert (document["state"], document["cause"], document["exit_code"]) == ("died", "supervisor_died", 6)
    assert document["verdict"] == "VERDICT state=died exit=6 attempts=0 faults=0 cause=supervisor_died"


def test_the_number_of_a_dead_supervisor_may_belong_to_somebody_else_now(tmp_path: Path) -> None:
    file = begin(tmp_path)
    file.document.update(supervisor_pid=os.getpid(), supervisor_started=12345)
    file.save()
    assert read_run(tmp_path)["state"] == "died"


def test_a_second_stretch_keeps_the_attempts_and_overrides_of_the_first(tmp_path: Path) -> None:
    file = begin(tmp_path)
    file.document["attempts"].append({"number": 0, "faults": [fault(0)]})
    file.document["overrides"]["engine.micro_batch_size"] = 4
    file.save()
    again = begin(tmp_path).document
    assert again["attempts"][0]["outcome"] == "supervisor_died"
    assert again["overrides"] == {"engine.micro_batch_size": 4}


def test_a_run_is_found_by_path_or_by_name(tmp_path: Path) -> None:
    begin(tmp_path / "runs" / "small")
    assert find_run("small", tmp_path) == find_run("runs/small", tmp_path) == tmp_path / "runs" / "small"
    with pytest.raises(ConfigError) as caught:
        find_run("smal", tmp_path)
    assert "small" in caught.value.hint


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 99}'])
def test_a_damaged_file_is_said_to_be_one_and_hides_no_other_run(tmp_path: Path, content: str) -> None:
    begin(tmp_path / "good")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad/run.json").write_text(content)
    with pytest.raises(ConfigError):
        read_run(tmp_path / "bad")
    assert [path.name for path, _ in list_runs(tmp_path)] == ["good"]


def test_saving_on_a_full_disk_does_not_end_the_watch(tmp_path: Path) -> None:
    file = begin(tmp_path)
    file.path = Path("/dev/full/run.json")
    file.save()


def test_notices_are_bounded(tmp_path: Path) -> None:
    file = begin(tmp_path)
    file.document["notices"] = [{"line": str(n)} for n in range(10_000)]
    file.save()
    assert len(json.loads((tmp_path / "run.json").read_text())["notices"]) == 100


def test_a_damaged_run_does_not_hide_the_others(tmp_path: Path) -> None:
    good = RunFile(tmp_path / "good")
    good.path.parent.mkdir()
    good.begin(ranks=2, max_restarts=1, box_root=tmp_path)
    changes: list[dict[str, object]] = [
        {"ranks": 10**12},
        {"attempts": [{"number": 0, "faults": [{"cause": "x"}]}]},
        {"attempts": 3},
        {"notices": ["x"]},
        {"started": "yesterday"},
        {"verdict": None},
    ]
    for number, change in enumerate(changes):
        bad = tmp_path / f"bad_{number}"
        bad.mkdir()
        (bad / "run.json").write_text(json.dumps({**good.document, **change}))
    assert [path.name for path, _ in list_runs(tmp_path)] == ["good"]


def test_what_kept_the_state_from_being_written_is_reported(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "gone")
    file.path.parent.mkdir()
    file.begin(ranks=1, max_restarts=0, box_root=tmp_path)
    assert file.save() == ""
    shutil.rmtree(file.path.parent)
    assert file.save()


def test_a_run_that_was_asked_to_leave_ends_with_the_code_of_the_signal() -> None:
    assert left(signal.SIGINT, 12, 10) == ("stopped", "asked(SIGINT)", 130, "ckpt=10 lost=2")
    assert left(0, 12, None) == ("preempted", "asked(rank)", 143, "ckpt=- lost=12")
    ends = {number: left(number, 0, None) for number in (0, signal.SIGTERM, signal.SIGHUP)}
    assert {(state, code) for state, _, code, _ in ends.values()} == {("preempted", 143)}
    assert {130, 143} <= EXIT_CODES.keys()


def judged(holds: bool) -> list[dict[str, Any]]:
    return [{"task": "a", "condition": "trmse at most 1", "holds": holds, "says": "is 2", "value": 2.0}]


def test_a_gate_is_a_verdict_that_can_be_taken_back(tmp_path: Path) -> None:
    file = begin(tmp_path)
    file.document["checkpoint"] = 7
    file.pronounce("completed", "", 0, "")
    ended = read_run(tmp_path)["ended"]
    line = note_gate(tmp_path, judged(False), 'a: "trmse" at most 1: is 2')
    assert line == (
        "VERDICT state=gate_failed exit=9 attempts=0 faults=0 cause=gate step=7 ckpt=7 verified "
        "gate=\"a: 'trmse' at most 1: is 2\""
    )
    document = read_run(tmp_path)
    assert (document["state"], document["cause"], document["exit_code"]) == ("gate_failed", "gate", 9)
    assert document["ended"] == ended, "the training ended when it did"
    assert "FAILED  a: trmse at most 1: is 2" in explain(tmp_path, document)
    assert "gate=passed" in note_gate(tmp_path, judged(True), "")
    document = read_run(tmp_path)
    assert (document["state"], document["cause"], document["exit_code"]) == ("completed", "", 0)
    note_gate(tmp_path, [], "")
    assert "gate" not in read_run(tmp_path)


@pytest.mark.parametrize("state", ["failed", "preempted", "stopped"])
def test_only_a_trained_run_is_judged(tmp_path: Path, state: str) -> None:
    begin(tmp_path).pronounce(state, "", 6, "")
    with pytest.raises(ConfigError, match=state):
        note_gate(tmp_path, judged(True), "")
    assert read_run(tmp_path)["state"] == state


def test_a_new_start_forgets_how_the_last_one_was_judged(tmp_path: Path) -> None:
    begin(tmp_path).pronounce("completed", "", 0, "")
    note_gate(tmp_path, judged(False), "a")
    assert "gate" not in begin(tmp_path).document


@pytest.mark.parametrize("gate", [3, {"conditions": 3}, {"conditions": [{"holds": 1}]}, {"conditions": [3]}])
def test_a_gate_that_no_judge_writes_makes_the_record_unreadable(tmp_path: Path, gate: object) -> None:
    file = begin(tmp_path)
    file.document["gate"] = gate
    file.save()
    with pytest.raises(ConfigError, match=r"'gate[.\w]*' is not what"):
        read_run(tmp_path)


def test_a_run_that_is_still_prepared_is_said_to_be_so(tmp_path: Path) -> None:
    with hold_steps(tmp_path / "runs" / "small"), pytest.raises(ConfigError, match="has not begun to train"):
        find_run("small", tmp_path)
