"""What the commands of `ups launch` share: options, the ranks of a host, and a run for a machine that begins empty."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.record.processes import module_command

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.launch.job import RentedJob

MaxPriceOption = Annotated[
    float, typer.Option("--max-price", metavar="DOLLARS", help="Most that all hosts together may cost in an hour.")
]
MaxHoursOption = Annotated[
    float,
    typer.Option("--max-hours", metavar="HOURS", help="From now on; then the run has saved and the machine is gone."),
]
InstallOption = Annotated[
    str,
    typer.Option(
        "--install", metavar="WHAT", help="What pip installs there: a wheel or a repository of ups, by address."
    ),
]
MirrorOption = Annotated[
    str,
    typer.Option(
        "--mirror", metavar="URL", help="Bucket for checkpoints and results: s3://bucket/prefix.", show_default=False
    ),
]
DataOption = Annotated[
    list[str],
    typer.Option(
        "--data",
        metavar="PATH=URL",
        help="A path of the recipe and the bucket that holds it; a URL that ends in / is a directory. May be given "
        "many times.",
        show_default=False,
    ),
]
SecretOption = Annotated[
    list[str],
    typer.Option(
        "--secret",
        metavar="NAME",
        help="Name of a variable with a secret, such as AWS_SECRET_ACCESS_KEY; the value is not asked for. May be "
        "given many times.",
        show_default=False,
    ),
]
EnvOption = Annotated[
    list[str],
    typer.Option(
        "--env", metavar="NAME=VALUE", help="A variable that is no secret. May be given many times.", show_default=False
    ),
]


def share(recipe: Recipe, hosts: int, gpus: int, ranks: int | None) -> tuple[int, int]:
    """Ranks and processors of one host. Raises ConfigError if a block cannot be cut evenly over all ranks."""
    from ups.run.directory import check_ranks

    ranks_here = ranks or gpus or 1
    check_ranks(recipe, hosts * ranks_here)
    # A rank and its readers; the supervisor takes next to nothing.
    return ranks_here, ranks_here * (1 + recipe.data.loader.workers)


def command(python: str, recipe: str, changes: list[str]) -> list[str]:
    """`ups train` without what depends on hosts."""
    words = [word for change in changes for word in ("--set", change)]
    return module_command("ups", "train", recipe, *words, python=python)


def rented_job(
    recipe: str,
    changes: list[str],
    *,
    install: str,
    max_price: float,
    max_hours: float,
    mirror: str,
    data: list[str],
    secrets: list[str],
    variables: list[str],
    hosts: int,
    gpus: str,
    ranks: int | None,
    has_data: bool = False,
) -> tuple[RentedJob, Path, int]:
    """The run for a machine that begins empty, its run directory here, and the processors of one host.

    has_data: the data is there already. Raises ConfigError for what would fail there.
    """
    import time

    from ups.config.recipe import dump_brief_recipe, recipe_file, resolve
    from ups.launch.job import RentedJob, num_gpus, require_data, secret_names
    from ups.run.directory import run_dir_of

    resolved = resolve(recipe_file(recipe), changes)
    ranks_here, cpus_here = share(resolved.recipe, hosts, num_gpus(gpus), ranks)
    if not has_data:
        require_data(resolved.recipe, data)
    text = dump_brief_recipe(resolved.recipe)
    machine = RentedJob(
        name=resolved.recipe.run.name,
        recipe=text,
        install=install,
        max_price=max_price,
        max_hours=max_hours,
        started=time.time(),
        mirror=mirror,
        data=data,
        secrets=secret_names(text, secrets),
        variables=variables,
        ranks=hosts * ranks_here,
    )
    return machine, run_dir_of(resolved, recipe, changes), cpus_here
