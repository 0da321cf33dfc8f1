"""The programs of `ups doctor`: `python -m ups.doctor.probes NAME WORK_DIR` runs the checks of one process in order.

A check begins before the module that does it is imported: if an import crashes, the doctor knows in which check.
"""

from __future__ import annotations

import importlib
import sys

from ups.doctor.checks import CHECK_PROGRAMS, OPENED, REHEARSAL
from ups.doctor.probes.check import begin_check, start


def main() -> None:
    """Run the program that the command line names."""
    name, assignment = start(sys.argv[1:])
    program = next(one for one in (*CHECK_PROGRAMS, OPENED, REHEARSAL) if one.module == name)
    with assignment.stack:
        for check in program.checks:
            with begin_check(check.name) as report:
                module = importlib.import_module(f"ups.doctor.probes.{program.file or program.module}")
                getattr(module, f"check_{check.name}")(assignment, report)


if __name__ == "__main__":
    main()
