"""How many files a newcomer reads from `ups train` to the step, counted on the call stacks of a real run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

import ups
from tests.support.checkout import ROOT
from tests.support.mixture import mixture_recipe, write_mixture
from ups.cli.main import run
from ups.record.run_dir import RunDir

SOURCE = Path(ups.__file__).parent
MOST_FILES = 9
# A rank that stops at its first step and prints its call stack.
RANK = """
import json, runpy, sys, traceback
from ups.training.engine import Engine

def first_step(self, batches, number):
    print(json.dumps([frame.filename for frame in traceback.extract_stack()[:-1]]), flush=True)
    raise SystemExit(0)

Engine._accumulate = first_step
module, *arguments = sys.argv[1:]
sys.argv = [module, *arguments]
runpy.run_module(module, run_name="__main__", alter_sys=True)
"""


class StartedError(BaseException):
    """Leaves the supervisor at the moment in which it starts a rank."""


def own_files(names: list[str]) -> list[str]:
    """The files of the package among those of a call stack, each once, in the order of the calls."""
    paths = [Path(name).resolve() for name in names if name.endswith(".py")]
    return list(dict.fromkeys(str(p.relative_to(SOURCE)) for p in paths if p.is_relative_to(SOURCE)))


def file_of(module: str) -> str:
    return str(Path(*module.split(".")[1:]).with_suffix(".py"))


@pytest.mark.processes
def test_few_files_lie_between_the_command_and_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = write_mixture(tmp_path)
    engine = {"device": "cpu", "strategy": "single", "threads": 1}
    plain = mixture_recipe(tmp_path, tasks, stages=[{"type": "operator", "steps": 2}], engine=engine)
    plain["run"] |= {"dir": str(tmp_path / "run")}
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(plain))

    calls: list[tuple[list[str], list[str]]] = []
    real = subprocess.Popen

    def popen(command: list[str], *arguments: object, **options: object) -> object:
        if "ups.record.rank_wrapper" not in command:
            return real(command, *arguments, **options)  # type: ignore[call-overload]
        calls.append((command, [frame.filename for frame in traceback.extract_stack()]))
        raise StartedError

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(StartedError):
        run(["train", str(recipe)])
    monkeypatch.undo()

    command, stack = calls[0]
    wrapper, rank = [word for word in command if word.startswith("ups.")]
    words = [sys.executable, "-c", RANK, rank, command[-1]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    assert RunDir(Path(command[-1])).config.is_file()
    path = [*own_files(stack), file_of(wrapper), file_of(rank), *own_files(json.loads(done.stdout.splitlines()[-1]))]
    files = list(dict.fromkeys(path))
    assert files[0] == "cli/main.py"
    assert files[-1] == "training/engine.py"
    assert len(files) <= MOST_FILES, files
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.split("## From `ups train` to the loss\n")[1].split("\n## ")[0]
    assert re.findall(r"^\d\. `src/ups/([\w/]+\.py)`", section, re.MULTILINE) == files
