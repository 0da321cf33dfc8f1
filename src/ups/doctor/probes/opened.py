"""Check `opened`: every task is opened and has its statistics, as before the ranks of a run start.

The first rung of `ups doctor RECIPE --bisect`: what fails here needs no model. Keeps the statistics for the others.
"""

from __future__ import annotations

import json
import sys

from ups.doctor.probes.check import begin_check, counted, start
from ups.doctor.probes.statistics import STATISTICS_NAME


def main() -> None:
    """Open and measure."""
    assignment = start(sys.argv[1:])
    with begin_check("opened") as report:
        from ups.data.normalize import ensure_statistics
        from ups.data.open import open_task

        found = {}
        for config in assignment.run.data.tasks:
            report.facts["task"] = config.name
            reader = open_task(config)
            found[config.name] = ensure_statistics(reader, config.path).to_json()
            reader.close()
        (assignment.work_dir / STATISTICS_NAME).write_text(json.dumps(found))
        report.facts.clear()
        report.says = f"{counted(len(found), 'task')} opened and measured"


if __name__ == "__main__":
    main()
