"""`ups launch`: a run on a cluster, by its scheduler, or on rented machines (work: ups.launch).

Clouds are in `launch_skypilot` and `launch_vast`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from ups.cli.launch_options import EnvOption, command, share
from ups.cli.launch_skypilot import skypilot
from ups.cli.launch_vast import vast
from ups.cli.options import JsonOption, OverOption, RecipeArgument, SetOption, new_app
from ups.cli.output import report, say

logger = logging.getLogger(__name__)
app = new_app("Start a run on a cluster, or on rented machines.")


@app.callback()
def launch() -> None:
    """Start a run on a cluster, by its scheduler, or on rented machines."""


@app.command(short_help="Submit a run to Slurm, which goes on when its time is up.")
def slurm(
    recipe: RecipeArgument,
    time: Annotated[str, typer.Option("--time", metavar="TIME", help="Limit of a job, such as 24:00:00.")],
    nodes: Annotated[int, typer.Option("--nodes", min=1, max=10_000, help="Hosts.")] = 1,
    gpus_per_node: Annotated[int, typer.Option("--gpus-per-node", min=0, max=64, help="GPUs of a host.")] = 0,
    ranks_per_node: Annotated[
        int | None,
        typer.Option("--ranks-per-node", min=1, max=1024, help="Ranks of a host; default one for each GPU, else 1."),
    ] = None,
    partition: Annotated[str, typer.Option("--partition", metavar="NAME", help="Where the job waits.")] = "",
    account: Annotated[str, typer.Option("--account", metavar="NAME", help="Who pays.")] = "",
    sbatch: Annotated[
        list[str],
        typer.Option(
            "--sbatch",
            metavar="OPTION",
            help="Another option of sbatch: --sbatch=--qos=long. May be given many times.",
            show_default=False,
        ),
    ] = [],  # noqa: B006 - typer copies it
    over: OverOption = [],  # noqa: B006 - typer copies it
    sweep: Annotated[
        list[str],
        typer.Option("--sweep", metavar="FIELD=VALUE,...", help="Earlier form of --over.", show_default=False),
    ] = [],  # noqa: B006 - typer copies it
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the script, and submit nothing.")] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Submit a run to Slurm; when its time is up it saves, is queued again and goes on.

    Script and output are in RUN/launch; `ups status` and `ups why` work on every host that sees the run directory.
    """
    import sys

    from ups.config.sweep import axes_of, comma_axes
    from ups.errors import ConfigError
    from ups.launch.slurm import SlurmJob, script, submit
    from ups.library.sweep import Sweep
    from ups.record.text import path_text

    if sweep and over:
        raise ConfigError("--sweep and --over name the runs of a sweep differently", hint="use --over for all fields")
    if sweep:
        logger.warning("--sweep splits values at commas and numbers the runs: use --over 'FIELD=[VALUE, ...]'")
    # A value that is refused is refused here, and not in a job of tomorrow.
    axes = comma_axes(sweep) if sweep else axes_of(over)
    runs = Sweep(recipe, set, axes, nodes * (ranks_per_node or gpus_per_node or 1), numbered=bool(sweep))
    checked, run_dir = runs.recipe, runs.run_dir
    ranks_here, cpus_here = share(checked, nodes, gpus_per_node, ranks_per_node)
    places = [cell.run_dir for cell in runs.cells] or [run_dir]
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
        report({"job": number, "script": str(job.script_path), "runs": [str(path) for path in places]})
        return
    say(f"submitted job {number}: {path_text(job.script_path)}")
    say(f"look at it with: ups status {path_text(places[0])}; squeue -j {number}")


@app.command(short_help="Write the manifest of a run for kubectl.")
def kubernetes(
    recipe: Annotated[
        str,
        typer.Argument(metavar="RECIPE", help="A recipe file, below this directory.", show_default=False),
    ],
    image: Annotated[str, typer.Option("--image", metavar="IMAGE", help="An image with ups in it.")],
    claim: Annotated[
        str,
        typer.Option(
            "--claim", metavar="NAME", help="Volume claim that all pods write, mounted as /work: this directory."
        ),
    ],
    hosts: Annotated[int, typer.Option("--hosts", min=1, max=10_000, help="Pods, one on a host.")] = 1,
    gpus_per_host: Annotated[int, typer.Option("--gpus-per-host", min=0, max=64, help="GPUs of a pod.")] = 0,
    ranks_per_host: Annotated[
        int | None,
        typer.Option("--ranks-per-host", min=1, max=1024, help="Ranks of a pod; default one for each GPU, else 1."),
    ] = None,
    memory: Annotated[
        str, typer.Option("--memory", metavar="SIZE", help="Memory of a pod, such as 64Gi; default 8Gi for each rank.")
    ] = "",
    secret: Annotated[
        str, typer.Option("--secret", metavar="NAME", help="A Secret whose keys become variables of the pods.")
    ] = "",
    env: EnvOption = [],  # noqa: B006 - typer copies it
    namespace: Annotated[str, typer.Option("--namespace", metavar="NAME", help="Where it runs.")] = "",
    node_label: Annotated[
        list[str], typer.Option("--node-label", metavar="KEY=VALUE", help="A label of the nodes. Repeatable.")
    ] = [],  # noqa: B006 - typer copies it
    toleration: Annotated[
        list[str], typer.Option("--toleration", metavar="KEY[=VALUE][:EFFECT]", help="A tolerated taint. Repeatable.")
    ] = [],  # noqa: B006 - typer copies it
    priority: Annotated[str, typer.Option("--priority", metavar="NAME", help="A PriorityClass.")] = "",
    queue: Annotated[str, typer.Option("--queue", metavar="NAME", help="A queue of Kueue.")] = "",
    jobset: Annotated[
        bool,
        typer.Option("--jobset", help="A JobSet, which restarts all pods together; the cluster must have JobSet."),
    ] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Write the manifest of a run for Kubernetes: ups launch kubernetes ... | kubectl apply -f -

    This directory is what the pods see as /work: recipe, data and runs are named relative to it.
    """
    import os

    from ups.config.recipe import recipe_file, resolve
    from ups.errors import ConfigError
    from ups.launch.kubernetes import KubernetesJob, manifests, not_in_pods, text

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
