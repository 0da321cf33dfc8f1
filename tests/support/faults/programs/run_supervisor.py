"""`python run_supervisor.py SETTINGS PROGRAM MARK`: one supervised run of a rank program, as a process to be killed."""

import json
import sys
from dataclasses import replace
from pathlib import Path

from tests.support.faults.small_run import prepare_real
from ups.config.recipe import resolve
from ups.supervise.options import Options, Rendezvous
from ups.supervise.run_file import hold_run
from ups.supervise.standstill import Deadlines
from ups.supervise.supervisor import supervise
from ups.supervise.trackers import Trackers

if __name__ == "__main__":
    settings = json.loads(sys.argv[1])
    run_dir = Path(settings.pop("run_dir"))
    recipe = settings.pop("recipe")
    identity = prepare_real(run_dir, recipe) if recipe else None
    deadlines = Deadlines(**settings.pop("deadlines"))
    rendezvous = Rendezvous(**settings.pop("rendezvous"))
    command = (sys.executable, sys.argv[2], str(run_dir))
    # The ranks and all they start carry the mark, this process does not: what carries it afterwards is left over.
    options = Options(
        run_dir,
        command=command,
        deadlines=deadlines,
        environment={"TOY_MARK": sys.argv[3]},
        rendezvous=rendezvous,
        show_rank=None,
        identity=identity,
        **settings,
    )
    followed = resolve(recipe).recipe.tracking.trackers if recipe else []
    with hold_run(run_dir), Trackers(run_dir, followed) as trackers:
        sys.exit(supervise(replace(options, trackers=trackers)))
