"""`engine.micro_batch_size: auto`: the most windows in a pass with which every stage fits, before any rank starts.

    python -m ups.run.auto_micro_batch RUN_DIR RANKS HOST_BYTES

In a process of its own: it needs torch, which the supervisor must not, and asks CUDA for free memory, which leaves a
context on the device for as long as the process lives. Stages are rehearsed on tensors without data
(`ups.run.planning`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ups.errors import MachineError, TrainingError
from ups.record.processes import module_command
from ups.record.text import last_line

if TYPE_CHECKING:
    from ups.config.schema import Recipe

# What a rank on a CPU holds besides tensors: Python, torch, kernels.
_PROCESS_BYTES = 600 << 20
_DEADLINE_SECONDS = 600


def auto_micro_batch(run_dir: Path, ranks: int, host_bytes: int) -> int:
    """Windows in a pass for a run whose directory is prepared. No torch in this process.

    host_bytes: memory of this host for each of its ranks. Raises MachineError if not even one window fits.
    """
    command = module_command("ups.run.auto_micro_batch", str(run_dir), str(ranks), str(host_bytes))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DEADLINE_SECONDS, check=False)
        problem = last_line(done.stderr) if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"the rehearsal took more than {_DEADLINE_SECONDS} s"
    if problem:
        raise TrainingError(
            f"no micro-batch could be chosen for engine.micro_batch_size=auto: {problem}",
            hint="set engine.micro_batch_size to a number of windows; `ups plan` shows what stages need",
        )
    found = json.loads(done.stdout.splitlines()[-1])
    if found["micro_batch_size"] is None:
        raise MachineError(
            f"stage {found['stage']} does not fit with one window: {found['usable_bytes'] / 2**30:.1f} GiB are usable",
            hint="use engine.activation_checkpointing, engine.strategy=fsdp on more ranks, or a smaller model; "
            "`ups plan` shows what takes the memory",
        )
    return int(found["micro_batch_size"])


def usable_bytes(recipe: Recipe, host_bytes: int) -> tuple[int, bool]:
    """Bytes for the tensors of one rank, and whether they are those of a GPU."""
    import torch

    from ups.plan.devices import OF_FREE_MEMORY

    if recipe.engine.device != "cpu" and torch.cuda.is_available():
        return int(OF_FREE_MEMORY * torch.cuda.mem_get_info(0)[0]), True
    return int(OF_FREE_MEMORY * host_bytes) - _PROCESS_BYTES, False


def main() -> None:
    from ups.data.open import open_tasks
    from ups.run.assemble import OpenData
    from ups.run.directory import read_run_recipe, read_statistics
    from ups.run.planning import largest_micro_batch

    run_dir, ranks, host_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    recipe = read_run_recipe(run_dir).recipe
    usable, on_gpu = usable_bytes(recipe, host_bytes)
    smallest, at = None, 0
    with open_tasks(recipe.data) as readers:
        opened = OpenData(readers, read_statistics(run_dir, readers))
        for index in range(len(recipe.stages)):
            found = largest_micro_batch(
                recipe, opened, index, ranks, usable, offloaded=recipe.engine.offload and on_gpu
            )
            if smallest is None or found is None or found < smallest:
                smallest, at = found, index
            if found is None:
                break
    sys.stdout.write(json.dumps({"micro_batch_size": smallest, "stage": at, "usable_bytes": usable}) + "\n")


if __name__ == "__main__":
    main()
