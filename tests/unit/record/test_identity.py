"""A checkpoint proves that it belongs to the run; whoever reads the proof trusts nothing else in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ups.errors import CheckpointError, DataChangedError, ForeignCheckpointError, RecipeChangedError
from ups.record.identity import MAX_COMMITS, RunIdentity, note_commit, note_damage, read_commits
from ups.record.manifest import commit_directory, make_temporary
from ups.record.run_dir import RunDir

RUN = replace(RunIdentity.new(), recipes=("old", "now"), statistics="s", data={"wave": "d"})


def checkpoint(run_dir: Path, step: int, mark: Any, **progress: Any) -> Path:
    final = RunDir(run_dir).checkpoint(step)
    temporary = make_temporary(final)
    document: dict[str, Any] = {"progress": {"step": step, **progress}}
    if mark is not None:
        document["identity"] = mark
    (temporary / "progress.json").write_text(json.dumps(document))
    commit_directory(temporary, final)
    return final


def test_a_checkpoint_of_the_run_is_accepted_also_from_an_earlier_version(tmp_path: Path) -> None:
    assert RUN.check(checkpoint(tmp_path, 1, RUN.mark()), 1) == ""
    assert RUN.check(checkpoint(tmp_path, 2, {**RUN.mark(), "recipe": "old"}), 2) == ""


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"run_id": "another"}, ForeignCheckpointError),
        ({"recipe": "edited"}, RecipeChangedError),
        ({"data": {"wave": "other"}}, DataChangedError),
        ({"data": {}}, DataChangedError),
    ],
)
def test_what_differs_is_named(tmp_path: Path, change: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        RUN.check(checkpoint(tmp_path, 1, {**RUN.mark(), **change}), 1)


@pytest.mark.parametrize("mark", [None, "text", [], {}, {"run_id": None}])
def test_no_mark_is_accepted_only_in_a_run_that_is_older_than_marks(tmp_path: Path, mark: Any) -> None:
    path = checkpoint(tmp_path, 1, mark)
    with pytest.raises(ForeignCheckpointError):
        RUN.check(path, 1)
    if mark is None:
        assert "carries no identity" in replace(RUN, unmarked=True).check(path, 1)


def test_the_step_is_the_one_of_the_name(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5, RUN.mark())
    path.rename(RunDir(tmp_path).checkpoint(9))
    with pytest.raises(ForeignCheckpointError, match="named as step 9, but holds the state after 5"):
        RUN.check(RunDir(tmp_path).checkpoint(9), 9)


def test_a_checkpoint_that_was_replaced_after_its_commit_is_noticed(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 5, RUN.mark())
    from ups.record.manifest import read_manifest

    noted = RUN.with_commit(5, read_manifest(path).sha256)
    assert noted.check(path, 5) == ""
    checkpoint(tmp_path, 5, RUN.mark(), updates=1)
    with pytest.raises(ForeignCheckpointError, match="replaced afterwards"):
        noted.check(path, 5)
    assert noted.with_commit(5, "").check(path, 5) == ""


def test_notes_of_commits_cross_over_whole_lines_only(tmp_path: Path) -> None:
    assert read_commits(tmp_path, 0) == ([], {}, [], 0)
    note_commit(tmp_path, 4, "a")
    with (tmp_path / "commits.jsonl").open("a") as file:
        file.write('{"step": 8, "mani')
    commits, _, _, offset = read_commits(tmp_path, 0)
    assert commits == [(4, "a")]
    with (tmp_path / "commits.jsonl").open("a") as file:
        file.write('fest_sha256": "b"}\n')
    assert read_commits(tmp_path, offset)[0] == [(8, "b")]
    note_commit(tmp_path / "gone", 1, "never raises")
    note_damage(tmp_path, 8, "a byte differs")
    assert read_commits(tmp_path, offset)[:2] == ([(8, "b")], {8: "a byte differs"})


def test_an_identity_survives_json_and_stays_small() -> None:
    grown = RUN
    for step in range(3 * MAX_COMMITS):
        grown = grown.with_commit(step, f"hash {step}")
    assert len(grown.commits) == MAX_COMMITS
    assert RunIdentity.from_json(json.loads(json.dumps(grown.to_json()))) == grown


@pytest.mark.parametrize(
    "change", [{"run_id": ""}, {"recipes": "x"}, {"commits": {"-1": "a"}}, {"data": [1]}, {"config": 3}]
)
def test_a_malformed_identity_is_none(change: dict[str, Any]) -> None:
    assert RunIdentity.from_json({**RUN.to_json(), **change}) is None
    assert RunIdentity.from_json("text") is None


def test_a_progress_file_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, 1, RUN.mark())
    (path / "progress.json").write_text("[]")
    with pytest.raises(CheckpointError, match="cannot be read"):
        RUN.check(path, 1)
