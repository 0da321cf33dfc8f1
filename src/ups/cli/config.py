"""`ups config` and `ups init`: recipes shown, checked, compared and written, without running anything."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.options import JsonOption, PluginOption, RecipeArgument, SetOption, new_app
from ups.cli.output import report, say, styled, table
from ups.config.identity import changes_between
from ups.config.json_schema import recipe_schema
from ups.config.recipe import plain_data, recipe_file, resolve
from ups.config.yaml_subset import ABSENT, shown_value

if TYPE_CHECKING:
    from ups.formats.base import GridReader

app = new_app("Show, check and compare recipes, without running anything.")


@app.command()
def show(recipe: RecipeArgument, set: SetOption = [], plugin: PluginOption = [], json: JsonOption = False) -> None:  # noqa: B006
    """Print a recipe in full.

    Includes and overrides are applied and defaults written out: exactly what a run would use.
    """
    resolved = resolve(recipe_file(recipe), set)
    if json:
        report({"hash": resolved.hash, "files": resolved.files, "recipe": plain_data(resolved.recipe)})
    else:
        say(resolved.text.rstrip("\n"))


@app.command()
def check(recipe: RecipeArgument, set: SetOption = [], plugin: PluginOption = [], json: JsonOption = False) -> None:  # noqa: B006
    """Check a recipe.

    One line if it is sound; else each mistake with its place, its value and what is expected.
    """
    resolved = resolve(recipe_file(recipe), set)
    tasks = [task.name for task in resolved.recipe.data.tasks]
    stages = [
        f"{stage.type} " + (f"{stage.steps} steps" if stage.steps is not None else f"{stage.budget_seconds:g} s")
        for stage in resolved.recipe.stages
    ]
    if json:
        report(
            {"ok": True, "name": resolved.recipe.run.name, "hash": resolved.hash, "tasks": tasks, "stages": stages}
            | {"files": resolved.files}
        )
        return
    say(
        f"{styled('ok', 'bold', 'green')} {resolved.recipe.run.name} (hash {resolved.hash[:12]}): "
        f"{_count(tasks, 'task')}, {_count(stages, 'stage')}"
    )


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes.

    With it an editor completes and underlines: save it, and put '# yaml-language-server: $schema=PATH' on the first
    line of a recipe.
    """
    report(recipe_schema())


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A recipe file, or a run directory.")],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.")],
    json: JsonOption = False,
) -> None:
    """Print the fields in which two recipes differ.

    Both are resolved first, so a default that is written out is no difference.
    """
    first, second = (resolve(recipe_file(path), []) for path in (a, b))
    changes = changes_between(plain_data(first.recipe), plain_data(second.recipe))
    if json:
        rows = [
            {"field": field} | {side: value for side, value in (("a", old), ("b", new)) if value is not ABSENT}
            for field, old, new in changes
        ]
        report({"a": first.hash, "b": second.hash, "changes": rows})
        return
    for field, old, new in changes:
        say(f"{styled(field, 'cyan')}: {styled(shown_value(old), 'red')} -> {styled(shown_value(new), 'green')}")
    if not changes:
        say(f"no difference (hash {first.hash[:12]})")


def _count(items: list[str], word: str) -> str:
    shown = items if len(items) <= 6 else [*items[:5], f"{len(items) - 5} more"]
    return f"{len(items)} {word}{'s' if len(items) != 1 else ''} ({', '.join(shown)})"


init_app = new_app()


@init_app.command()
def init(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Where recipe.yaml and task.yaml are written.")],
    data: Annotated[
        list[str],
        typer.Option(
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
    from ups.formats.set_aside import level_words
    from ups.library.own_data import init_run

    started = init_run(directory, data, [name.strip() for name in dims.split(",")] if dims else ())
    reader, guess = started.reader, started.guess
    written = [str(started.recipe), *([str(started.description)] if guess is not None else [])]
    rows = [] if guess is None else guess_lines(guess)
    notes = [] if guess is None else guess.notes
    if json:
        facts = {"written": written, "task": reader.task.to_json(), "splits": dict(reader.splits)}
        guesses = [{"field": field, "value": value, "why": why} for field, value, why in rows]
        report(facts | {"frames": reader.num_frames, "guesses": guesses, "notes": notes, "start": started.start})
        return
    counts = ", ".join(f"{count} {split}" for split, count in reader.splits.items())
    grid = " x ".join(map(str, reader.space))
    say(f"{reader.task.name}: {counts} trajectories of {_frames(reader)} frames on {grid} points")
    say(level_words(reader.splits.get("calibration", 0)))
    if rows:
        say(table([(field, f"{value}  {_mark(why)}" if value else _mark(why)) for field, value, why in rows]))
    for text in notes:
        say(f"note: {text}")
    if guess is None and started.description is not None:
        say(f"described by {started.description}")
    if started.start:
        say(f"training starts from {started.start}; to train from scratch, remove start_from and start_task")
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
