"""`ups data generate`: asks for the benchmark's data sets and shows how far they are (work: ups.solvers)."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.options import JsonOption
from ups.cli.output import report, say, table
from ups.errors import ConfigError

if TYPE_CHECKING:
    from ups.solvers.request import Request

TasksArgument = Annotated[
    list[str], typer.Argument(metavar="TASK", help="Tasks to generate, or 'all'.", show_default=False)
]


def generate(
    tasks: TasksArgument,
    out: Annotated[str, typer.Option(help="Directory for the data sets.")] = "data",
    trajectories: Annotated[
        str | None,
        typer.Option(metavar="TRAIN,VALID,TEST", help="Trajectories of each split. [default: 512,64,64]"),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="A quick try: 32,8,8 trajectories.")] = False,
    resolution: Annotated[
        int | None, typer.Option(help="Stored points per axis. [default: 128 in 1D, 32 in 2D]", show_default=False)
    ] = None,
    frames: Annotated[
        int | None, typer.Option(help="Stored frames. [default: 41 in 1D, 21 in 2D]", show_default=False)
    ] = None,
    parameter: Annotated[
        list[str],
        typer.Option(metavar="NAME=VALUE", help="Give a parameter instead of drawing it.", show_default=False),
    ] = [],  # noqa: B006 - typer copies it
    range: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=LOW:HIGH",
            help="Draw a parameter from another range, to score a model outside of its own.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 - typer copies it
    processes: Annotated[
        int | None, typer.Option(help="Solver processes. [default: one per core]", show_default=False)
    ] = None,
    format: Annotated[
        str, typer.Option(help="store (Zarr) or pdebench (HDF5, one value of each parameter).")
    ] = "store",
    seed: Annotated[int, typer.Option(help="Key of every random draw; the benchmark is seed 0.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another data set of that name.")] = False,
    json: JsonOption = False,
) -> None:
    """Generate benchmark data with reference solvers; an interrupted command continues when it is run again."""
    requests = _requests(tasks, _counts(trajectories, small), resolution, frames, seed, parameter, range, format)
    from pathlib import Path

    from ups.run.progress_line import ProgressLine
    from ups.solvers.sweep import generate as run

    with ProgressLine(quiet=json) as line:
        results = run(
            requests,
            Path(out),
            num_processes=processes if processes is not None else _num_cores(),
            format="pdebench" if format == "pdebench" else "store",
            overwrite=overwrite,
            on_progress=lambda done, total, task: line.count(task, done, total, "chunks"),
        )
    if json:
        report(
            [
                {
                    "task": r.request.task,
                    "path": str(r.path),
                    "kept": r.kept,
                    "identity": r.request.identity(),
                    "bytes": r.num_bytes,
                    "seconds": round(r.seconds, 2),
                    "request": r.request.to_json(),
                    "summary": r.summary,
                }
                for r in results
            ]
        )
        return
    rows = [("task", "trajectories", "frames", "grid", "size", "")]
    for r in results:
        request = r.request
        grid = "x".join([str(request.resolution)] * request.bench_task.spec.num_spatial_dims)
        counts = "+".join(map(str, request.trajectories))
        state = f"{r.path} (was there)" if r.kept else str(r.path)
        rows.append((request.task, counts, str(request.num_frames), grid, f"{r.num_bytes / 1e6:.1f} MB", state))
    say(table(rows))


def _requests(
    tasks: list[str],
    trajectories: tuple[int, int, int],
    resolution: int | None,
    frames: int | None,
    seed: int,
    parameter: list[str],
    ranges: list[str],
    format: str,
) -> list[Request]:
    from ups.solvers.request import make_request
    from ups.solvers.sweep import with_given_parameters
    from ups.solvers.tasks import BENCH_TASKS

    if format not in ("store", "pdebench"):
        raise ConfigError(f"there is no format '{format}'", hint="choose --format store or --format pdebench")
    names = list(BENCH_TASKS) if "all" in tasks else list(dict.fromkeys(tasks))
    fixed = dict(_assignment(text) for text in parameter)
    drawn = dict(_range(text) for text in ranges)
    requests = []
    for name in names:
        request = make_request(
            name,
            trajectories=trajectories,
            resolution=resolution,
            num_frames=frames,
            seed=seed,
            fixed=fixed,
            ranges=drawn,
        )
        requests.append(with_given_parameters(request) if format == "pdebench" else request)
    return requests


def _assignment(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name.strip(), float(value)
    except ValueError:
        raise ConfigError(f"--parameter {text}: that is not a name and a number", hint="for example nu=0.01") from None


def _range(text: str) -> tuple[str, tuple[float, float]]:
    name, _, values = text.partition("=")
    low, _, high = values.partition(":")
    try:
        return name.strip(), (float(low), float(high))
    except ValueError:
        raise ConfigError(f"--range {text}: that is not a range", hint="for example nu=0.1:0.2") from None


def _counts(text: str | None, small: bool) -> tuple[int, int, int]:
    from ups.solvers.request import BENCH_TRAJECTORIES, SMALL_TRAJECTORIES

    if text is None:
        return SMALL_TRAJECTORIES if small else BENCH_TRAJECTORIES
    if small:
        raise ConfigError("--small and --trajectories contradict each other", hint="give one of them")
    try:
        train, valid, test = (int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"--trajectories {text}: that is not three counts", hint="for example --trajectories 512,64,64"
        ) from None
    return train, valid, test


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))
