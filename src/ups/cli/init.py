"""`ups init DIR --data FILE`: a recipe for data of one's own, and what was guessed about it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.options import JsonOption, new_app
from ups.cli.output import report, say, styled, table

if TYPE_CHECKING:
    from ups.formats.base import GridReader

app = new_app()


@app.command()
def init(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where recipe.yaml and task.yaml are written.")],
    data: Annotated[
        list[str],
        typer.Option(
            "--data",
            metavar="FILE",
            help="NumPy, HDF5, MATLAB 7.3, NetCDF or Zarr; a folder or a pattern of them; "
            "may be given many times, or a store.",
        ),
    ],
    dims: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="What each dimension of the main array is, such as x,time,trajectory, if the guess is wrong; "
            "the rest is guessed from it.",
        ),
    ] = None,
    json: JsonOption = False,
) -> None:
    """Look at a file of yours, guess what its arrays mean, and write a recipe and a task.yaml to train on it.

    What is a guess is marked, with its reason; an equation is never guessed.
    """
    from ups.data.guess import guess_lines
    from ups.library.own_data import init_run

    started = init_run(directory, data, [name.strip() for name in dims.split(",")] if dims else ())
    reader, guess = started.reader, started.guess
    written = [str(started.recipe), *([str(started.description)] if guess is not None else [])]
    rows = [] if guess is None else guess_lines(guess)
    notes = [] if guess is None else guess.notes
    if json:
        facts = {"written": written, "task": reader.task.to_json(), "splits": dict(reader.splits)}
        guesses = [{"field": field, "value": value, "why": why} for field, value, why in rows]
        report(facts | {"frames": reader.num_frames, "guesses": guesses, "notes": notes})
        return
    counts = ", ".join(f"{count} {split}" for split, count in reader.splits.items())
    grid = " x ".join(map(str, reader.space))
    say(f"{reader.task.name}: {counts} trajectories of {_frames(reader)} frames on {grid} points")
    if rows:
        say(table([(field, f"{value}  {_mark(why)}" if value else _mark(why)) for field, value, why in rows]))
    for text in notes:
        say(f"note: {text}")
    if guess is None and started.description is not None:
        say(f"described by {started.description}")
    for name in written:
        say(f"wrote {name}")
    recipe = shlex.quote(str(started.recipe))
    if guess is not None and guess.num_not_finite:
        say(f"training refuses values that are not finite: ups data validate {data[0]} --task {started.description}")
    elif guess is not None and guess.uncertain:
        say(f"look at the lines marked 'check' in {started.description}, then: ups train {recipe}")
    else:
        say(f"next: ups train {recipe}")


def _frames(reader: GridReader) -> str:
    """How many frames trajectories have."""
    counts = [reader.frames_in(split, i) for split, number in reader.splits.items() for i in range(number)]
    low, high = (min(counts), max(counts)) if counts else (0, 0)
    return f"{low} to {high}" if low < high else f"{high or 1}"


def _mark(why: str) -> str:
    head, colon, rest = why.partition(": ")
    if not colon or head not in ("guess", "check"):
        return f"({why})"
    return f"({styled(head, 'bold', 'yellow' if head == 'check' else 'cyan')}: {rest})"
