"""What a model costs: CPU time of a rollout step, with one thread, over trajectories of the data it is scored on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from ups.evaluation.rollout import RolloutPlan, read_inputs
from ups.formats.base import Reader
from ups.models.one_thread import one_thread
from ups.models.rollout import Predictor, rollout

BATCH_SIZE = 32
# Repeats of a timing: three, more while they are short, fewer once they are long.
MIN_REPEATS, MAX_REPEATS = 3, 10
SHORT_SECONDS, LONG_SECONDS = 0.3, 4.0
_CPU = torch.device("cpu")


@torch.no_grad()
def model_milliseconds(
    model: Predictor, reader: Reader, plan: RolloutPlan, split: str, trajectories: Sequence[int]
) -> float:
    """CPU milliseconds per step and trajectory of rollouts of these trajectories together."""
    batch, _ = read_inputs(reader, split, trajectories, plan, _CPU, torch.float32)

    def run() -> None:
        for _ in rollout(model, batch, plan.num_steps):
            pass

    with one_thread():
        run()  # the first call pays for what later ones find in memory
        return 1e3 * cpu_seconds(run) / (len(trajectories) * plan.num_steps)


def cpu_seconds(run: Callable[[], object]) -> float:
    """The least CPU time of a call over some repeats, all threads of the process together.

    The least, because other programs on the machine only add to it.
    """
    spent: list[float] = []
    while sum(spent) < LONG_SECONDS and len(spent) < (MAX_REPEATS if sum(spent) < SHORT_SECONDS else MIN_REPEATS):
        started = time.process_time()
        run()
        spent.append(time.process_time() - started)
    return min(spent)
