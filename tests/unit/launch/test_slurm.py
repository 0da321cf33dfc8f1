"""Scripts for Slurm: what they ask for, that words survive the shell, and what is refused before it is submitted."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ups.config.sweep import axes_of, cells
from ups.errors import ConfigError, MachineError
from ups.launch.job import NAMES
from ups.launch.slurm import SlurmJob, script, submit


def job(tmp_path: Path, **changes: Any) -> SlurmJob:
    settings: dict[str, Any] = {
        "name": "waves",
        "run_dir": tmp_path / "runs" / "waves",
        "work_dir": tmp_path,
        "command": ["python", "-m", "ups", "train", "recipe.yaml"],
        "time": "24:00:00",
    }
    return SlurmJob(**(settings | changes))


def directives(text: str) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH ")]


def test_it_asks_for_what_was_said_and_for_a_warning_before_the_end(tmp_path: Path) -> None:
    text = script(job(tmp_path, nodes=2, ranks_per_node=8, gpus_per_node=8, cpus_per_node=40, partition="gpu"))
    lines = directives(text)
    for wanted in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--cpus-per-task=40",
        "--gpus-per-node=8",
        "--time=24:00:00",
        "--signal=B:TERM@120",
        "--requeue",
        "--open-mode=append",
        "--partition=gpu",
    ):
        assert wanted in lines
    assert "--ranks 16" in text
    assert "--hosts" in text
    assert not any(line.startswith("--array") for line in lines)
    assert "--hosts" not in script(job(tmp_path))


# What stands in for Slurm here: `srun` keeps its options, and prints the words that it gets, one in each line.
SRUN = """#!/usr/bin/env bash
printf '%s\\n' "$1" "$2" > "${BASH_SOURCE%/*}/options"
shift 2
printf '%s\\n' "$@"
exit "${SRUN_CODE:-0}"
"""
SCONTROL = """#!/usr/bin/env bash
case "$*" in
  "show hostnames"*) printf 'n1\\nn2\\n' ;;
  *"show node"*) echo "NodeName=n1 Arch=x86_64 NodeAddr=10.1.2.3 NodeHostName=n1 Version=22" ;;
  *"show job"*) echo "JobId=7 JobName=waves JobState=${JOB_STATE} Reason=None" ;;
  requeue*) echo "REQUEUED $2" ;;
