"""`ups config`: look at recipes without running them. The work is in `ups.config`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.options import JsonOption, PluginOption, RecipeArgument, SetOption, new_app
from ups.cli.output import report, say, styled

if TYPE_CHECKING:
    from ups.config.recipe import ResolvedRecipe

app = new_app("Show, check and compare recipes, without running anything.")


@app.command()
def show(recipe: RecipeArgument, set: SetOption = [], plugin: PluginOption = [], json: JsonOption = False) -> None:  # noqa: B006
    """Print a recipe in full.

    Includes and overrides are applied and defaults written out: exactly what a run would use.
    """
    from ups.config.recipe import plain_data

    found = _resolve(recipe, set)
    if json:
        report({"hash": found.hash, "files": found.files, "recipe": plain_data(found.recipe)})
    else:
        say(found.text.rstrip("\n"))


@app.command()
def check(recipe: RecipeArgument, set: SetOption = [], plugin: PluginOption = [], json: JsonOption = False) -> None:  # noqa: B006
    """Check a recipe.

    One line if it is sound; else each mistake with its place, its value and what is expected.
    """
    found = _resolve(recipe, set)
    tasks = [task.name for task in found.recipe.data.tasks]
    stages = [_stage_words(stage) for stage in found.recipe.stages]
    if json:
        report(
            {"ok": True, "name": found.recipe.run.name, "hash": found.hash, "tasks": tasks, "stages": stages}
            | {"files": found.files}
        )
        return
    say(
        f"{styled('ok', 'bold', 'green')} {found.recipe.run.name} (hash {found.hash[:12]}): "
        f"{_count(tasks, 'task')}, {_count(stages, 'stage')}"
    )


@app.command()
def schema() -> None:
    """Print the JSON schema of recipes.

    With it an editor completes and underlines: save it, and put '# yaml-language-server: $schema=PATH' on the first
    line of a recipe.
    """
    from ups.config.json_schema import recipe_schema

    report(recipe_schema())


@app.command()
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A recipe file, or a run directory.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="What to compare it with.", show_default=False)],
    json: JsonOption = False,
) -> None:
    """Print the fields in which two recipes differ.

    Both are resolved first, so a default that is written out is no difference.
    """
    from ups.config.changes import ABSENT, changes_between, shown_value
    from ups.config.recipe import plain_data

    first, second = _resolve(a, []), _resolve(b, [])
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


def _resolve(path: str, overrides: list[str]) -> ResolvedRecipe:
    from ups.config.recipe import recipe_file, resolve

    return resolve(recipe_file(path), overrides)


def _stage_words(stage: Any) -> str:
    length = f"{stage.steps} steps" if stage.steps is not None else f"{stage.budget_seconds:g} s"
    return f"{stage.type} {length}"


def _count(items: list[str], word: str) -> str:
    shown = items if len(items) <= 6 else [*items[:5], f"{len(items) - 5} more"]
    return f"{len(items)} {word}{'s' if len(items) != 1 else ''} ({', '.join(shown)})"
