"""`ups bench`: ups-bench v1 from data to table, in one command that can be interrupted and called again."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.options import JsonOption, new_app
from ups.cli.output import note, report, say
from ups.errors import ConfigError

app = new_app()


@app.command()
def bench(
    model: Annotated[
        list[str],
        typer.Option(
            metavar="NAME",
            help="reference, fno, unet, fno+, unet+, ups-alone or ups; may be given many times. [default: all]",
        ),
    ] = [],  # noqa: B006 - typer copies it
    task: Annotated[list[str], typer.Option(metavar="NAME", help="Only this task; may be given many times.")] = [],  # noqa: B006
    data: Annotated[str, typer.Option(help="Directory of the data sets; what is missing is generated.")] = "data",
    out: Annotated[str, typer.Option(help="Directory for runs and results.")] = "bench",
    cpu_seconds: Annotated[
        float, typer.Option(min=1.0, help="Budget of each task, CPU-seconds of one thread. ups-bench v1: 240.")
    ] = 240.0,
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at the same time, one thread each.")] = 1,
    small: Annotated[bool, typer.Option("--small", help="A quick try on 32,8,8 trajectories; not comparable.")] = False,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Only write the page and its pictures again, from OUT/bench.json.")
    ] = False,
    json: JsonOption = False,
) -> None:
    """Train and score models by the fixed protocol: equal CPU time, one engine, references next to every score.

    Writes OUT/bench.json, OUT/bench.md and OUT/pictures (extra `report`). Each training is an ordinary run in OUT/runs
    with its recipe in OUT/recipes; what is finished is not repeated.
    """
    from pathlib import Path

    from ups.evaluation.protocol import MODELS
    from ups.run.bench import Bench
    from ups.run.progress_line import ProgressLine
    from ups.solvers.tasks import BENCH_TASKS

    for name, known, what in [(n, MODELS, "model") for n in model] + [(n, BENCH_TASKS, "task") for n in task]:
        if name not in known:
            raise ConfigError(f"ups-bench has no {what} '{name}'", hint=f"choose from {', '.join(known)}")
    # In the order of the protocol, each once.
    models = [name for name in MODELS if name in (model or MODELS)]
    tasks = [name for name in BENCH_TASKS if name in (task or BENCH_TASKS)]
    work = Bench(models, tasks, Path(data), Path(out), cpu_seconds=cpu_seconds, small=small)
    if page_only and (model or task):
        raise ConfigError("--page-only shows what bench.json holds", hint="leave --model and --task out")
    if page_only:
        document = work.write_page()
    else:
        with ProgressLine() as line:
            document = work.run(jobs, line)
    if json:
        report(document)
    else:
        say(work.page.read_text().rstrip("\n"))
        note(f"wrote {work.page} and {work.result}")
    if document["failures"]:
        raise typer.Exit(6)
