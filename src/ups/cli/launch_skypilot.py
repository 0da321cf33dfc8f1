"""`ups launch skypilot`: a run on machines that SkyPilot rents (work: ups.launch.skypilot)."""

from __future__ import annotations

from typing import Annotated

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
from ups.cli.output import report, say


def skypilot(
    recipe: RecipeArgument,
    max_price: MaxPriceOption,
    max_hours: MaxHoursOption,
    install: InstallOption,
    gpus: Annotated[str, typer.Option("--gpus", metavar="KIND:COUNT", help="GPUs of a host, such as A100:8.")] = "",
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=10_000, help="Hosts.")] = 1,
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", min=1, max=1024, help="Ranks of a host; default one for each GPU, else 1."),
    ] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Machines that may be taken away; the run goes on on others.")
    ] = False,
    infra: Annotated[
        str, typer.Option("--infra", metavar="WHERE", help="Such as aws/us-east-1; default anywhere.")
    ] = "",
    volume: Annotated[
        str,
        typer.Option(
            "--volume", metavar="NAME", help="A volume that all hosts write, with the data; for several hosts."
        ),
    ] = "",
    disk: Annotated[int, typer.Option("--disk", min=10, max=65_536, metavar="GB", help="Disk of a host.")] = 100,
    mirror: MirrorOption = "",
    data: DataOption = [],  # noqa: B006 - typer copies it
    secret: SecretOption = [],  # noqa: B006 - typer copies it
    env: EnvOption = [],  # noqa: B006 - typer copies it
    sky: Annotated[
        str, typer.Option("--sky", metavar="PROGRAM", help="SkyPilot, in an environment of its own.")
    ] = "sky",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the task, and submit nothing.")] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Submit a run to SkyPilot as a managed job, below a price and for so many hours at most.

    One host does what `ups run` does, several do what `ups train` does. The task is RUN/launch/skypilot.yaml.
    """
    from ups.launch.skypilot import TASK_NAME, SkyPilotJob, command, submit, task, text
    from ups.record.run_dir import RunDir
    from ups.record.text import path_text

    machine, run_dir, cpus = rented_job(
        recipe,
        set,
        install=install,
        max_price=max_price,
        max_hours=max_hours,
        mirror=mirror,
        data=data,
        secrets=secret,
        variables=env,
        hosts=nodes,
        gpus=gpus,
        ranks=ranks_per_node,
        has_data=bool(volume),
    )
    job = SkyPilotJob(machine, run_dir, nodes, cpus, gpus, spot, infra, volume, disk)
    path = RunDir(run_dir).launch / TASK_NAME
    if dry_run:
        report({"task": task(job), "command": command(sky, job, path)}) if json else say(text(job).rstrip("\n"))
        return
    said = submit(job, sky)
    if json:
        report({"job": job.name, "task": str(path), "results": machine.results, "said": said})
        return
    say(f"submitted {job.name}: {path_text(path)}")
    if said:
        say(f"SkyPilot says: {said}")
    say(f"look at it with: {sky} jobs queue; {sky} jobs logs --name {job.name}")
