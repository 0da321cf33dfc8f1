"""`ups data`: look at data, prove that it is sane, bring it into the store.

Generating is in `data_generate`, published data sets in `data_fetch`, data of one's own in `data_import`, latents
in `data_cache`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ups.cli.data_cache import cache
from ups.cli.data_fetch import fetch
from ups.cli.data_generate import generate
from ups.cli.data_import import import_data
from ups.cli.new_store import check_fractions, write_store
from ups.cli.options import JsonOption, new_app
from ups.cli.output import report, say, styled, table

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
        show_default=False,
    ),
]
ProblemOption = Annotated[
    str | None,
    typer.Option(
        "--problem", metavar="NAME", help="Problem of PDEBench that the files hold, where they do not say so."
    ),
]
TaskOption = Annotated[
    Path | None,
    typer.Option("--task", metavar="TASK.yaml", help="What the arrays mean; default the task.yaml next to them."),
]
FormatOption = Annotated[
    str,
    typer.Option(
        "--format",
        metavar="NAME",
        help="Which reader opens PATH: store, pdebench, the_well, or one of an installed package; auto looks at it.",
    ),
]


@app.command(short_help="Say what is in it, and draw it.")
def inspect(
    paths: PathsArgument,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="Also draw it (png, pdf or svg).")
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Which split the picture shows.")] = "train",
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
        typer.Option(
            "--allow", metavar="KIND", help="A kind of finding that is right for this data; may be given many times."
        ),
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
    from ups.errors import ConfigError, DataError
    from ups.run.progress_line import ProgressLine

    for kind in allow or []:
        if kind not in KINDS:
            raise ConfigError(f"'{kind}' is not a kind of finding", hint=f"kinds are {', '.join(KINDS)}")
    with ProgressLine(quiet=json) as line:
        found = validate_paths(
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
        report(found.to_json())
    else:
        for finding in found.findings:
            frame = f" frame {finding.frame}" if finding.frame >= 0 else ""
            say(f"{styled(finding.kind, 'red')}: {finding.where}{frame}: {finding.message}")
        hidden = found.num_findings - len(found.findings)
        if hidden:
            say(f"... and {hidden} more")
        for text in found.assumptions:
            say(f"assumed: {text}")
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(found.counts.items())) or "nothing wrong"
        say(f"{found.num_trajectories} trajectories read: {counts}")
    if found.num_findings:
        raise typer.Exit(DataError.exit_code)


@app.command(short_help="Convert to a store; thin or compress it.")
def pack(
    paths: PathsArgument,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.zarr", help="The new store.")],
    first_frame: Annotated[int, typer.Option(min=0, help="Leave out the frames before this one.")] = 0,
    time_stride: Annotated[int, typer.Option(min=1, help="Keep every n-th frame.")] = 1,
    space_stride: Annotated[int, typer.Option(min=1, help="Keep every n-th point along each axis.")] = 1,
    antialias: Annotated[bool, typer.Option("--antialias", help="Average over cells instead of picking.")] = False,
    valid_fraction: Annotated[float, typer.Option(min=0, max=0.9, help="Part for validation.")] = 0.1,
    test_fraction: Annotated[
        float, typer.Option(min=0, max=0.9, help="Part for the test; at least 6 of 24 or more.")
    ] = 0.1,
    compress: Annotated[bool, typer.Option("--compress", help="Smaller with zstd, but slower to read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a store of that name.")] = False,
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
