"""What the scripts of all stacks train: one network, one data set, and the place where a cell plants its fault.

The scripts hold no code for faults. `Network.forward` is called once for a step on each rank; there a rank notes its
progress and, once in a cell, on rank 1 at step 18 of 40, meets the fault that the environment names.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import h5py
import torch
from torch import nn
from torch.utils.data import Dataset

EPOCHS, STEPS_PER_EPOCH, BATCH = 8, 5, 8  # batch of a rank
STEPS = EPOCHS * STEPS_PER_EPOCH
TRAJECTORIES, FRAMES, POINTS = 80, 41, 512
PLANT_STEP, PLANT_RANK = 18, 1
STEP_SECONDS = 0.1  # stands for the computing of a step

_CELL = Path(os.environ.get("STACKS_CELL", "."))
_FAULT = os.environ.get("STACKS_FAULT", "none")
_passes = 0


class Waves(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Pairs of neighboring frames; a worker opens the file when it reads for the first time."""

    def __init__(self, path: str) -> None:
        self.path, self.file = path, None

    def __len__(self) -> int:
        return STEPS_PER_EPOCH * BATCH * 2

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.file is None:
            self.file = h5py.File(self.path, "r")
        frames = self.file["u"][index % TRAJECTORIES, index % (FRAMES - 1) :][:2]
        return torch.from_numpy(frames[:1]), torch.from_numpy(frames[1:])


class Network(nn.Module):
    """The state one frame later, of a periodic field (batch, 1, points)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, width, 5, padding=2, padding_mode="circular"), nn.GELU(), nn.Conv1d(width, 1, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.net(x)
        return step_passes(y) if self.training else y


def write_final(weights: dict[str, torch.Tensor]) -> None:
    """Rank 0, after the last step: a hash of the weights, for comparison with the run without a fault."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].detach().cpu().contiguous().numpy().tobytes())
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in weights.values())
    note("final.jsonl", sha256=digest.hexdigest(), finite=finite)


def note(file: str, **values: Any) -> None:
    """Append a line to a file of the cell, outside of the directory of the run."""
    with (_CELL / file).open("a") as lines:
        lines.write(json.dumps({"time": time.time(), "pid": os.getpid(), **values}) + "\n")


def step_passes(y: torch.Tensor) -> torch.Tensor:
    """Called in the forward pass of each training step."""
    global _passes
    _passes += 1
    rank = int(os.environ.get("RANK", "0"))
    time.sleep(STEP_SECONDS)
    note(f"progress_{rank}.jsonl", samples=len(y))
    if _FAULT == "none" or rank != PLANT_RANK:
        return y
    mark = _CELL / "planted.jsonl"
    if _FAULT == "slow" and mark.exists():
        time.sleep(2.0)
    if _passes != PLANT_STEP or mark.exists():
        return y
    note("planted.jsonl", fault=_FAULT)
    return _plant(y)


def _plant(y: torch.Tensor) -> torch.Tensor:
    if _FAULT == "raise":
        raise FileNotFoundError("planted: calibration table is missing")
    if _FAULT == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    if _FAULT == "out_of_memory":
        torch.empty(1 << 50, dtype=torch.uint8)
    if _FAULT == "nan":
        return y * float("nan")
    if _FAULT == "deadlock":
        torch.distributed.barrier()  # a collective that rank 0 does not issue here
    if _FAULT == "early_exit":
        os._exit(0)
    # Everything else is done from outside. The rank waits until it is done, so that all stacks meet it at this step.
    give_up = time.monotonic() + 10
    while not (_CELL / "acted").exists() and time.monotonic() < give_up:
        time.sleep(0.02)
    return y
