"""Options and arguments that several commands share, so that they read the same everywhere."""

from __future__ import annotations

from typing import Annotated

import typer

BUNDLE_HELP = "A bundle, a run that has one, or the name of a shipped model (ups models)."
RecipeArgument = Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, or a run directory.")]
SetOption = Annotated[
    list[str],
    typer.Option(
        metavar="FIELD=VALUE",
        help="Change a field, as if the recipe had been edited: engine.precision=bfloat16, stages.0.steps=100. "
        "May be given many times.",
    ),
]
OverOption = Annotated[
    list[str],
    typer.Option(
        metavar="FIELD=[VALUE, ...]",
        help="A run for each value of a YAML list: 'run.seed=[0, 1, 2]'. Fields that change together: 'A,B=[[1, 2], "
        "[3, 4]]'. Given twice: a run for each combination.",
    ),
]


def _use_scripts(paths: list[str]) -> list[str]:
    from ups.registry import use_script

    for path in paths:
        use_script(path)
    return paths


PluginOption = Annotated[
    list[str],
    typer.Option(
        metavar="FILE.py",
        help="Run this script first, which registers models, losses, metrics or other parts. May be given many times.",
        callback=_use_scripts,
        is_eager=True,
    ),
]
RanksOption = Annotated[int, typer.Option(min=1, max=100_000, help="Processes that train together.")]
OnlyTasksOption = Annotated[list[str], typer.Option(metavar="NAME", help="Only this task; may be given many times.")]
StartFrameOption = Annotated[int | None, typer.Option(help="Last given frame; default the earliest possible.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def new_app(help: str = "", *, completion: bool = False) -> typer.Typer:
    """A typer application in the house style: plain help (fast to show), errors left to `ups.cli.main`."""
    return typer.Typer(
        help=help,
        rich_markup_mode=None,
        add_completion=completion,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
