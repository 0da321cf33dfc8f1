"""`ups data`: generates, imports, inspects, validates and packs data."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.data_fetch import cache, fetch
from ups.cli.options import JsonOption, new_app
from ups.cli.output import report, say, styled, table
from ups.errors import ConfigError, DataError
from ups.record.processes import usable_cores
from ups.record.text import duration_text, size_text
from ups.run.progress_line import ProgressLine

if TYPE_CHECKING:
    from ups.formats.base import GridReader
    from ups.solvers.request import Request


StoreOption = Annotated[Path, typer.Option("--output", "-o", metavar="OUT.zarr", help="The new store.")]
ValidOption = Annotated[float, typer.Option(min=0, max=0.9, help="Part for validation.")]
TestOption = Annotated[float, typer.Option(min=0, max=0.9, help="Part for the test; at least 6 of 24 or more.")]
CompressOption = Annotated[bool, typer.Option("--compress", help="Smaller with zstd, but slower to read.")]
OverwriteOption = Annotated[bool, typer.Option("--overwrite", help="Replace a store of that name.")]


def check_fractions(valid_fraction: float, test_fraction: float) -> None:
    """Raise ConfigError if nothing would be left to train on."""
    if valid_fraction + test_fraction >= 1:
        raise ConfigError("valid_fraction + test_fraction must stay below 1: nothing would be left to train on")


def write_store(
    reader: GridReader, output: Path, names: Sequence[str], doing: str, *, compress: bool, overwrite: bool, json: bool
) -> None:
    """Write everything that the reader has. names: of its files. doing: for the line of progress."""
    from ups.data.pack import pack
    from ups.formats.zarr_store import StoreReader

    started = time.monotonic()
    with ProgressLine(quiet=json) as line:
        manifest = pack(
            reader,
            output,
            compression="zstd" if compress else None,
            overwrite=overwrite,
            generator={"source": list(names)},
            progress=lambda done, total: line.count(doing, done, total, "trajectories"),
        )
    store = StoreReader(output)
    facts = {
        "path": str(output),
        "task": reader.task.name,
        "splits": dict(reader.splits),
        "assumptions": list(store.assumptions),
        "bytes": manifest.total_bytes,
        "identity": store.identity(),
        "seconds": round(time.monotonic() - started, 3),
    }
    if json:
        report(facts)
        return
    facts |= {"size": size_text(manifest.total_bytes), "took": duration_text(time.monotonic() - started)}
    facts["trajectories"] = ", ".join(f"{count} {split}" for split, count in reader.splits.items())
    rows = [(name, str(facts[name])) for name in ("task", "path", "size", "trajectories", "identity", "took")]
    say(table([*rows[:4], *(("assumed", text) for text in store.assumptions), *rows[4:]]))


def import_data(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="NumPy, HDF5, NetCDF or Zarr; several are trajectories of one task."),
    ],
    output: StoreOption,
    task: Annotated[
        Path | None,
        typer.Option(
            metavar="TASK.yaml", help="What the arrays mean; default the task.yaml next to FILE, else a guess."
        ),
    ] = None,
    valid_fraction: ValidOption = 0.1,
    test_fraction: TestOption = 0.1,
    compress: CompressOption = False,
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Make a store of data of your own, a few frames at a time. What is assumed about it is printed, and kept in it."""
    from ups.library.own_data import open_own

    check_fractions(valid_fraction, test_fraction)
    reader, names = open_own(paths, task, valid_fraction=valid_fraction, test_fraction=test_fraction)
    write_store(reader, output, names, "importing", compress=compress, overwrite=overwrite, json=json)


TasksArgument = Annotated[list[str], typer.Argument(metavar="TASK", help="Tasks to generate, or 'all'.")]


