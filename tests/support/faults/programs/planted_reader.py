"""A reader that fails in its loader worker: by a crash in native code, or by an exception. Importable by workers."""

from __future__ import annotations

import ctypes
import os
import sys
from typing import Any

from tests.support.faults.programs.faults_to_plant import FAULT
from ups.formats.zarr_store import StoreReader


class PlantedReader(StoreReader):
    """Plants the fault at the block number `FAULT["blocks"]` that a worker of the rank
    `FAULT["rank"]` reads of a task.
    """

    num_blocks = 0

    def read_block(self, split: str, trajectories: Any, start_frames: Any, num_frames: int) -> Any:
        if sys.argv[0].endswith("ups/data/worker.py") and int(os.environ["RANK"]) == FAULT["rank"]:
            self.num_blocks += 1
            if self.num_blocks >= FAULT["blocks"]:
                fail(FAULT["kind"])
        return super().read_block(split, trajectories, start_frames, num_frames)


def fail(kind: str) -> None:
    """Crash or raise."""
    if kind == "worker_crash":
        ctypes.string_at(0)
    raise ValueError("planted in a reader")
