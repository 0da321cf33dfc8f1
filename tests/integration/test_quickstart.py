"""The first ten minutes: the page, the script and the README say the same, and what they say works.

The script runs here with little data, little time and the environment of the tests: see the settings at its top.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.environments import ROOT
from ups import load_recipe

SCRIPT = ROOT / "examples" / "quickstart.sh"
PAGE = ROOT / "docs" / "quickstart.md"
# 150 steps on 64 trajectories reach 10.
BAR = 5

# Stands for python3, pip and ups: writes down how it was called, and makes an environment that does the same.
RECORDER = """#!/usr/bin/env bash
printf '%q ' "${0##*/}" "$@" >>"$CALLS"
echo >>"$CALLS"
if [[ "$*" == "-m venv "* ]]; then mkdir -p "$3/bin"; echo 'echo activate >>"$CALLS"' >"$3/bin/activate"; fi
"""


def bash_blocks(path: Path) -> str:
    return "\n".join(re.findall(r"^```bash\n(.*?)^```$", path.read_text(), flags=re.MULTILINE | re.DOTALL))


def calls_of(commands: list[str], folder: Path) -> list[str]:
    """What a bash program would call, in order."""
    tools, desk = folder / "bin", folder / "desk"
    tools.mkdir(parents=True)
    desk.mkdir()
    for name in ("python3", "pip", "ups"):
        (tools / name).write_text(RECORDER)
        (tools / name).chmod(0o755)
    (tools / "python").symlink_to("/bin/true")
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "CALLS": str(folder / "calls"), "CHECKOUT": str(ROOT)}
    subprocess.run(["bash", *commands], cwd=desk, env=environment, check=True, capture_output=True, timeout=30)
    return (folder / "calls").read_text().splitlines()


def test_the_script_runs_what_the_page_shows(tmp_path: Path) -> None:
    shown = calls_of(["-euo", "pipefail", "-c", bash_blocks(PAGE)], tmp_path / "page")
    run = calls_of([str(SCRIPT)], tmp_path / "script")
    assert run == shown
    assert len(run) == 10, run


def test_a_relative_checkout_is_never_taken_for_a_package_of_an_index(tmp_path: Path) -> None:
    (line,) = re.findall(r"^pip install .*CHECKOUT.*\[.*$", bash_blocks(PAGE), flags=re.MULTILINE)
    (tmp_path / "universal-simulator").mkdir()
    program = f'pip() {{ printf "%s\\n" "${{@: -1}}"; }}; CHECKOUT=universal-simulator; {line}'
    shown = subprocess.run(["bash", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert shown.strip() == f"{tmp_path / 'universal-simulator'}[generate,report]"


def test_the_readme_goes_the_same_way() -> None:
    def names(text: str) -> list[str]:
        return re.findall(r"^ups (data \w+|\w+)", text, flags=re.MULTILINE)

    section = (ROOT / "README.md").read_text().partition("## A film in half a minute")[2].partition("\n## Your own")[0]
    shown = [name for name in names(section) if name != "models"]
    assert shown == [name for name in names(bash_blocks(PAGE)) if name != "data inspect"]
    assert "(docs/quickstart.md)" in section


def test_the_first_recipe_counts_steps_as_the_page_says() -> None:
    """By wall time a busy machine would do a fraction of them, and deliver a bad model."""
    stages = load_recipe(ROOT / "recipes" / "burgers1d.yaml").stages
    assert [stage.budget_seconds for stage in stages] == [None, None]
    total = sum(stage.steps or 0 for stage in stages)
    assert f"VERDICT state=completed exit=0 attempts=1 faults=0 step={total} ckpt={total} verified" in PAGE.read_text()


def test_every_file_that_the_page_shows_is_there() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        if not target.startswith("http"):
            assert (PAGE.parent / target).exists(), target


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.timeout(400)
def test_the_script_goes_from_an_empty_directory_to_a_film(tmp_path: Path) -> None:
    imageio = pytest.importorskip("imageio.v3")
    pytest.importorskip("exponax")
    environment = os.environ | {
        "QUICKSTART_VENV": sys.prefix,
        "QUICKSTART_DATA": "--trajectories 64,8,8",
        # So little training has its own bar; that of 60 is for the script with its own settings.
        "QUICKSTART_TRAIN": "--set stages.1.steps=150",
        "QUICKSTART_RATIO": str(BAR),
        "HOME": str(tmp_path),
        "NO_COLOR": "1",
    }
    desk = tmp_path / "empty"
    desk.mkdir()
    done = subprocess.run(
        ["bash", SCRIPT], cwd=desk, env=environment, capture_output=True, text=True, timeout=360, check=False
    )
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    match = re.search(r"^one-step error (\S+), persistence (\S+): (\S+) times below", done.stdout, flags=re.MULTILINE)
    assert match is not None, done.stdout[-2000:]
    error, persistence, ratio = (float(number) for number in match.groups())
    assert ratio >= BAR
    assert ratio == pytest.approx(persistence / error, rel=0.01)

    film = imageio.imread(desk / "rollout.mp4")
    assert film.shape[0] == 40, "a frame for each step of a trajectory of 41 frames"
    assert film.shape[3] == 3
    assert min(film.shape[1:3]) > 300
    assert film[0].std() > 10, "an empty picture"
    assert (film[0].astype(int) - film[-1]).any(), "a film that does not move"
    for picture in ("rollout.png", "burgers1d.png"):
        assert (desk / picture).read_bytes().startswith(b"\x89PNG\r\n")
        assert min(imageio.imread(desk / picture).shape[:2]) > 200
    assert (desk / "runs" / "burgers1d" / "report" / "index.html").is_file()


def test_the_script_refuses_a_model_that_is_hardly_better_than_nothing(tmp_path: Path) -> None:
    """The bar is checked by the script itself: here on scores that are only 5 times better than persistence."""
    report = tmp_path / "runs" / "burgers1d" / "report"
    report.mkdir(parents=True)
    scores = {name: {"summary": {"one_step_trmse": error}} for name, error in (("model", 0.02), ("persistence", 0.1))}
    (report / "scores.json").write_text(json.dumps({"results": [{"predictors": scores}]}))
    (program,) = re.findall(r"<<'PYTHON'\n(.*?)^PYTHON$", SCRIPT.read_text(), flags=re.MULTILINE | re.DOTALL)
    outcomes = {}
    for bar in ("10", "4"):
        done = subprocess.run(
            [sys.executable, "-", bar], input=program, cwd=tmp_path, capture_output=True, text=True, timeout=30
        )
        assert "one-step error 0.02, persistence 0.1: 5.0 times below" in done.stdout
        outcomes[bar] = done.returncode
    assert outcomes == {"10": 1, "4": 0}
