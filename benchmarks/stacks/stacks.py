"""The stacks: packages of their environments, the command of a run, and how each stack says who failed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.stacks.cell import SCRIPTS

COMMON = ("torch==2.13.0", "numpy==2.4.6", "h5py")


@dataclass(frozen=True)
class Stack:
    """`accuses` finds a rank in a line that blames one; `last_words` are lines that state a failure of the whole run.

    `own_line` tells which lines of the output a rank itself wrote; it has the rank's number in place of RANK.
    """

    title: str
    packages: tuple[str, ...]
    settings: str
    command: str
    accuses: str
    own_line: str
    checkpoints: str
    report: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    private: tuple[str, ...] = ()  # directories that a cell sees empty, because their path must be short
    lists_ranks: bool = False  # one error may blame several ranks

    def request(self, folder: Path, data: Path, environment: Path, fault: str, timeout: float) -> dict[str, Any]:
        """What `cell.py` needs to run a cell of this stack."""
        names = {
            "DATA": str(folder / "data.h5"),
            "OUT": str(folder / "out"),
            "TIMEOUT": str(timeout),
            "LOGS": str(folder / "logs"),
            "SCRIPTS": str(SCRIPTS),
            "CELL": str(folder),
        }

        def filled(command: str) -> list[str]:
            return [re.sub("|".join(names), lambda found: names[found[0]], word) for word in command.split()]

        return {
            "folder": str(folder),
            "data": str(data),
            "environment": str(environment),
            "fault": fault,
            "timeout": timeout,
            "command": filled(self.command),
            "report": filled(self.report),
            "again": fault in ("launcher", "sigterm"),
            "checkpoints": self.checkpoints,
            "private": self.private,
            "variables": self.variables,
        }


# Restarts of torchrun 2.13 use the store of the attempt before, in which gloo finds addresses that are gone. Its issue
# 135712 names this setting.
_NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
# torchrun says `failed (exitcode: -9) local_rank: 1 (pid: 77)`, at each restart and at the end.
_TORCHRUN_ACCUSES = r"failed \(exitcode: -?\d+\) local_rank: (\d)"
_TORCHRUN_LINE = r"\[(default|trainer)?RANK\]:|\[rank: ?RANK\]|^RANK: "

STACKS: dict[str, Stack] = {
    "torchrun": Stack(
        "torchrun + DDP",
        (),
        "`--max-restarts=3 --tee 3`, `@record`, a snapshot for each epoch, process group with the timeout",
        "torchrun --standalone --nproc-per-node=2 --max-restarts=3 --tee 3 --log-dir LOGS "
        "SCRIPTS/train_torchrun.py DATA OUT TIMEOUT",
        _TORCHRUN_ACCUSES,
        _TORCHRUN_LINE,
        "snapshot.pt",
        variables=_NEW_STORE,
    ),
    "lightning": Stack(
        "Lightning Trainer",
        ("lightning==2.6.6",),
        "under `torchrun --max-restarts=3 --tee 3`, `ModelCheckpoint(every_n_epochs=1, save_last=True, "
        'save_on_exception=True)`, `ckpt_path="last"`, `DDPStrategy` with the timeout',
        "torchrun --standalone --nproc-per-node=2 --max-restarts=3 --tee 3 --log-dir LOGS "
        "SCRIPTS/train_lightning.py DATA OUT TIMEOUT",
        _TORCHRUN_ACCUSES,
        _TORCHRUN_LINE,
        "checkpoints/last.ckpt",
        variables=_NEW_STORE,
    ),
    "accelerate": Stack(
        "Accelerate",
        ("accelerate==1.15.0",),
        "`accelerate launch --rdzv_backend c10d --max_restarts 3 --tee 3`, automatic naming with `total_limit=3`, "
        "`load_state()`, `InitProcessGroupKwargs` with the timeout",
        "accelerate launch --multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no "
        "--rdzv_backend c10d --max_restarts 3 --tee 3 --log_dir LOGS SCRIPTS/train_accelerate.py DATA OUT TIMEOUT",
        _TORCHRUN_ACCUSES,
        _TORCHRUN_LINE,
        "checkpoints/checkpoint_*",
        variables=_NEW_STORE,
    ),
    "ray": Stack(
        "Ray Train",
        ("ray[train]==2.60.0",),
        "`FailureConfig(max_failures=3)`, `CheckpointConfig(num_to_keep=3)`, `TorchConfig` with the timeout; one local "
        "node on loopback without dashboard",
        "python SCRIPTS/train_ray.py DATA OUT TIMEOUT",
        r"\[Rank ([\d,]+) Error Snippet\]",
        r"\[Rank RANK Error Snippet\]",
        "run/checkpoint_*",
        private=("/tmp/ray",),
        lists_ranks=True,
        # The two times concern the start, which takes long on a busy machine.
        variables={
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_raylet_start_wait_time_s": "300",
            "RAY_gcs_server_request_timeout_seconds": "300",
        },
    ),
    "ups": Stack(
        "ups",
        (),  # this checkout
        "defaults: `supervise.max_restarts: 3`; named after 9 s, ended after 60 s; a checkpoint every 5 steps",
        "ups train CELL/recipe.yaml --ranks 2 --plugin SCRIPTS/ups_plugin.py",
        r"(?:FAILED|SLOW|NOTICE) .*?rank=(\d)/2",
        r"(?:FAILED|SLOW|NOTICE) .*?rank=RANK/2",
        "run/checkpoints/step_*",
        report="ups why OUT/run",
    ),
    "nvrx": Stack(
        "NVRx ft_launcher",
        ("nvidia-resiliency-ext==0.4.1",),
        "version 0.4.1; `--max-restarts=3 --tee 3`, rank heartbeats, timeouts at 60 s; script as for torchrun "
        "with `RankMonitorClient`",
        "ft_launcher --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:29511 --nnodes=1 --nproc-per-node=2 "
        "--max-restarts=3 --tee 3 --log-dir LOGS --ft-param-initial_rank_heartbeat_timeout=60 "
        "--ft-param-rank_heartbeat_timeout=60 SCRIPTS/train_nvrx.py DATA OUT TIMEOUT",
        _TORCHRUN_ACCUSES,
        _TORCHRUN_LINE,
        "snapshot.pt",
        variables=_NEW_STORE,
    ),
}
