"""What the table of ups-bench says of a training beside its scores: cost of a rollout, memory, the machine."""

from __future__ import annotations

import contextlib
import os
import platform
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.protocol.step_cost import Yardstick
from ups import __version__
from ups.run.progress_line import read_rows

if TYPE_CHECKING:
    from ups.models.stepper import Stepper

# For the cost of a step of a rollout; the first repetition warms up.
ROLLOUT_STEPS, ROLLOUT_REPEATS = 20, 10


def rollout_sticks(stepper: Stepper, data: Path, task: str) -> float:
    """What a step of a rollout of one sample costs on one thread: passes of the yardstick, median over repetitions.

    In turns with it (`benchmarks.protocol.step_cost`), because trainings may be working next to this.
    """
    import torch

    from ups.config.schema import TaskConfig
    from ups.data.loader import first_batch
    from ups.data.open import open_task
    from ups.models.normalization import one_thread
    from ups.models.stepper import rollout

    stick, costs = Yardstick(), []
    with (
        contextlib.closing(open_task(TaskConfig(name=task, path=str(data)))) as reader,
        torch.inference_mode(),
        one_thread(),
    ):
        frames = 0 if reader.task.steady else stepper.context_frames
        batch = first_batch(reader, "test", window_frames=frames, batch_size=1)
        before = stick.seconds()
        for _ in range(ROLLOUT_REPEATS):
            started = time.process_time()
            num_steps = sum(1 for _ in rollout(stepper, batch, ROLLOUT_STEPS))
            taken = time.process_time() - started
            after = stick.seconds()
            costs.append(2 * taken / num_steps / (before + after))
            before = after
    return statistics.median(costs[1:])


def peak_memory(run_dir: Path) -> float | None:
    """The last one that the run has written to its metrics, in MiB."""
    found = [row["peak_memory_mib"] for row in read_rows(run_dir) if "peak_memory_mib" in row]
    return float(found[-1]) if found else None


def machine() -> dict[str, str]:
    """What the figures depend on in addition to the data."""
    import torch

    model = platform.machine()
    cpus = Path("/proc/cpuinfo")
    if cpus.is_file():
        names = [line.partition(":")[2].strip() for line in cpus.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return {
        "cpu": f"{model} ({len(os.sched_getaffinity(0))} usable cores)",
        "torch": torch.__version__,
        "ups": __version__,
    }
