"""A tag stands for the bundle of one completed run, and protects it."""

from pathlib import Path

import pytest

from tests.unit.run.made_runs import made_run
from ups.cli.main import run
from ups.errors import ConfigError, IntegrityError
from ups.run.many_runs import promote, read_tags, remove_run, tags_of, take_away


def test_a_tag_moves_from_one_run_to_another(tmp_path: Path) -> None:
    first, second = (made_run(tmp_path, name, bundle=True) for name in ("a", "b"))
    made = promote(str(first), "best")
    assert (made["before"], made["bundle_sha256"]) == ("", read_tags(tmp_path)["best"]["bundle_sha256"])
    assert promote(str(first), "best")["before"] == ""
    assert promote(str(second), "best")["before"] == "a"
    assert (tags_of(first), tags_of(second)) == ([], ["best"])


@pytest.mark.parametrize("state", ["failed", "gate_failed", "died", "stopped", "preempted", "running"])
def test_only_a_completed_run_is_promoted(tmp_path: Path, state: str) -> None:
    with pytest.raises(ConfigError, match=state):
        promote(str(made_run(tmp_path, "a", state, "gate", bundle=True)), "best")
    assert read_tags(tmp_path) == {}


def test_a_bundle_that_is_missing_or_damaged_is_not_promoted(tmp_path: Path) -> None:
    path = made_run(tmp_path, "a")
    with pytest.raises(IntegrityError):
        promote(str(path), "best")
    whole = made_run(tmp_path, "b", bundle=True)
    (whole / "bundle/bundle.json").write_text("{}")
    with pytest.raises(IntegrityError) as caught:
        promote(str(whole), "best")
    assert caught.value.hint == f"make it again with: ups run {whole}"


@pytest.mark.parametrize("tag", ["", "../best", "a b", "<b>", "x" * 65, "-a", "é"])
def test_a_tag_is_a_plain_name(tmp_path: Path, tag: str) -> None:
    with pytest.raises(ConfigError, match="no name for a tag"):
        promote(str(made_run(tmp_path, "a", bundle=True)), tag)


def test_a_promoted_run_is_not_removed_before_its_tag_is_taken_away(tmp_path: Path) -> None:
    path = made_run(tmp_path, "a", bundle=True)
    promote(str(path), "best")
    with pytest.raises(ConfigError, match="promoted: best"):
        remove_run(str(path))
    assert path.exists()
    take_away(str(path), "best")
    with pytest.raises(ConfigError, match="does not have the tag"):
        take_away(str(path), "best")
    remove_run(str(path))
    assert not path.exists()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 1, "tags": {"best": {"run": 3}}}', '{"format": 1, "tags": 1}']
)
def test_a_spoiled_file_of_tags_says_nothing(tmp_path: Path, content: str) -> None:
    (tmp_path / "tags.json").write_text(content)
    assert read_tags(tmp_path) == {}


def test_the_command_says_whose_tag_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = (made_run(tmp_path, name, bundle=True) for name in ("a", "b"))
    assert run(["runs", "promote", str(first), "best"]) == 0
    assert run(["runs", "promote", str(second), "best"]) == 0
    assert "is 'best', which a had before" in capsys.readouterr().out
    assert run(["runs", "list", str(tmp_path)]) == 0
    assert "promoted: best" in capsys.readouterr().out
    assert run(["runs", "promote", str(second), "best", "--take-away"]) == 0
