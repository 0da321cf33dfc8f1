"""Commands that are started in a directory of unknown origin: its files are data, and none of them is run."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

STORED = Path(__file__).parent / "runs"
# What Python itself has loaded before it looks at any path.
_BEFORE = {"sys", "builtins", "ups"}

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """Data, a stored run, and a file for every module that could be imported: each would leave its name in `ran`."""
    desk = tmp_path / "desk"
    shutil.copytree(STORED / "data", desk / "data")
    shutil.copytree(STORED / "v1", desk / "v1")
    waves = np.sin(np.linspace(0, 2 * np.pi, 32, endpoint=False) + np.linspace(0, 1, 11)[:, None])
    fields = np.random.default_rng(0).uniform(1, 2, (24, 1, 1)) * waves
    with h5py.File(desk / "waves.h5", "w") as file:
        file["u"], file["x"], file["t"] = fields, np.arange(32) / 32, np.linspace(0, 1, 11)
    names = {*sys.stdlib_module_names, *importlib.metadata.packages_distributions(), "sitecustomize", "usercustomize"}
    for name in names - _BEFORE:
        if name.isidentifier():
            note = f"open({str(tmp_path / 'ran')!r}, 'a').write({name + chr(10)!r})\nraise SystemExit(66)\n"
            (desk / f"{name}.py").write_text(note)
    return desk


def ups(desk: Path, *arguments: str, program: tuple[str, ...] = (), code: int = 0) -> str:
    command = program or (str(Path(sys.executable).with_name("ups")),)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "HOME": str(desk.parent)}
    done = subprocess.run([*command, *arguments], cwd=desk, env=environment, capture_output=True, text=True)
    ran = desk.parent / "ran"
    assert not ran.exists(), (arguments, set(ran.read_text().split()))
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def _changes(run_dir: str) -> list[str]:
    return ["--set", f"run.dir={run_dir}", "--set", "stages.0.steps=2"]


_COMMANDS = (
    ("init", "own", "--data", "waves.h5"),
    ("train", "v1/config.yaml", "--ranks", "2", *_changes("runs/short")),
    ("rollout", "runs/short", "data/wave1d.zarr", "-o", "result.zarr"),
)
_MORE_COMMANDS = (
    ("data", "inspect", "data/wave1d.zarr"),
    ("data", "validate", "data/wave1d.zarr"),
    ("plan", "v1/config.yaml"),
    ("train", "v1/config.yaml", *_changes("runs/short")),
    ("status", "runs/short"),
    ("eval", "runs/short"),
)


@pytest.mark.parametrize("commands", [_COMMANDS, pytest.param(_MORE_COMMANDS, marks=pytest.mark.long)])
def test_no_command_imports_from_the_current_directory(desk: Path, commands: tuple[tuple[str, ...], ...]) -> None:
    (desk / "matplotlibrc").write_text("text.usetex: True\nbackend: module://json\n")  # LaTeX would be run
    ups(desk, "data", "inspect", "waves.h5", code=4)  # which is of no known layout
    for command in commands:
        ups(desk, *command)


@pytest.mark.long
def test_the_checks_of_a_machine_do_not_import_from_the_current_directory(desk: Path) -> None:
    ups(desk, "doctor", "v1/config.yaml", "--ranks", "1", "--json")


@pytest.mark.long
def test_solvers_and_readers_in_processes_do_not_import_from_the_current_directory(desk: Path) -> None:
    options = ("--trajectories", "4,2,2", "--resolution", "16", "--processes", "2", "--out", "made")
    ups(desk, "data", "generate", "darcy2d", *options)
    ups(desk, "train", "v1/config.yaml", *_changes("runs/workers"), "--set", "data.loader.workers=2")


@pytest.mark.long
def test_a_program_that_trains_does_not_import_from_the_current_directory(desk: Path) -> None:
    program = desk.parent / "program.py"  # its own directory is on its path, as always
    program.write_text(
        "import ups\n"
        "ups.generate_data('darcy2d', 'made', trajectories=(4, 2, 2), resolution=16, processes=2)\n"
        "ups.train(ups.load_recipe('v1/config.yaml', run__dir='runs/api', stages__0__steps=2))\n"
    )
    ups(desk, program=(sys.executable, str(program)))


def test_python_dash_m_ups_drops_the_current_directory(desk: Path) -> None:
    # What Python imports on its way to our first line is out of reach: a file that shadows the standard library runs.
    for name in sys.stdlib_module_names:
        (desk / f"{name}.py").unlink(missing_ok=True)
    ups(desk, "data", "inspect", "waves.h5", program=(sys.executable, "-m", "ups"), code=4)


def test_a_run_does_not_start_git(desk: Path) -> None:
    """A repository names programs for git to run: for its monitor, for filters, as hooks and as a pager."""
    for path in desk.glob("*.py"):
        path.unlink()
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (desk / ".gitattributes").write_text("* filter=evil diff=evil\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *words], cwd=desk, check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], cwd=desk, check=True, capture_output=True, text=True)
    evil = f"echo git >> {desk.parent / 'ran'}; cat"
    with (desk / ".git" / "config").open("a") as file:
        file.write(f'[core]\n\tfsmonitor = "{evil}"\n\tpager = "{evil}"\n')
        file.write(f'[filter "evil"]\n\tclean = "{evil}"\n\tsmudge = "{evil}"\n[diff "evil"]\n\ttextconv = "{evil}"\n')
    (desk / "v1" / "config.yaml").touch()
    # The client of Weights & Biases would send the key to the server that this file names.
    (desk / "wandb").mkdir()
    (desk / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\nmode = disabled\n")
    trackers = "tracking.trackers=[{type: wandb, mode: offline}, {type: tensorboard}]"
    ups(desk, "train", "v1/config.yaml", *_changes("runs/short"), "--set", trackers)
    log = desk / "runs" / "short" / "tracking" / "wandb.log"
    assert not log.exists() or "Loading settings from" not in log.read_text()
    assert commit.stdout.strip() in (desk / "runs" / "short" / "env.json").read_text()
