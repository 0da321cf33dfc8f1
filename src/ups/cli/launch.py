"""`ups launch`: starts runs by a scheduler (Slurm, Kubernetes), or on rented machines (SkyPilot, Vast)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.options import JsonOption, OverOption, RecipeArgument, SetOption, new_app
from ups.cli.output import note, report, say
from ups.config.recipe import dump_brief_recipe, recipe_file, resolve
from ups.config.sweep import axes_of
from ups.errors import ConfigError
from ups.launch.job import RentedJob, num_gpus, require_data, secret_names
from ups.launch.kubernetes import KubernetesJob, manifests, not_in_pods, text
from ups.launch.slurm import SlurmJob, script, submit
from ups.launch.vast import copy_words, create_words, onstart, search_words, watch
from ups.launch.vast import job as job_script
from ups.launch.vast_client import VastClient
from ups.library.sweep import Sweep
from ups.record.processes import module_command
from ups.record.run_dir import RunDir
from ups.record.text import path_text
from ups.run.directory import check_ranks, run_dir_of

if TYPE_CHECKING:
    from ups.config.schema import Recipe
    from ups.launch.vast import VastJob


def skypilot(
    recipe: RecipeArgument,
    max_price: MaxPriceOption,
    max_hours: MaxHoursOption,
    install: InstallOption,
    gpus: Annotated[str, typer.Option(metavar="KIND:COUNT", help="GPUs of a host, such as A100:8.")] = "",
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="Hosts.")] = 1,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Ranks of a host; default one for each GPU, else 1.")
    ] = None,
    spot: Annotated[
        bool, typer.Option("--spot", help="Machines that may be taken away; the run continues on others.")
    ] = False,
    infra: Annotated[str, typer.Option(metavar="WHERE", help="Such as aws/us-east-1; default anywhere.")] = "",
    volume: Annotated[
        str, typer.Option(metavar="NAME", help="A volume that all hosts write, with the data; for several hosts.")
    ] = "",
    disk: Annotated[int, typer.Option(min=10, max=65_536, metavar="GB", help="Disk of a host.")] = 100,
    mirror: MirrorOption = "",
    data: DataOption = [],  # noqa: B006 - typer copies it
    secret: SecretOption = [],  # noqa: B006 - typer copies it
    env: EnvOption = [],  # noqa: B006 - typer copies it
    sky: Annotated[str, typer.Option(metavar="PROGRAM", help="SkyPilot, in an environment of its own.")] = "sky",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the task, and submit nothing.")] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Submit a run to SkyPilot as a managed job, below a price and for so many hours at most.

    One host does what `ups run` does, several do what `ups train` does. The task is RUN/launch/skypilot.yaml.
    """
    from ups.launch.skypilot import TASK_NAME, SkyPilotJob, command, submit, task, text

    settings = {"install": install, "max_price": max_price, "max_hours": max_hours, "mirror": mirror, "variables": env}
    machine, run_dir, cpus = rented_job(
        recipe, set, data, secret, settings, hosts=nodes, gpus=gpus, ranks=ranks_per_node, has_data=bool(volume)
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


def vast(
    recipe: RecipeArgument,
    max_price: MaxPriceOption,
    max_hours: MaxHoursOption,
    install: InstallOption,
    gpus: Annotated[str, typer.Option(metavar="KIND:COUNT", help="In Vast's names, such as RTX_4090:1.")],
    image: Annotated[str, typer.Option(metavar="IMAGE", help="A Docker image with Python and torch.")],
    mirror: MirrorOption,
    ranks: Annotated[int | None, typer.Option(min=1, max=1024, help="Default one for each GPU.")] = None,
    disk: Annotated[int, typer.Option(min=10, max=65_536, metavar="GB", help="Disk of the machine.")] = 50,
    data: DataOption = [],  # noqa: B006 - typer copies it
    secret: SecretOption = [],  # noqa: B006 - typer copies it
    env: EnvOption = [],  # noqa: B006 - typer copies it
    vastai: Annotated[
        str, typer.Option(metavar="PROGRAM", help="Vast's client, in an environment of its own.")
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

    settings = {"install": install, "max_price": max_price, "max_hours": max_hours, "mirror": mirror, "variables": env}
    machine, run_dir, _ = rented_job(recipe, set, data, secret, settings, hosts=1, gpus=gpus, ranks=ranks)
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


MaxPriceOption = Annotated[
    float, typer.Option(metavar="DOLLARS", help="Most that all hosts together may cost in an hour.")
]
MaxHoursOption = Annotated[
    float, typer.Option(metavar="HOURS", help="From now on; then the run has saved and the machine is gone.")
]
InstallOption = Annotated[
    str, typer.Option(metavar="WHAT", help="What pip installs there: a wheel or a repository of ups, by address.")
]
MirrorOption = Annotated[
    str, typer.Option(metavar="URL", help="Bucket for checkpoints and results: s3://bucket/prefix.")
]
DataOption = Annotated[
    list[str],
    typer.Option(
        metavar="PATH=URL",
        help="A path of the recipe and the bucket that holds it; a URL that ends in / is a directory. May be given "
        "many times.",
    ),
]
SecretOption = Annotated[
    list[str],
    typer.Option(
        metavar="NAME",
        help="Name of a variable with a secret, such as AWS_SECRET_ACCESS_KEY; the value is not asked for. May be "
        "given many times.",
    ),
]
EnvOption = Annotated[
    list[str], typer.Option(metavar="NAME=VALUE", help="A variable that is no secret. May be given many times.")
]


def share(recipe: Recipe, hosts: int, gpus: int, ranks: int | None) -> tuple[int, int]:
    """Ranks and processors of one host. Raises ConfigError if a block cannot be cut evenly over all ranks."""
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
    data: list[str],
    secrets: list[str],
    settings: dict[str, Any],
    *,
    hosts: int,
    gpus: str,
    ranks: int | None,
    has_data: bool = False,
) -> tuple[RentedJob, Path, int]:
    """The run for a machine that begins empty, its run directory here, and the processors of one host.

    has_data: the data is there already; settings: the rest of a `RentedJob`. Raises ConfigError for what would fail.
    """
    import time

    resolved = resolve(recipe_file(recipe), changes)
    ranks_here, cpus_here = share(resolved.recipe, hosts, num_gpus(gpus), ranks)
    if not has_data:
        require_data(resolved.recipe, data)
    text = dump_brief_recipe(resolved.recipe)
    machine = RentedJob(
        name=resolved.recipe.run.name,
        recipe=text,
        started=time.time(),
        data=data,
        secrets=secret_names(text, secrets),
        ranks=hosts * ranks_here,
        **settings,
    )
    return machine, run_dir_of(resolved, recipe, changes), cpus_here


logger = logging.getLogger(__name__)
app = new_app("Start a run on a cluster, or on rented machines.")


@app.callback()
def launch() -> None:
    """Start a run on a cluster, by its scheduler, or on rented machines."""


@app.command(short_help="Submit a run to Slurm; it is queued again when its time is up.")
def slurm(
    recipe: RecipeArgument,
    time: Annotated[str, typer.Option(metavar="TIME", help="Limit of a job, such as 24:00:00.")],
    nodes: Annotated[int, typer.Option(min=1, max=10_000, help="Hosts.")] = 1,
    gpus_per_node: Annotated[int, typer.Option(min=0, max=64, help="GPUs of a host.")] = 0,
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Ranks of a host; default one for each GPU, else 1.")
    ] = None,
    partition: Annotated[str, typer.Option(metavar="NAME", help="Where the job waits.")] = "",
    account: Annotated[str, typer.Option(metavar="NAME", help="Who pays.")] = "",
    sbatch: Annotated[
        list[str],
        typer.Option(metavar="OPTION", help="Another option of sbatch: --sbatch=--qos=long. May be given many times."),
    ] = [],  # noqa: B006 - typer copies it
    over: OverOption = [],  # noqa: B006 - typer copies it
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, and submit nothing.")] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Submit a run to Slurm; when its time is up it saves, is queued again and continues.

    Script and output are in RUN/launch; `ups status` and `ups why` work on every host that sees the run directory.
    """
    import sys

    # A value that is refused is refused here, and not in a job of tomorrow.
    runs = Sweep(recipe, set, axes_of(over), nodes * (ranks_per_node or gpus_per_node or 1))
    checked, run_dir = runs.recipe, runs.run_dir
    ranks_here, cpus_here = share(checked, nodes, gpus_per_node, ranks_per_node)
    run_dirs = [cell.run_dir for cell in runs.cells] or [run_dir]
    job = SlurmJob(
        name=checked.run.name,
        run_dir=run_dir,
        work_dir=Path.cwd(),
        command=command(sys.executable, recipe, set),
        time=time,
        nodes=nodes,
        ranks_per_node=ranks_here,
        gpus_per_node=gpus_per_node,
        cpus_per_node=cpus_here,
        partition=partition,
        account=account,
        options=sbatch,
        changes=[cell.words for cell in runs.cells] or [[]],
    )
    if dry_run:
        text = script(job)
        report({"script": text, "path": str(job.script_path)}) if json else say(text.rstrip("\n"))
        return
    number = submit(job)
    if json:
        report({"job": number, "script": str(job.script_path), "runs": [str(path) for path in run_dirs]})
        return
    say(f"submitted job {number}: {path_text(job.script_path)}")
    say(f"look at it with: ups status {path_text(run_dirs[0])}; squeue -j {number}")


@app.command(short_help="Write the manifest of a run for kubectl.")
def kubernetes(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="A recipe file, below this directory.")],
    image: Annotated[str, typer.Option(metavar="IMAGE", help="An image with ups in it.")],
    claim: Annotated[
        str, typer.Option(metavar="NAME", help="Volume claim that all pods write, mounted as /work: this directory.")
    ],
    hosts: Annotated[int, typer.Option(min=1, max=10_000, help="Pods, one on a host.")] = 1,
    gpus_per_host: Annotated[int, typer.Option(min=0, max=64, help="GPUs of a pod.")] = 0,
    ranks_per_host: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Ranks of a pod; default one for each GPU, else 1.")
    ] = None,
    memory: Annotated[
        str, typer.Option(metavar="SIZE", help="Memory of a pod, such as 64Gi; default 8Gi for each rank.")
    ] = "",
    secret: Annotated[str, typer.Option(metavar="NAME", help="A Secret whose keys become variables of the pods.")] = "",
    env: EnvOption = [],  # noqa: B006 - typer copies it
    namespace: Annotated[str, typer.Option(metavar="NAME", help="Where it runs.")] = "",
    node_label: Annotated[list[str], typer.Option(metavar="KEY=VALUE", help="A label of the nodes. Repeatable.")] = [],  # noqa: B006 - typer copies it
    toleration: Annotated[
        list[str], typer.Option(metavar="KEY[=VALUE][:EFFECT]", help="A tolerated taint. Repeatable.")
    ] = [],  # noqa: B006 - typer copies it
    priority: Annotated[str, typer.Option(metavar="NAME", help="A PriorityClass.")] = "",
    queue: Annotated[str, typer.Option(metavar="NAME", help="A queue of Kueue.")] = "",
    jobset: Annotated[
        bool, typer.Option("--jobset", help="A JobSet, which restarts all pods together; the cluster must have JobSet.")
    ] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Write the manifest of a run for Kubernetes: ups launch kubernetes ... | kubectl apply -f -

    This directory is what the pods see as /work: recipe, data and runs are named relative to it.
    """
    import os

    resolved = resolve(recipe_file(recipe), set)
    checked = resolved.recipe
    if not Path(recipe).resolve().is_relative_to(Path.cwd().resolve()):
        raise ConfigError(
            f"{recipe} is not below this directory, which is all that the pods see",
            hint="do this in the directory that the claim holds, and keep the recipe there",
        )
    ranks_here, cpus_here = share(checked, hosts, gpus_per_host, ranks_per_host)
    job = KubernetesJob(
        name=checked.run.name.lower().replace("_", "-"),
        image=image,
        claim=claim,
        command=command("python", os.path.relpath(recipe), set),
        hosts=hosts,
        ranks_per_host=ranks_here,
        gpus_per_host=gpus_per_host,
        cpus_per_host=cpus_here,
        memory=memory,
        secret=secret,
        namespace=namespace,
        jobset=jobset,
        variables=env,
        node_labels=node_label,
        tolerations=toleration,
        priority=priority,
        queue=queue,
    )
    for problem in not_in_pods(resolved, secret):
        logger.warning(problem)
    if json:
        report(manifests(job))
    else:
        say(text(job).rstrip("\n"))


app.command(short_help="Submit a run to SkyPilot, below a price and for so many hours.")(skypilot)
app.command(short_help="Rent a machine at Vast for a run, and destroy it.")(vast)