def generate(
    tasks: TasksArgument,
    out: Annotated[str, typer.Option(help="Directory for the data sets.")] = "data",
    trajectories: Annotated[
        str | None, typer.Option(metavar="TRAIN,VALID,TEST", help="Trajectories of each split. [default: 512,64,64]")
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="A quick try: 32,8,8 trajectories.")] = False,
    resolution: Annotated[
        int | None, typer.Option(help="Stored points per axis. [default: 128 in 1D, 32 in 2D]")
    ] = None,
    frames: Annotated[int | None, typer.Option(help="Stored frames. [default: 41 in 1D, 21 in 2D]")] = None,
    parameter: Annotated[
        list[str], typer.Option(metavar="NAME=VALUE", help="Give a parameter instead of drawing it.")
    ] = [],  # noqa: B006 - typer copies it
    range: Annotated[
        list[str],
        typer.Option(
            metavar="NAME=LOW:HIGH", help="Draw a parameter from another range, to score a model outside of its own."
        ),
    ] = [],  # noqa: B006 - typer copies it
    processes: Annotated[int | None, typer.Option(help="Solver processes. [default: one per core]")] = None,
    seed: Annotated[int, typer.Option(help="Key of every random draw; the benchmark is seed 0.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace another data set of that name.")] = False,
    json: JsonOption = False,
) -> None:
    """Generate benchmark data with reference solvers; an interrupted command continues when it is run again."""
    from ups.solvers.point_sweep import generate_points
    from ups.solvers.points import POINT_TASKS
    from ups.solvers.sweep import generate as run

    counts = _counts(trajectories, small)
    on_points = [task for task in dict.fromkeys(tasks) if task in POINT_TASKS]
    others = [task for task in tasks if task not in POINT_TASKS]
    requests = _requests(others, counts, resolution, frames, seed, parameter, range)
    if on_points and (resolution or frames or parameter or range):
        raise ConfigError(
            f"'{on_points[0]}' lives on points: its geometry, times and parameters are drawn, and its files are .npz",
            hint="leave out --resolution, --frames, --parameter and --range",
        )
    num_processes = processes if processes is not None else usable_cores()
    with ProgressLine(quiet=json) as line:
        facts = [
            generate_points(
                task,
                Path(out),
                trajectories=counts,
                seed=seed,
                num_processes=num_processes,
                overwrite=overwrite,
                on_progress=lambda done, total, task: line.count(task, done, total, "trajectories"),
            )
            for task in on_points
        ]
        results = run(
            requests,
            Path(out),
            num_processes=num_processes,
            overwrite=overwrite,
            on_progress=lambda done, total, task: line.count(task, done, total, "chunks"),
        )
    if json:
        report(
            facts
            + [
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
        numbers = "+".join(map(str, request.trajectories))
        state = f"{r.path} (was there)" if r.kept else str(r.path)
        rows.append((request.task, numbers, str(request.num_frames), grid, f"{r.num_bytes / 1e6:.1f} MB", state))
    numbers = "+".join(map(str, counts))
    for fact in facts:
        state = f"{fact['path']} (was there)" if fact["kept"] else fact["path"]
        rows.append((fact["task"], numbers, "", "points", f"{fact['bytes'] / 1e6:.1f} MB", state))
    say(table(rows))


def _requests(
    tasks: list[str],
    trajectories: tuple[int, int, int],
    resolution: int | None,
    frames: int | None,
    seed: int,
    parameter: list[str],
    ranges: list[str],
) -> list[Request]:
    from ups.solvers.request import make_request
    from ups.solvers.tasks import BENCH_TASKS

    names = list(BENCH_TASKS) if "all" in tasks else list(dict.fromkeys(tasks))
    fixed = _assigned("--parameter", parameter, 1, "a name and a number", "nu=0.01")
    drawn = _assigned("--range", ranges, 2, "a range", "nu=0.1:0.2")
    return [
        make_request(
            name,
            trajectories=trajectories,
            resolution=resolution,
            num_frames=frames,
            seed=seed,
            fixed={one: values[0] for one, values in fixed.items()},
            ranges={one: (low, high) for one, (low, high) in drawn.items()},
        )
        for name in names
    ]


def _assigned(option: str, texts: list[str], count: int, words: str, example: str) -> dict[str, tuple[float, ...]]:
    """Name -> the `count` numbers of each NAME=NUMBER:NUMBER."""
    assigned = {}
    for text in texts:
        name, _, values = text.partition("=")
        try:
            numbers = tuple(float(part) for part in values.split(":"))
        except ValueError:
            numbers = ()
        if len(numbers) != count:
            raise ConfigError(f"{option} {text}: that is not {words}", hint=f"for example {example}")
        assigned[name.strip()] = numbers
    return assigned


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


app = new_app("Generate, fetch, import, inspect, validate or pack data; keep latents of it.")
app.command(short_help="Make benchmark data with reference solvers.")(generate)
app.command(short_help="Fetch a data set of PDEBench or The Well.")(fetch)
app.command(name="import", short_help="Make a store of data of your own.")(import_data)
app.command(short_help="Keep latents of a frozen encoder.")(cache)

PathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH",
        help="A store (.zarr), a data set of The Well, or one or more files of one task (PDEBench, arrays with a "
        "task.yaml, or what an installed package reads).",
    ),
]
ProblemOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Problem of PDEBench that the files hold, where they do not say so."),
]
TaskOption = Annotated[
    Path | None,
    typer.Option(metavar="TASK.yaml", help="What the arrays mean; default the task.yaml next to them."),
]
FormatOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Which reader opens PATH: store, pdebench, the_well, or one of an installed package; auto looks at it.",
    ),
]


