"""`include:` of a file that is no recipe: nothing that stands in it reaches an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from ups.config.recipe import RecipeError, resolve
from ups.errors import ConfigError

CANARY = "canary-7f3a9c51d2"
CREDENTIALS = [
    f"aws_secret_access_key: {CANARY}\n",
    f"{CANARY}: x\n",
    f"github.com:\n  oauth_token: {CANARY}\n",
    f"run:\n  {CANARY}: 1\n",
    f"run: {CANARY}\n",
    f"run:\n  seed: {CANARY}\n",
    f"run:\n  seed: '{CANARY}'\n  name: [{CANARY}]\n",
    f"model:\n  type: {CANARY}\n",
    f"data:\n  tasks: {CANARY}\n",
    f"data:\n  tasks:\n    - {CANARY}\n",
    f"stages:\n  - {CANARY}: 1\n",
    f"key: *{CANARY}\n",
    f"key: &{CANARY} x\n",
    f"key: !{CANARY} x\n",
    f"key: !<{CANARY}> x\n",
    f"%TAG !{CANARY}! tag:a\n---\nkey: x\n",
    f"{CANARY}: 1\n{CANARY}: 2\n",
    f"machine host login user password {CANARY}\n",
    f"[default]\naws_secret_access_key = {CANARY}\n",
    f"'{CANARY}\n",
    f"{CANARY}:\n\t- x\n",
    f"a: {CANARY}: b\n",
    f"? [{CANARY}]\n: x\n",
    f"{{{CANARY}: [\n",
    f'"\\q{CANARY}": x\n',
    f"{CANARY}\n---\n{CANARY}\n",
]
NUMBERS = ["key: 0071234567\n", "key: 71234567e99999\n", "key: 71234567\n", "run: 71234567\n", "71234567: x\n"]


def reported(folder: Path) -> str:
    (folder / "r.yaml").write_text("include: secrets.yaml\nengine: {threads: 2}\n")
    with pytest.raises(ConfigError) as caught:
        resolve(folder / "r.yaml")
    others = caught.value.others if isinstance(caught.value, RecipeError) else ()
    return "\n".join([caught.value.one_line(), *others])


@pytest.mark.parametrize("text", CREDENTIALS)
def test_no_word_of_an_included_file_is_in_the_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "secrets.yaml").write_text(text)
    lines = reported(tmp_path)
    assert CANARY not in lines
    assert "secrets.yaml" in lines


@pytest.mark.parametrize("text", NUMBERS)
def test_no_number_of_an_included_file_is_in_the_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "secrets.yaml").write_text(text)
    assert "71234567" not in reported(tmp_path)


@pytest.mark.parametrize("name", ["credentials", ".netrc", "id_rsa", "config.json", "a.yaml.txt", "x.yaml/../key"])
def test_only_recipe_files_are_included(tmp_path: Path, name: str) -> None:
    (tmp_path / "x.yaml").mkdir()
    path = tmp_path / name
    path.write_text(f"key: {CANARY}\n")
    (tmp_path / "r.yaml").write_text(f"include: {name}\n")
    with pytest.raises(ConfigError, match=r"only files that end in \.yaml or \.yml") as caught:
        resolve(tmp_path / "r.yaml")
    assert CANARY not in caught.value.one_line()


def test_a_slip_in_an_included_recipe_is_still_explained(tmp_path: Path) -> None:
    (tmp_path / "secrets.yaml").write_text("engine:\n  precison: float32\nmodel:\n  width: 1\n")
    lines = reported(tmp_path)
    assert "engine.precison: no such field in engine -> did you mean 'precision'?" in lines
    assert "model.width = 1: expected at least 8" in lines
