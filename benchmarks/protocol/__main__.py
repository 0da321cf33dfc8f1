"""ups-bench v1 from a checkout: `python -m benchmarks.protocol --help`. Can be interrupted and called again.

Generates the data, trains and scores every model on nine tasks at equal CPU time, and writes OUT/bench.json,
OUT/bench.md and OUT/pictures (extra `report`). Each training is an ordinary run in OUT/runs with its recipe in
OUT/recipes. What is finished is not repeated. Exit code 6 if a training failed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.protocol.recipes import CPU_SECONDS, MODELS
from benchmarks.protocol.trainings import Bench
from ups.errors import ConfigError, TrainingError, UpsError
from ups.record.log import show_log, write_to_stderr
from ups.run.progress_line import ProgressLine
from ups.solvers.tasks import BENCH_TASKS


def parser() -> argparse.ArgumentParser:
    """The options of the protocol."""
    options = argparse.ArgumentParser(
        "python -m benchmarks.protocol", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = options.add_argument
    many = "may be given many times [default: all]"
    add("--model", action="append", default=[], metavar="NAME", help=f"one of {', '.join(MODELS)}; {many}")
    add("--task", action="append", default=[], metavar="NAME", help=f"one of {', '.join(BENCH_TASKS)}; {many}")
    add("--data", type=Path, default=Path("data"), help="directory of the data sets; what is missing is generated")
    add("--out", type=Path, default=Path("bench"), help="directory for runs and results")
    add("--cpu-seconds", type=float, default=CPU_SECONDS, help="budget of each task, CPU-seconds of one thread")
    add("--jobs", type=int, default=1, help="trainings at the same time, one thread each")
    add("--small", action="store_true", help="a quick try on 32,8,8 trajectories; not comparable")
    add("--page-only", action="store_true", help="only write the page and its pictures again, from OUT/bench.json")
    add("--json", action="store_true", help="print the result as one JSON object")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the protocol and print its page; the exit code."""
    chosen = parser().parse_args(arguments)
    for name, known, kind in [
        *((name, MODELS, "model") for name in chosen.model),
        *((name, BENCH_TASKS, "task") for name in chosen.task),
    ]:
        if name not in known:
            raise ConfigError(f"ups-bench has no {kind} '{name}'", hint=f"choose from {', '.join(known)}")
    if chosen.cpu_seconds < 1 or chosen.jobs < 1:
        raise ConfigError("--cpu-seconds and --jobs must be at least 1")
    if chosen.page_only and (chosen.model or chosen.task):
        raise ConfigError("--page-only shows what bench.json holds", hint="leave --model and --task out")
    # In the order of the protocol, each once.
    models = [name for name in MODELS if name in (chosen.model or MODELS)]
    tasks = [name for name in BENCH_TASKS if name in (chosen.task or BENCH_TASKS)]
    bench = Bench(models, tasks, chosen.data, chosen.out, cpu_seconds=chosen.cpu_seconds, small=chosen.small)
    if chosen.page_only:
        document = bench.write_page()
    else:
        with ProgressLine() as line:
            document = bench.run(chosen.jobs, line)
    if chosen.json:
        print(json.dumps(document))
    else:
        print(bench.page.read_text(), end="")
        print(f"wrote {bench.page} and {bench.result}", file=sys.stderr)
    return TrainingError.exit_code if document["failures"] else 0


if __name__ == "__main__":
    os.environ["PYTHONSAFEPATH"] = "1"  # of all children: no start of Python imports from the current directory
    show_log(write_to_stderr)
    try:
        sys.exit(main())
    except UpsError as error:
        print(f"ERROR {error.one_line()}", file=sys.stderr)
        sys.exit(error.exit_code)
