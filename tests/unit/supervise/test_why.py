"""Every cause has a meaning, advice and a section in the documentation."""

import json
import re
from pathlib import Path

import pytest

from ups.record.causes import CAUSES
from ups.record.run_dir import RunDir
from ups.supervise.fault import KEYS, Fault
from ups.supervise.run_file import RunFile, read_run
from ups.supervise.why import ADVICE, explain, faults_as_json, meaning, what_to_do

DOCS = Path(__file__).parents[3] / "docs" / "failures.md"


def test_every_cause_has_advice() -> None:
    assert ADVICE.keys() == CAUSES.keys()


def test_every_cause_has_a_section_in_the_documentation() -> None:
    sections = set(re.findall(r"^### `?([a-z_]+)`?", DOCS.read_text(), re.MULTILINE))
    assert sections == set(CAUSES)


def test_a_cause_of_the_future_is_still_explained() -> None:
    assert meaning("unheard_of(x)")
    assert what_to_do("unheard_of(x)")


def test_a_run_without_its_evidence_is_still_explained(tmp_path: Path) -> None:
    file = RunFile(tmp_path)
    file.begin(ranks=2, max_restarts=1, box_root=tmp_path)
    fault = Fault(0, 1, 2, "h", 7, "data", "killed(SIGKILL)", log="logs/attempt_0/rank_00001.err", evidence="gone.json")
    file.document["attempts"].append({"number": 0, "faults": [fault.document()]})
    file.document.update(state="failed", verdict="VERDICT state=failed")
    file.save()
    document = read_run(tmp_path)
    text = explain(tmp_path, document)
    assert text.splitlines()[0] == fault.one_line()
    assert "What to do:" in text
    assert list(faults_as_json(document)[0])[: len(KEYS)] == list(KEYS)


def with_dumps(run_dir: Path, dumps: dict[int, bytes]) -> str:
    """What is said about a run of two ranks that left these dumps of the flight recorder."""
    file = RunFile(run_dir)
    file.begin(ranks=2, max_restarts=1, box_root=run_dir)
    fault = Fault(0, 1, 2, "h", 7, "sync", "stalled", log="logs/attempt_0/rank_00001.err")
    file.document["attempts"].append({"number": 0, "faults": [fault.document()]})
    folder = RunDir(run_dir).failures_of(0)
    folder.mkdir(parents=True)
    for rank, content in dumps.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(content)
    return explain(run_dir, file.document)


def test_the_flight_recorder_says_who_did_not_begin_a_collective(tmp_path: Path) -> None:
    # Recorded from two ranks: the second one did not call the fourth all_reduce.
    recorded = {rank: (Path(__file__).parent / f"flight_rank_{rank}.pickle").read_bytes() for rank in (0, 1)}
    text = with_dumps(tmp_path, recorded)
    assert "Dumps of torch's flight recorder, from 2 of 2 ranks:" in text
    assert "rank 0  gloo:all_reduce, collective 4 of default_pg: not over (scheduled)" in text
    assert "rank 1  gloo:all_reduce, collective 3 of default_pg: over" in text
    assert "did not begin collective 4: rank 1\n" in text
    assert f"torchfrtrace --prefix nccl_trace_rank_ {RunDir(tmp_path).failures_of(0)}" in text


@pytest.mark.parametrize(
    "dump", [b"cos\nsystem\n(S'touch opened'\ntR.", b"\x80\x04", b"", b"I1\n.", b"\x80\x04\x95" + b"\xff" * 40]
)
def test_a_hostile_dump_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dump: bytes) -> None:
    monkeypatch.chdir(tmp_path)
    text = with_dumps(tmp_path, {0: dump})
    assert "rank 0  cannot be read: " in text
    assert not Path("opened").exists()


def test_a_run_without_faults_says_so(tmp_path: Path) -> None:
    file = RunFile(tmp_path)
    file.begin(ranks=2, max_restarts=1, box_root=tmp_path)
    assert "no fault so far" in explain(tmp_path, read_run(tmp_path))


def test_a_fault_that_was_healed_is_not_reported_as_the_end_of_the_run(tmp_path: Path) -> None:
    file = RunFile(tmp_path)
    file.begin(ranks=2, max_restarts=1, box_root=tmp_path)
    fault = Fault(0, 1, 2, "h", 7, "data", "killed(SIGKILL)", action="restart 1/3", log="logs/attempt_0/rank_00001.err")
    file.document["attempts"].append({"number": 0, "faults": [fault.document()]})
    file.document.update(supervisor_pid=2**22 + 1)
    file.save()
    lines = explain(tmp_path, read_run(tmp_path)).splitlines()
    assert lines[0] == fault.one_line()
    assert lines[1] == "VERDICT state=died exit=6 attempts=1 faults=1 cause=supervisor_died"
    assert lines[3] == f"What it means: {meaning('supervisor_died')}."
    assert "The last fault, after which the run was started again:" in lines
    file.document.update(state="completed", verdict="VERDICT state=completed exit=0")
    text = explain(tmp_path, file.document)
    assert "One fault, restarted each time; none of them ended the run." in text
    assert "What to do: " in text


def test_a_untrusted_run_shows_no_file_of_its_reader(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("my key")
    run = tmp_path / "run"
    run.mkdir()
    file = RunFile(run)
    file.begin(ranks=2, max_restarts=1, box_root=run)
    for log, evidence in (("../secret", ""), (str(tmp_path / "secret"), "../secret"), ("/dev/zero", "/dev/zero")):
        fault = Fault(0, 1, 2, "h", 7, "data", "killed(SIGKILL)", log=log, evidence=evidence)
        text = explain(run, {**file.document, "attempts": [{"number": 0, "faults": [fault.document()]}]})
        assert "What to do: " in text
        assert "my key" not in text


def test_evidence_of_another_shape_is_said_to_be_so(tmp_path: Path) -> None:
    (tmp_path / "evidence.json").write_text('{"ranks": [{"rank": "x", "timeline": 3}]}')
    file = RunFile(tmp_path)
    file.begin(ranks=2, max_restarts=1, box_root=tmp_path)
    fault = Fault(0, 1, 2, "h", 7, "data", "killed(SIGKILL)", evidence="evidence.json")
    file.document["attempts"].append({"number": 0, "faults": [fault.document()]})
    assert "The evidence in evidence.json is not what" in explain(tmp_path, file.document)


def test_notices_and_deaths_without_a_known_peak_are_shown_as_they_are(tmp_path: Path) -> None:
    file = RunFile(tmp_path)
    file.begin(ranks=1, max_restarts=1, box_root=tmp_path)
    file.document["notices"].append({"time": 0.0, "line": "NOTICE checkpoint step=8 is damaged"})
    rank = {"rank": 0, "exit": {"code": -9}, "memory": {}, "timeline": []}
    (tmp_path / "evidence.json").write_text(json.dumps({"ranks": [rank]}))
    fault = Fault(0, 0, 1, "h", 7, "data", "killed(SIGKILL)", evidence="evidence.json")
    for attempts in ([], [{"number": 0, "faults": [fault.document()]}]):
        file.document["attempts"] = attempts
        for state in ("running", "completed", "failed"):
            text = explain(tmp_path, {**file.document, "state": state, "cause": "killed(SIGKILL)"})
            assert text.count("  NOTICE checkpoint step=8 is damaged") == 1
    assert "rank 0: exit code -9\n" in text