@app.command(short_help="Say what is in it, and draw it.")
def inspect(
    paths: PathsArgument,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw it (png, pdf or svg).")] = None,
    split: Annotated[str, typer.Option(help="Which split the picture shows.")] = "train",
    problem: ProblemOption = None,
    task: TaskOption = None,
    format: FormatOption = "auto",
    json: JsonOption = False,
) -> None:
    """Print a card: shapes, units, ranges, size, time step, boundaries, parameters, splits, identity."""
    from ups.data.inspect import card_lines, make_card
    from ups.data.open import open_paths

    reader = open_paths(paths, problem=problem, format=format, description=task)
    card = make_card(reader, paths, format=format)
    if picture is not None:
        from ups.data.inspect import draw

        card["picture"] = str(draw(reader, picture, split=split))
    if json:
        report(card)
        return
    rows = card_lines(card)
    if picture is not None:
        rows.append(("picture", str(picture)))
    say(table(rows))


@app.command(short_help="Read everything and name what is wrong.")
def validate(
    paths: PathsArgument,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="KIND", help="A kind of finding that is right for this data; may be given many times."),
    ] = None,
    drift_tolerance: Annotated[
        float, typer.Option(help="Largest drift of a conserved integral, relative to the field's size.")
    ] = 1e-3,
    quick: Annotated[bool, typer.Option("--quick", help="Do not hash every byte of a store.")] = False,
    problem: ProblemOption = None,
    task: TaskOption = None,
    format: FormatOption = "auto",
    json: JsonOption = False,
) -> None:
    """Read everything once and name what is wrong, with file, trajectory and frame; exit code 4 if there is something.

    Kinds: unreadable, damaged, not_finite, constant_frame, repeated_frame, duplicate, leakage, not_conserved,
    negative, divergence, boundary_value.
    """
    from ups.data.validate import KINDS, validate_paths

    for kind in allow or []:
        if kind not in KINDS:
            raise ConfigError(f"'{kind}' is not a kind of finding", hint=f"kinds are {', '.join(KINDS)}")
    with ProgressLine(quiet=json) as line:
        validation = validate_paths(
            paths,
            allow=allow or (),
            drift_tolerance=drift_tolerance,
            deep=not quick,
            progress=lambda done, total: line.count("validating", done, total, "trajectories"),
            problem=problem,
            format=format,
            description=task,
        )
    if json:
        report(validation.to_json())
    else:
        for finding in validation.findings:
            frame = f" frame {finding.frame}" if finding.frame >= 0 else ""
            say(f"{styled(finding.kind, 'red')}: {finding.where}{frame}: {finding.message}")
        hidden = validation.num_findings - len(validation.findings)
        if hidden:
            say(f"... and {hidden} more")
        for text in validation.assumptions:
            say(f"assumed: {text}")
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(validation.counts.items())) or "nothing wrong"
        say(f"{validation.num_trajectories} trajectories read: {counts}")
    if validation.num_findings:
        raise typer.Exit(DataError.exit_code)


@app.command(short_help="Convert to a store; thin or compress it.")
def pack(
    paths: PathsArgument,
    output: StoreOption,
    first_frame: Annotated[int, typer.Option(min=0, help="Leave out the frames before this one.")] = 0,
    time_stride: Annotated[int, typer.Option(min=1, help="Keep every n-th frame.")] = 1,
    space_stride: Annotated[int, typer.Option(min=1, help="Keep every n-th point along each axis.")] = 1,
    antialias: Annotated[bool, typer.Option("--antialias", help="Average over cells instead of picking.")] = False,
    valid_fraction: ValidOption = 0.1,
    test_fraction: TestOption = 0.1,
    compress: CompressOption = False,
    overwrite: OverwriteOption = False,
    problem: ProblemOption = None,
    task: TaskOption = None,
    format: FormatOption = "auto",
    json: JsonOption = False,
) -> None:
    """Convert files of any format that ups reads to a store; also thins or compresses a store."""
    from ups.data.open import open_paths
    from ups.formats.base import Subsampling

    check_fractions(valid_fraction, test_fraction)
    reader = open_paths(
        paths,
        Subsampling(time_stride, space_stride, antialias, first_frame),
        valid_fraction=valid_fraction,
        test_fraction=test_fraction,
        problem=problem,
        format=format,
        description=task,
    )
    names = [Path(p).name for p in paths]
    write_store(reader, output, names, "packing", compress=compress, overwrite=overwrite, json=json)
