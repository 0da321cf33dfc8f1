"""`ups finetune BUNDLE DATA`: train the model of a bundle further, on data of one's own."""

from __future__ import annotations

from typing import Annotated

import typer

from ups.cli.options import JsonOption, SetOption, new_app

app = new_app()


@app.command()
def finetune(
    bundle: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help="A bundle, or a run that has one.")],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A store or a file, as `ups data inspect` reads it.")],
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Time to train.", min=0.001)] = 300.0,
    name: Annotated[str | None, typer.Option(help="Name of the run; default TASK-finetuned.")] = None,
    task: Annotated[
        str | None, typer.Option(help="What to call the data; default as the task of the bundle that it fits.")
    ] = None,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=100_000, help="Processes that train together.")] = 1,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Train the model of a bundle on DATA, from its weights, and leave a bundle of the new model.

    The recipe is that of the bundle with your data, one stage and half the learning rate; --set changes any of its
    fields, and runs/NAME/config.yaml shows it. The same command continues an interrupted run.
    """
    from ups.cli.train import start
    from ups.library.finetune import resolve_finetuning
    from ups.run.directory import run_dir_of

    changes = [*([f"run.name={name}"] if name else []), *set]
    resolved = resolve_finetuning(bundle, data, task, budget, changes)
    raise typer.Exit(start(resolved, run_dir_of(resolved, "", changes), ranks, json=json))