esac
"""


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Run a script with programs in place of Slurm's; returns its exit code and lines."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)

    def run(text: str, **variables: str) -> tuple[int, list[str]]:
        environment = {
            "PATH": f"{programs}:{os.environ['PATH']}",
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_CPUS_PER_TASK": "40",
            "JOB_STATE": "RUNNING",
            **variables,
        }
        done = subprocess.run(["bash", "-c", text], env=environment, capture_output=True, text=True, timeout=60)
        assert not done.stderr, done.stderr
        return done.returncode, done.stdout.splitlines()

    return run


def test_words_arrive_as_they_were(tmp_path: Path, shell: Any) -> None:
    words = ["python", "-m", "ups", "train", "a recipe's $HOME.yaml", "--set", 'run.name="a b"']
    code, lines = shell(script(job(tmp_path, command=words, nodes=2)))
    assert code == 0
    assert lines[1:] == [*words, "--ranks", "2", "--hosts", "2", "--address", "10.1.2.3:20007"]


@pytest.mark.parametrize("array", [False, True])
def test_srun_is_told_how_many_processors_it_has(tmp_path: Path, shell: Any, array: bool) -> None:
    """As Slurm says that the job has them: `--sbatch=--cpus-per-task=64` counts more than our own number."""
    changes = [["--set", "run.seed=0"], ["--set", "run.seed=1"]] if array else [[]]
    text = script(job(tmp_path, cpus_per_node=8, options=["--cpus-per-task=64"], changes=changes))
    assert shell(text, SLURM_CPUS_PER_TASK="64", SLURM_ARRAY_TASK_ID="1")[0] == 0
    assert (tmp_path / "bin" / "options").read_text().split() == ["--kill-on-bad-exit=0", "--cpus-per-task=64"]


def test_a_job_of_an_array_has_its_own_values(tmp_path: Path, shell: Any) -> None:
    axes = axes_of(["run.seed=[0, 1]", "stages.0.optim.learning_rate=[1e-3, 2e-3]"])
    changes = [cell.words for cell in cells(axes, "waves", tmp_path / "runs" / "waves", None)]
    assert len(changes) == 4
    text = script(job(tmp_path, changes=changes))
    assert "--array=0-3" in directives(text)
    code, lines = shell(text, SLURM_ARRAY_JOB_ID="9", SLURM_ARRAY_TASK_ID="2")
    assert code == 0
    assert "job 9_2" in lines[0]
    assert "run.seed=1" in lines
    assert "stages.0.optim.learning_rate=0.001" in lines
    assert f"run.dir={tmp_path / 'runs' / 'waves-seed_1-learning_rate_0.001'}" in lines
    assert shell(text, SLURM_ARRAY_JOB_ID="9", SLURM_ARRAY_TASK_ID="1")[1] != lines


@pytest.mark.parametrize(
    ("code", "state", "array", "requeued"),
    [
        ("143", "RUNNING", False, "REQUEUED 7"),
        ("143", "RUNNING", True, "REQUEUED 9_3"),
        ("143", "CANCELLED", False, ""),
        ("143", "COMPLETING", False, ""),
        ("0", "RUNNING", False, ""),
        ("6", "RUNNING", False, ""),
    ],
)
def test_only_a_run_that_was_asked_to_leave_is_queued_again(
    tmp_path: Path, shell: Any, code: str, state: str, array: bool, requeued: str
) -> None:
    variables = {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "3"} if array else {}
    status, lines = shell(script(job(tmp_path)), SRUN_CODE=code, JOB_STATE=state, **variables)
    assert status == int(code)
    assert [line for line in lines if line.startswith("REQUEUED")] == ([requeued] if requeued else [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"time": "tomorrow"},
        {"time": "1:00\n#SBATCH --uid=0"},
        {"name": "a b"},
        {"partition": "gpu\n#SBATCH --exclusive"},
        {"options": ["qos=long"]},
        {"options": ["--comment=a b"]},
        {"name": "-n"},
        {"partition": "-n"},
        {"account": "--wrap"},
        *(
            {"run_dir": Path("/runs") / name}
            for name in ("x\ntouch pwned\n#", "a b", "a\tb", "a'b", 'a"b', "a\\b", "%j", "#")
        ),
    ],
)
def test_what_slurm_or_the_shell_would_misread_is_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        job(tmp_path, **wrong)


def test_what_sbatch_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MachineError, match="there is no `sbatch` here"):
        submit(job(tmp_path))
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpu' >&2; exit 1\n")
    program.chmod(0o755)
    with pytest.raises(MachineError, match="invalid partition specified: gpu"):
        submit(job(tmp_path))
    program.write_text('#!/bin/sh\necho "4711;cluster"\n')
    assert submit(job(tmp_path)) == "4711"
    written = list((tmp_path / "runs" / "waves" / "launch").iterdir())
    assert [path.name for path in written] == ["job.sh"]
    assert NAMES.fullmatch("slurm_12_3.out")
    assert not NAMES.fullmatch("notes.txt")


def test_a_script_is_not_written_through_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\necho 4711\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    mine = tmp_path / "mine" / "job.sh"
    mine.parent.mkdir()
    mine.write_text("precious")
    folder = job(tmp_path).script_path.parent
    folder.mkdir(parents=True)
    (folder / "job.sh").symlink_to(mine)
    assert submit(job(tmp_path)) == "4711"
    assert mine.read_text() == "precious"
