"""A real Slurm of two nodes on this machine's loopback, for tests: munged, slurmctld, two slurmd, all our own.

Nodes n1 and n2 have one address, 127.0.0.1, and their names are known inside the cluster only (a mount namespace with
its own /etc/hosts). Partition `low` is the default and gives way to `high`: TERM, some seconds, back into the queue.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue", "scancel", "unshare")
_START_SECONDS = 60
_FIRST_PORT = 26817

_CONFIG = """ClusterName=loopback
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock,cred_expire=20
CryptoType=crypto/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
SlurmctldPort={port}
SlurmdPort={node_port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool_%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd_%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd_%n.log
SlurmdTimeout=20
KillWait=20
ProctrackType=proctrack/pgid
{binding}
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
JobRequeue=1
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=5,bf_interval=5
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptMode=REQUEUE
PreemptType=preempt/partition_prio
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs={cores} State=UNKNOWN
PartitionName=low Nodes=n[1-2] Default=YES MaxTime=60 State=UP PriorityTier=1 OverSubscribe=NO GraceTime=30
PartitionName=high Nodes=n[1-2] MaxTime=60 State=UP PriorityTier=10 OverSubscribe=NO
"""

# Without the parameter Slurm 22.05 binds only steps that have as many tasks as cores.
_BINDING = {False: "TaskPlugin=task/none", True: "TaskPlugin=task/affinity\nTaskPluginParam=cores"}


def why_no_slurm() -> str:
    """Why a cluster cannot be made here, '' if it can."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"not installed (Debian: slurm-wlm, munge): {', '.join(missing)}" if missing else ""


@dataclass
class Cluster:
    """A running cluster; `environment` is what its commands need."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def call(self, *words: str) -> str:
        """Output of a command of Slurm."""
        done = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(words)}: {done.stderr}")
        return done.stdout.strip()

    def state(self, job: str) -> str:
        """RUNNING, PENDING, COMPLETED, CANCELLED, ...; '' for a job that is forgotten."""
        with contextlib.suppress(RuntimeError):
            for word in self.call("scontrol", "-o", "show", "job", job).split():
                if word.startswith("JobState="):
                    return word.partition("=")[2]
        return ""

    def wait_for(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                shown = "\n".join(self.call(*words) for words in (("squeue", "-a"), ("sinfo", "-lN")))
                raise TimeoutError(f"{what}: not within {seconds:.0f} s\n{shown}")
            time.sleep(0.5)

    def kill_daemon(self, node: str) -> None:
        """As when a host loses its power, but for what runs on it."""
        os.kill(int((self.folder / f"slurmd_{node}.pid").read_text()), signal.SIGKILL)

    def start_daemon(self, node: str) -> None:
        inside = str(int((self.folder / "slurmctld.pid").read_text()))
        words = ["nsenter", "-t", inside, "-m", "slurmd", "-N", node, "-f", str(self.folder / "slurm.conf"), "-b"]
        subprocess.run(words, env=self.environment, check=True, timeout=60)


@contextlib.contextmanager
def slurm_cluster(folder: Path, binds: bool = False) -> Iterator[Cluster]:
    """A cluster whose daemons are gone at the end. folder: short, since sockets lie in it. binds: tasks to cores."""
    cluster = Cluster(folder)
    for name in ("state", "spool_n1", "spool_n2"):
        (folder / name).mkdir(parents=True)
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    folder.chmod(0o755)
    (folder / "hosts").write_text(f"127.0.0.1 localhost {os.uname().nodename} n1 n2\n")
    ports = {"port": _FIRST_PORT, "node_port": _FIRST_PORT + 1, "first": _FIRST_PORT + 2, "last": _FIRST_PORT + 3}
    config = folder / "slurm.conf"
    config.write_text(_CONFIG.format(folder=folder, cores=os.cpu_count(), binding=_BINDING[binds], **ports))
    try:
        names = {"key-file": "key", "socket": "sock", "pid-file": "pid", "seed-file": "seed", "log-file": "log"}
        options = [f"--{option}={folder}/munge.{suffix}" for option, suffix in names.items()]
        subprocess.run(["munged", "--force", *options], check=True, timeout=60)
        daemons = f"slurmctld -f {config} && sleep 1 && slurmd -N n1 -f {config} -b && slurmd -N n2 -f {config} -b"
        own_names = f"mount --make-rprivate / && mount --bind {folder}/hosts /etc/hosts"
        subprocess.run(
            ["unshare", "-m", "bash", "-c", f"{own_names} && {daemons}"],
            env=cluster.environment,
            check=True,
            timeout=60,
        )
        idle = ("sinfo", "-h", "-p", "low", "-t", "idle", "-o", "%D")
        cluster.wait_for(lambda: cluster.call(*idle) == "2", _START_SECONDS, "two idle nodes")
        yield cluster
    finally:
        with contextlib.suppress(RuntimeError, OSError):
            cluster.call("scancel", "--user=root")
            cluster.wait_for(lambda: not cluster.call("squeue", "-h"), 60, "an empty queue")
        for path in folder.glob("*.pid"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(path.read_text()), signal.SIGTERM)
        time.sleep(2)
