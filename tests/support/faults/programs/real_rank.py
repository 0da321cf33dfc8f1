"""The real rank program with a fault planted from outside: `python real_rank.py RUN_DIR`.

The loop writes a record into its black box when it enters a phase. The fault happens right after such a record, by a
wrapper around that one method, so the training code under test is exactly what users run. For faults that come at any
time: after signal SIGRTMIN + 3 the rank raises an exception at its next record, after SIGRTMIN + 4 its next loss is not
a number, after SIGRTMIN + 5 it has no memory left at its next forward pass.
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.faults.programs.faults_to_plant import FLAGS, OutOfMemoryError, person_code, plant_fault
from ups.record.blackbox import BlackBox, Phase

RANK = int(os.environ.get("RANK", "0"))
MICRO_BATCH_SIZE = int(json.loads(os.environ.get("UPS_OVERRIDES", "{}")).get("engine.micro_batch_size", 8))
_write = BlackBox.record
_asked_to_raise: list[int] = []
_asked_for_memory: list[int] = []


def _write_and_plant(box: BlackBox, phase: Phase, step: int, *arguments: Any, **named: Any) -> None:
    _write(box, phase, step, *arguments, **named)
    if _asked_to_raise:
        person_code()
    if _asked_for_memory and phase is Phase.FORWARD:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    plant_fault(phase.label, step, RANK, micro_batch_size=MICRO_BATCH_SIZE, run_dir=Path(sys.argv[1]))


BlackBox.record = _write_and_plant  # type: ignore[method-assign]

if __name__ == "__main__":
    signal.signal(signal.SIGRTMIN + 3, lambda number, frame: _asked_to_raise.append(number))
    signal.signal(signal.SIGRTMIN + 4, lambda number, frame: FLAGS.add("nan"))
    signal.signal(signal.SIGRTMIN + 5, lambda number, frame: _asked_for_memory.append(number))
    from ups.run import rank_main

    _train = rank_main.train

    def _train_surrounded(*arguments: Any) -> int:
        from tests.support.faults.programs.surroundings import surround  # after the recorder is in place

        surround(Path(sys.argv[1]), RANK)
        return _train(*arguments)

    rank_main.train = _train_surrounded
    sys.exit(rank_main.main(sys.argv[1:]))
