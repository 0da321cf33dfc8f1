"""A run as a Slurm job: the script for `sbatch`, and handing it in.

One task for each host, which is a supervisor; it starts the ranks of its host. Slurm asks the script to end two
minutes before the time is up, the script asks the supervisors, all ranks save one step and leave with 143, and the job
is queued again: it continues from there. The same holds where Slurm takes the hosts away for a job that counts more.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ups.launch.job import check_word, hand_in, require_program, write_script
from ups.record.run_dir import RunDir

SCRIPT_NAME = "job.sh"
# So long before the end ranks are asked to save.
WARNING_SECONDS = 120
_TIME = re.compile(r"\d+(:\d\d(:\d\d)?)?|\d+-\d+(:\d\d(:\d\d)?)?")
_NAME = re.compile(r"[A-Za-z0-9._,@:=+/%\[\]][A-Za-z0-9._,@:=+/%\[\]-]*")
_OPTION = re.compile(r"--[A-Za-z0-9._,@:=+/%\[\]-]+")
# Without what sbatch reads in another way than it stands there (quotes, comments, %j), or what ends the line.
_PATH = re.compile(r"[^\s\"'\\#%\x00-\x1f\x7f-\x9f]+")
_DEADLINE_SECONDS = 60


@dataclass(frozen=True)
class SlurmJob:
    """What is asked of Slurm.

    command: `ups train RECIPE ...` without what depends on hosts. changes: for each job of an array, words that are put
    behind the command; one entry is a single job. options: further options of sbatch, such as --qos=long.
    """

    name: str
    run_dir: Path
    work_dir: Path
    command: Sequence[str]
    time: str
    nodes: int = 1
    ranks_per_node: int = 1
    gpus_per_node: int = 0
    cpus_per_node: int = 1
    partition: str = ""
    account: str = ""
    options: Sequence[str] = ()
    changes: Sequence[Sequence[str]] = ((),)

    def __post_init__(self) -> None:
        # A line break in a word would be a line of the script, which is run.
        check_word("--time", self.time, _TIME, "30, 24:00:00 or 2-00:00:00")
        for option, word in (("run.name", self.name), ("--partition", self.partition), ("--account", self.account)):
            check_word(option, word, _NAME, "small-1: letters, digits and .,-_=:, not - first")
        for word in self.options:
            check_word("--sbatch", word, _OPTION, "--qos=long, without spaces and quotes")
        check_word("run.dir", str(self.run_dir), _PATH, "runs/small, without spaces, quotes, backslashes, # and %")

    @property
    def is_array(self) -> bool:
        return len(self.changes) > 1

    @property
    def script_path(self) -> Path:
        return RunDir(self.run_dir).launch / SCRIPT_NAME


def script(job: SlurmJob) -> str:
    """The text for sbatch."""
    output = f"{RunDir(job.run_dir).launch}/slurm_{'%A_%a' if job.is_array else '%j'}.out"
    options = [
        f"--job-name={job.name}",
        f"--nodes={job.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={job.cpus_per_node}",
        *([f"--gpus-per-node={job.gpus_per_node}"] if job.gpus_per_node else []),
        f"--time={job.time}",
        f"--signal=B:TERM@{WARNING_SECONDS}",
        "--requeue",
        "--open-mode=append",
        f"--output={output}",
        *([f"--partition={job.partition}"] if job.partition else []),
        *([f"--account={job.account}"] if job.account else []),
        *([f"--array=0-{len(job.changes) - 1}"] if job.is_array else []),
        *job.options,
    ]
    lines = ["#!/usr/bin/env bash", *(f"#SBATCH {option}" for option in options)]
    words = shlex.join([*job.command, "--ranks", str(job.nodes * job.ranks_per_node)])
    lines += [
        "# Written by `ups launch slurm`, which writes it anew. `sbatch` on this file submits it again.",
        "set -u",
        f"cd {shlex.quote(str(job.work_dir))} || exit 5",
        *_own_changes(job),
        # An empty array is an unset one for the older of the shells that are about.
        f'command=({words} ${{changes[@]+"${{changes[@]}}"}})',
    ]
    if job.nodes > 1:
        lines += [_ADDRESS]
    return "\n".join([*lines, _BODY])


def submit(job: SlurmJob) -> str:
    """Write the script into the run directory and hand it in; returns the number of the job. Raises MachineError."""
    require_program("sbatch", "run this on a login host of the cluster")
    path = write_script(job.run_dir, SCRIPT_NAME, script(job))
    printed = hand_in(["sbatch", "--parsable", str(path)], "Slurm", path, "see `squeue --me`", _DEADLINE_SECONDS)
    return printed.partition(";")[0]


def _own_changes(job: SlurmJob) -> list[str]:
    if not job.is_array:
        return [f"changes=({shlex.join(job.changes[0])})"]
    cases = [f"  {number}) changes=({shlex.join(words)}) ;;" for number, words in enumerate(job.changes)]
    return ['case "$SLURM_ARRAY_TASK_ID" in', *cases, '  *) echo "this array has no such job" >&2; exit 2 ;;', "esac"]


# Several hosts meet at an address of the first: the one by which Slurm reaches it, since its name may mean another.
_ADDRESS = r"""head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$(scontrol -o show node "$head" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
command+=(--hosts "$SLURM_JOB_NUM_NODES" --address "${address:-$head}:$((20000 + SLURM_JOB_ID % 20000))")"""

_BODY = r"""
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_JOB_ID:-}" ]; then job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
echo "job $job, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST: $(date -Is)"

# Slurm tells this script alone that the time is up; the supervisors get to know it from here, save and leave. A signal
# to srun itself would kill them.
trap 'scancel --signal=TERM "$SLURM_JOB_ID.0"' TERM
# Since Slurm 22.05 srun does not inherit --cpus-per-task: without it all ranks of a host may get one core.
srun --kill-on-bad-exit=0 --cpus-per-task="$SLURM_CPUS_PER_TASK" "${command[@]}" &
steps=$!
# A signal interrupts `wait`, so it is called until srun is gone.
while :; do
  wait "$steps"
  code=$?
  kill -0 "$steps" 2>/dev/null || break
done

# A job that was canceled, or preempted and queued again by Slurm itself, is not running any more: leave it alone.
if [ "$code" -eq 143 ]; then
  state=$(scontrol -o show job "$job" | sed -n 's/.* JobState=\([A-Z_]*\).*/\1/p')
  if [ "$state" = RUNNING ]; then
    echo "asked to leave, and saved: queued again"
    scontrol requeue "$job"
  fi
fi
exit "$code"
"""
