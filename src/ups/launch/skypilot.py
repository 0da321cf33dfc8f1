"""A run through SkyPilot: the task for `sky jobs launch`, and handing it in.

SkyPilot finds the machines, makes them, makes them anew when a spot machine is taken away, and removes them. It runs in
an environment of its own and is never imported. The task holds names of secrets; `sky` reads their values itself.
"""

from __future__ import annotations

import math
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ups.errors import ConfigError
from ups.launch import job as common
from ups.record.processes import module_command

TASK_NAME = "skypilot.yaml"
PORT = 29500
# Where the volume is mounted that all hosts write.
VOLUME = "/ups-volume"
IDLE_MINUTES = 10
# Handing in a job may first make the controller of SkyPilot, which is a machine as well.
_DEADLINE_SECONDS = 1800
_INFRA = re.compile(r"[A-Za-z0-9*][A-Za-z0-9*._/@:-]*")
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")


@dataclass(frozen=True)
class SkyPilotJob:
    """What is asked of SkyPilot.

    gpus: of one host, KIND:COUNT; empty for none. spot: machines that may be taken away, which cost less. infra: where,
    such as aws/us-east-1; anywhere if it is empty. volume: of SkyPilot, which all hosts write; several hosts need one.
    """

    machine: common.RentedJob
    run_dir: Path
    nodes: int = 1
    cpus: int = 1
    gpus: str = ""
    spot: bool = False
    infra: str = ""
    volume: str = ""
    disk: int = 100

    def __post_init__(self) -> None:
        common.check_word("run.name", self.name, _NAME, "small-1, up to 52 characters")
        common.num_gpus(self.gpus)
        common.check_word("--infra", self.infra, _INFRA, "aws/us-east-1")
        common.check_word("--volume", self.volume, _NAME, "shared-1: lower case letters, digits and -")
        if self.spot and not self.machine.mirror:
            raise ConfigError(
                "a spot machine disappears with its checkpoints", hint="--mirror s3://bucket/prefix keeps them"
            )
        if self.nodes > 1 and not self.volume:
            raise ConfigError(
                "several hosts need a run directory that all of them see",
                hint="--volume NAME, a volume of SkyPilot (`sky volumes apply`) with the data in it",
            )
        if self.volume and self.machine.data:
            raise ConfigError("--data is for a machine of its own; with --volume the data lies in the volume")

    @property
    def name(self) -> str:
        return self.machine.name.lower().replace("_", "-").replace(".", "-")


def task(job: SkyPilotJob) -> dict[str, Any]:
    """The task as data."""
    machine = job.machine
    # SkyPilot's limit is for one host; rounded down, so that all of them together stay below the price.
    cost = math.floor(machine.max_price / job.nodes * 10_000) / 10_000
    resources: dict[str, Any] = {
        **({"infra": job.infra} if job.infra else {}),
        **({"accelerators": job.gpus} if job.gpus else {}),
        "cpus": f"{job.cpus}+",
        "disk_size": job.disk,
        "use_spot": job.spot,
        "max_hourly_cost": cost,
        # A run that failed by itself would fail again: only what was taken away is made anew.
        "job_recovery": {"max_restarts_on_errors": 0},
        "autostop": {"idle_minutes": IDLE_MINUTES, "down": True},
    }
    variables = common.plain_variables(machine.variables)
    return {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": resources,
        **({"envs": variables} if variables else {}),
        **({"secrets": dict.fromkeys(machine.secrets)} if machine.secrets else {}),
        **({"volumes": {VOLUME: job.volume}} if job.volume else {}),
        "setup": "\n".join(common.setup(machine)) + "\n",
        "run": "\n".join(_run(job)) + "\n",
    }


def text(job: SkyPilotJob) -> str:
    """The task as a file."""
    head = (
        "# Written by `ups launch skypilot`, which writes it anew; its hours count from then.\n"
        f"# {shlex.join(command('sky', job, Path(TASK_NAME)))}\n"
    )
    return head + yaml.dump(task(job), Dumper=_Blocks, sort_keys=False, width=10**6)


def command(program: str, job: SkyPilotJob, path: Path) -> list[str]:
    """What hands it in. A secret is a name here: sky reads the value from its own environment."""
    names = [word for name in job.machine.secrets for word in ("--secret", name)]
    return [program, "jobs", "launch", "--yes", "--detach-run", *names, str(path)]


def submit(job: SkyPilotJob, program: str) -> str:
    """Write the task into the run directory and hand it in; returns what SkyPilot said last. Raises MachineError."""
    common.require_program(program, "install SkyPilot in an environment of its own, and name it: --sky PATH")
    path = common.write_script(job.run_dir, TASK_NAME, text(job))
    hint = f"see `{program} jobs queue`; `{program} jobs cancel --name {job.name}` ends it"
    return common.hand_in(command(program, job, path), "SkyPilot", path, hint, _DEADLINE_SECONDS).rpartition("\n")[2]


def _run(job: SkyPilotJob) -> list[str]:
    """Lines of bash. A machine that begins empty makes its data first: `ups run`."""
    machine, several = job.machine, job.nodes > 1
    program = shlex.join(module_command("ups", "train" if several else "run", python="python3"))
    rest = shlex.join(["--ranks", str(machine.ranks), *common.changes(machine)])
    words, results = f'{program} "$HOME/{common.PLACE}/{common.RECIPE_NAME}" {rest}', common.leave_results(machine)
    beginning = [f"mkdir -p {VOLUME} && cd {VOLUME} || exit 5"] if job.volume else []
    if several:
        beginning.append('head=$(printf "%s\\n" "$SKYPILOT_NODE_IPS" | head -n 1)')
        words += f' --hosts {job.nodes} --host "$SKYPILOT_NODE_RANK" --address "$head:{PORT}"'
        # One of them is enough: they see the same directory.
        results = ['if [ "$SKYPILOT_NODE_RANK" -eq 0 ]; then', *(f"  {line}" for line in results), "fi"]
    return [
        "set -u",
        *common.enter(machine),
        *beginning,
        *common.fetch(machine),
        *common.run(machine, words),
        *results,
        'exit "$code"',
    ]


class _Blocks(yaml.SafeDumper):
    """Scripts as readable blocks."""


_Blocks.add_representer(
    str, lambda to, value: to.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)
)
