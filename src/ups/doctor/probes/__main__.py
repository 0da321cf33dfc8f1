"""The programs of `ups doctor`: `python -m ups.doctor.probes NAME WORK_DIR` runs the checks of one process in order.

A check begins before the module that does it is imported: if an import crashes, the doctor knows in which check.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from ups.doctor.probes import libraries
from ups.doctor.probes.check import Assignment, begin_check, start
from ups.run.preflight import examine_machine


def main() -> None:
    """Run the program that the command line names."""
    name, assignment = start(sys.argv[1:])
    PROGRAMS[name](assignment)


def _machine(assignment: Assignment) -> None:
    with begin_check("machine") as report:
        examine_machine(assignment.recipe, assignment.ranks, assignment.run_dir, report)


def _libraries(assignment: Assignment) -> None:
    with begin_check("libraries") as report:
        libraries.check_libraries(report)
    with begin_check("accelerator") as report:
        libraries.check_accelerator(assignment, report)


def _data(assignment: Assignment) -> None:
    with begin_check("data") as report:
        from ups.doctor.probes import data

        data.check_data(assignment, report)
    with begin_check("loader") as report:
        data.check_loader(assignment, report)


def _opened(assignment: Assignment) -> None:
    with begin_check("opened") as report:
        from ups.doctor.probes import data

        data.check_opened(assignment, report)


def _group(assignment: Assignment) -> None:
    with contextlib.ExitStack() as stack:
        with begin_check("group") as report:
            from ups.doctor.probes import ranks

            runtime = ranks.start_group(assignment, stack, report)
        with begin_check("collective") as report:
            ranks.check_collective(runtime, report)


def _samples(assignment: Assignment) -> None:
    with begin_check("samples") as report:
        from ups.doctor.probes import ranks

        ranks.check_every_stage(assignment, report)


def _model(assignment: Assignment) -> None:
    with begin_check("model") as report:
        from ups.doctor.probes import model

        model.check_model(assignment, report)
    with begin_check("backward") as report:
        model.check_backward(assignment, report)
    with begin_check("alone") as report:
        model.train_alone(assignment, report)


def _wrap(assignment: Assignment) -> None:
    with contextlib.ExitStack() as stack:
        with begin_check("wrap") as report:
            from ups.distributed.runtime import Runtime
            from ups.doctor.probes import wrap
            from ups.doctor.probes.parts import quick

            recipe = quick(assignment.run)
            runtime = stack.enter_context(Runtime.start(recipe.engine))
            resident = wrap.check_wrap(assignment, recipe, runtime, report)
        with begin_check("memory") as report:
            wrap.check_memory(runtime, resident, report)
        with begin_check("checkpoint") as report:
            wrap.check_checkpoint(assignment, recipe, runtime, report)


def _parity(assignment: Assignment) -> None:
    with contextlib.ExitStack() as stack:
        with begin_check("parity") as report:
            from ups.distributed.runtime import Runtime
            from ups.doctor.probes import parity
            from ups.doctor.probes.parts import exact, open_run_data

            recipe = exact(assignment.run, assignment.ranks)
            runtime = stack.enter_context(Runtime.start(recipe.engine))
            opened = stack.enter_context(open_run_data(assignment))
            stages = range(len(recipe.stages))
            trained = [parity.check_parity(assignment, recipe, opened, runtime, i, report) for i in stages]
        with begin_check("equal") as report:
            for module in trained:
                parity.check_equal_on_all_ranks(module, runtime, report)
        with begin_check("evaluation") as report:
            parity.check_evaluation(assignment, recipe, opened, runtime, report)


def _rehearse(assignment: Assignment) -> None:
    with begin_check("rehearsal") as report:
        from ups.doctor.probes import rehearse

        rehearse.rehearse_assignment(assignment, report)


PROGRAMS: dict[str, Callable[[Assignment], None]] = {
    "machine": _machine,
    "libraries": _libraries,
    "data": _data,
    "opened": _opened,
    "group": _group,
    "samples": _samples,
    "model": _model,
    "wrap": _wrap,
    "parity": _parity,
    "rehearse": _rehearse,
}

if __name__ == "__main__":
    main()
