"""Our network on scenarios of APEBench, by its protocol: `python -m benchmarks.apebench train`, then `page`.

First make the data with benchmarks/apebench/generate.py, which runs in an environment of its own and says how. `train`
can be interrupted and called again: each finished training is one file in OUT/results and is not repeated. Called a
second time while it works, it takes what the first call has not begun, so that two calls use two cores. `costs` says
what a training of each model takes. `page` writes the page from what is there, with the rows of APEBench's own networks
(benchmarks/apebench/networks.py) if OUT/networks has some.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.apebench.page import markdown, read_rows
from benchmarks.apebench.recipes import MODELS, Entry, entries
from benchmarks.apebench.scenarios import SCENARIOS, UPDATES
from benchmarks.apebench.trainings import Trainings
from ups.errors import ConfigError, UpsError
from ups.record.files import write_file_atomically
from ups.record.log import show_log, write_to_stderr


def parser() -> argparse.ArgumentParser:
    """The options of all commands."""
    options = argparse.ArgumentParser(
        "python -m benchmarks.apebench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    add("command", choices=("costs", "train", "page"))
    add("--data", type=Path, default=Path("apebench/data"), help="directory of the .npz files of generate.py")
    add("--out", type=Path, default=Path("apebench"), help="directory for runs and results")
    add("--model", action="append", default=[], choices=list(MODELS), help="may be repeated [default: all]")
    add("--scenario", action="append", default=[], choices=list(SCENARIOS), help="may be repeated [default: all]")
    add("--seed", action="append", type=int, help="may be repeated [default: as many as the comparison has]")
    add("--updates", type=int, default=UPDATES, help="fewer for a quick try; not comparable")
    add("--to", type=Path, help="file of the page [default: OUT/apebench.md]")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Do one command; the exit code."""
    chosen = parser().parse_args(arguments)
    if chosen.updates < 2:
        raise ConfigError(f"--updates must be at least 2, got {chosen.updates}")
    if chosen.command == "page":
        target = chosen.to or chosen.out / "apebench.md"
        write_file_atomically(target, markdown(*read_rows(chosen.out)).encode())
        print(f"wrote {target}")
        return 0
    wanted = entries(chosen.model or MODELS, chosen.scenario or list(SCENARIOS), chosen.seed)
    trainings = Trainings(chosen.data, chosen.out, chosen.updates)
    missing = [entry for entry in wanted if trainings.kept_row(entry) is None]
    print(f"{len(wanted) - len(missing)} of {len(wanted)} trainings are there", flush=True)
    _estimate(trainings, missing)
    if chosen.command == "costs":
        return 0
    for number, entry in enumerate(missing, 1):
        row = trainings.finish(entry)
        said = "another process trains it" if row is None else f"{row['score']}, {row['cpu_seconds']:.0f} CPU-seconds"
        print(f"{entry.name} ({number} of {len(missing)}): {said}", flush=True)
    return 0


def _estimate(trainings: Trainings, missing: Sequence[Entry]) -> None:
    """Print what each model's trainings will take. Scenarios cost alike: one of each model is measured."""
    total = 0.0
    for model in MODELS:
        of_model = [entry for entry in missing if entry.model == model]
        if of_model:
            seconds = trainings.training_seconds(of_model[0])
            total += seconds * len(of_model)
            print(f"{model}: {len(of_model)} trainings of about {seconds:.0f} CPU-seconds each", flush=True)
    if missing:
        print(f"together about {total / 3600:.1f} CPU-hours", flush=True)


if __name__ == "__main__":
    os.environ["PYTHONSAFEPATH"] = "1"  # of all children: no start of Python imports from the current directory
    show_log(write_to_stderr)
    try:
        sys.exit(main())
    except UpsError as error:
        print(f"ERROR {error.one_line()}", file=sys.stderr)
        sys.exit(error.exit_code)
