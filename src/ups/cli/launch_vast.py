"""`ups launch vast`: a run on one machine that is rented at Vast and destroyed afterwards (work: ups.launch.vast)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.launch_options import (
    DataOption,
    EnvOption,
    InstallOption,
    MaxHoursOption,
    MaxPriceOption,
    MirrorOption,
    SecretOption,
    rented_job,
)
from ups.cli.options import JsonOption, RecipeArgument, SetOption
from ups.cli.output import note, report, say

if TYPE_CHECKING:
    from ups.launch.vast import VastJob


def vast(
    recipe: RecipeArgument,
    max_price: MaxPriceOption,
    max_hours: MaxHoursOption,
    install: InstallOption,
    gpus: Annotated[str, typer.Option("--gpus", metavar="KIND:COUNT", help="In Vast's names, such as RTX_4090:1.")],
    image: Annotated[str, typer.Option("--image", metavar="IMAGE", help="A Docker image with Python and torch.")],
    mirror: MirrorOption,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=1, max=1024, help="Default one for each GPU.", show_default=False),
    ] = None,
    disk: Annotated[int, typer.Option("--disk", min=10, max=65_536, metavar="GB", help="Disk of the machine.")] = 50,
    data: DataOption = [],  # noqa: B006 - typer copies it
    secret: SecretOption = [],  # noqa: B006 - typer copies it
    env: EnvOption = [],  # noqa: B006 - typer copies it
    vastai: Annotated[
        str, typer.Option("--vastai", metavar="PROGRAM", help="Vast's client, in an environment of its own.")
    ] = "vastai",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be sent, and rent nothing.")] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Rent the cheapest machine at Vast for a run, watch it, fetch the results and destroy it.

    The machine destroys itself when the run has ended or its hours are over, also if this command was killed. Exit
    code: that of the run, or 12 if the machine may still be there.
    """
    from ups.launch.vast import VastJob, launch
    from ups.launch.vast_client import VastClient
    from ups.record.text import path_text

    machine, run_dir, _ = rented_job(
        recipe,
        set,
        install=install,
        max_price=max_price,
        max_hours=max_hours,
        mirror=mirror,
        data=data,
        secrets=secret,
        variables=env,
        hosts=1,
        gpus=gpus,
        ranks=ranks,
    )
    job = VastJob(machine, run_dir, gpus, image, disk)
    if dry_run:
        _show(job, vastai, json)
        return
    outcome = launch(job, VastClient(vastai), note)
    if json:
        copied = str(outcome.copied) if outcome.copied else None
        report(
            {
                "machine": outcome.number,
                "exit_code": outcome.code,
                "run": copied,
                "mirror": machine.mirror,
                "results": machine.results if outcome.uploaded else None,
            }
        )
    else:
        say(f"the run ended with exit code {outcome.code}; machine {outcome.number} is gone")
        say(f"checkpoints: {machine.mirror}")
        if outcome.uploaded:
            say(f"results: {machine.results}")
        if outcome.copied:
            say(f"look at it with: ups why {path_text(outcome.copied)}")
    raise typer.Exit(outcome.code)


def _show(job: VastJob, program: str, json: bool) -> None:
    """All calls of the client, the start script, and the job that is packed into it."""
    import shlex

    from ups.launch.vast import copy_words, create_words, onstart, search_words, watch
    from ups.launch.vast import job as job_script

    calls = [
        [program, "show", "env-vars", "--raw"],
        [program, *search_words(job), "--raw"],
        [program, *create_words(job, "OFFER"), "--raw"],
        [program, "show", "instance", "ID", "--raw"],
        [program, "logs", "ID", "--tail", "200"],
        [program, *copy_words(job, "ID", job.run_dir)],
        [program, "show", "instances", "--raw"],
        [program, "destroy", "instance", "ID", "--yes", "--raw"],
    ]
    start, watchdog, inside = onstart(job.machine), watch(job.machine), job_script(job.machine)
    if json:
        report({"calls": calls, "onstart": start, "watch": watchdog, "job": inside})
        return
    say("# calls")
    for words in calls:
        say(shlex.join(words))
    say(f"\n# {job.script_path}, the start script of the machine")
    say(start)
    say("# watch.sh, which is packed into it")
    say(watchdog)
    say("# job.sh, which is packed into it")
    say(inside.rstrip("\n"))
