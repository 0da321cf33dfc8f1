"""The programs of `ups doctor`: `python -m ups.doctor.probes NAME WORK_DIR` runs the checks of one process in order.

A check begins before the module that does it is imported: if an import crashes, the doctor knows in which check.
"""

from __future__ import annotations

import importlib
import sys

from ups.doctor.probes.check import begin_check, start

# Program -> its checks, each with the module below this package and the function that does it.
PROGRAMS = {
    "machine": {"machine": "libraries:check_this_machine"},
    "libraries": {"libraries": "libraries:check_libraries", "accelerator": "libraries:check_accelerator"},
    "data": {"data": "data:check_data", "loader": "data:check_loader"},
    "opened": {"opened": "data:check_opened"},
    "group": {"group": "ranks:check_group", "collective": "ranks:check_collective"},
    "samples": {"samples": "ranks:check_every_stage"},
    "model": {"model": "model:check_model", "backward": "model:check_backward", "alone": "model:train_alone"},
    "wrap": {"wrap": "wrap:check_wrap", "memory": "wrap:check_memory", "checkpoint": "wrap:check_checkpoint"},
    "parity": {
        "parity": "parity:check_parity",
        "equal": "parity:check_equal_on_all_ranks",
        "evaluation": "parity:check_evaluation",
    },
    "rehearse": {"rehearsal": "rehearse:rehearse_assignment"},
}


def main() -> None:
    """Run the program that the command line names."""
    name, assignment = start(sys.argv[1:])
    with assignment.stack:
        for check, target in PROGRAMS[name].items():
            with begin_check(check) as report:
                module, _, function = target.partition(":")
                getattr(importlib.import_module(f"ups.doctor.probes.{module}"), function)(assignment, report)


if __name__ == "__main__":
    main()
