"""steps.json: a memory of what was done, which is only ever believed as a whole."""

import json
from pathlib import Path

import pytest

from ups.errors import MachineError
from ups.run.steps_file import DONE, STARTED, StepsFile, digest, read_steps


def test_what_was_begun_and_ended_is_read_again(tmp_path: Path) -> None:
    file = StepsFile(tmp_path)
    file.begin("data", digest({"a": 1}))
    assert [(one.name, one.outcome) for one in read_steps(tmp_path)] == [("data", STARTED)]
    file.end("data", DONE, outputs="x", says="made it")
    last = StepsFile(tmp_path).last("data")
    assert last is not None
    assert (last.outcome, last.inputs, last.outputs, last.says) == (DONE, digest({"a": 1}), "x", "made it")
    assert StepsFile(tmp_path).last("train") is None


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"format": 2, "steps": []}', '{"format": 1, "steps": 3}', '{"format": 1, "steps": [{"name": "data"}]}'],
)
def test_a_spoiled_file_only_means_that_steps_are_done_again(tmp_path: Path, content: str) -> None:
    (tmp_path / "steps.json").write_text(content)
    assert read_steps(tmp_path) == []


def test_a_record_with_a_foreign_field_is_not_believed(tmp_path: Path) -> None:
    file = StepsFile(tmp_path)
    file.begin("data", "x")
    document = json.loads((tmp_path / "steps.json").read_text())
    document["steps"][0]["seconds"] = "long"
    (tmp_path / "steps.json").write_text(json.dumps(document))
    assert read_steps(tmp_path) == []


def test_a_record_that_cannot_be_written_is_an_error_of_the_machine(tmp_path: Path) -> None:
    file = StepsFile(tmp_path / "gone")
    with pytest.raises(MachineError):
        file.begin("data", "x")
