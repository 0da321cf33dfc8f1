"""Every cause has a meaning, advice and a section in the documentation."""

import re
from pathlib import Path

from ups.record.causes import CAUSES
from ups.record.failure import failure_stem
from ups.supervise.advice import ADVICE, meaning, what_to_do
from ups.supervise.fault import KEYS, Fault
from ups.supervise.run_file import RunFile, read_run
from ups.supervise.why import explain, faults_as_json

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


def test_dumps_of_the_flight_recorder_are_listed_and_never_opened(tmp_path: Path) -> None:
    file = RunFile(tmp_path)
    file.begin(ranks=2, max_restarts=1, box_root=tmp_path)
    fault = Fault(0, 1, 2, "h", 7, "sync", "stalled", log="logs/attempt_0/rank_00001.err")
    file.document["attempts"].append({"number": 0, "faults": [fault.document()]})
    dump = failure_stem(tmp_path, 0, 0).parent / "nccl_trace_rank_0"
    dump.parent.mkdir(parents=True)
    dump.write_bytes(b"cos\nsystem\n(S'touch opened'\ntR.")
    text = explain(tmp_path, file.document)
    assert "Dumps of torch's flight recorder, from 1 of 2 ranks:" in text
    assert f"nccl_trace_rank_0  {dump.stat().st_size} bytes" in text
    assert f"torchfrtrace --prefix nccl_trace_rank_ {dump.parent}" in text
    assert not Path("opened").exists()


def test_a_run_without_faults_says_so(tmp_path: Path) -> None:
    file = RunFile(tmp_path)
    file.begin(ranks=2, max_restarts=1, box_root=tmp_path)
    assert "no fault so far" in explain(tmp_path, read_run(tmp_path))
