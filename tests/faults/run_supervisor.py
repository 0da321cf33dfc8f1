"""`python run_supervisor.py SETTINGS TOY MARK`: one supervised toy run, as a process that tests can kill."""

import json
import sys
from pathlib import Path

from ups.supervise.deadlines import Deadlines
from ups.supervise.options import Options
from ups.supervise.supervisor import supervise

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    run_dir = Path(settings.pop("run_dir"))
    deadlines = Deadlines(**settings.pop("deadlines"))
    command = (sys.executable, sys.argv[2], str(run_dir))
    # The ranks and all they start carry the mark, this process does not: what carries it afterwards is left over.
    options = Options(
        run_dir, command=command, deadlines=deadlines, environment={"TOY_MARK": sys.argv[3]}, show_rank=None, **settings
    )
    sys.exit(supervise(options))
