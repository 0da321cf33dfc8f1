"""`ups plan RECIPE`: what a run will need and cost, said before it starts."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ups.cli.options import JsonOption, PluginOption, RecipeArgument, SetOption, new_app
from ups.cli.output import report, say, styled, table
from ups.config.recipe import recipe_file, resolve
from ups.errors import ConfigError
from ups.run.directory import check_ranks

app = new_app()


@app.command()
def plan(
    recipe: RecipeArgument,
    gpus: Annotated[int, typer.Option(min=1, max=65536, help="Devices, one rank each.")] = 1,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="A GPU such as h100; default what this machine has.")
    ] = None,
    price_per_hour: Annotated[float | None, typer.Option(min=0, help="Of one device, in your currency.")] = None,
    failure_hours: Annotated[
        float | None, typer.Option(min=0.01, help="Hours between failures of one GPU or CPU.")
    ] = None,
    restart_seconds: Annotated[float, typer.Option(min=0, help="From a failure to work.")] = 120.0,
    storage: Annotated[float, typer.Option(min=0.001, help="Checkpoints are written at, GB/s.")] = 1.0,
    network: Annotated[
        float | None, typer.Option(min=0.01, help="Of a host of 8 GPUs, Gbit/s; default by GPU.")
    ] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Also train a few steps of each stage here, on one rank.")
    ] = False,
    break_even: Annotated[
        bool,
        typer.Option("--break-even", help="Also predict after how many solves the model has paid; takes minutes."),
    ] = False,
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Say what a run needs before it starts: memory, step time, communication, checkpoints, failures, price.

    Bytes and arithmetic are counted by running the real stages on tensors without data; times are estimates.
    """
    from ups.plan.devices import HOURS_BETWEEN_FAILURES, this_gpu
    from ups.plan.devices import gpu as gpu_of
    from ups.run.assemble import open_data
    from ups.run.planning import Circumstances, measure_stages, plan_run, predict_break_even
    from ups.solvers.problem import require_solvers

    checked = resolve(recipe_file(recipe), set).recipe
    if measure and gpu is not None:
        raise ConfigError("--measure is of this machine, and --gpu names another", hint="leave one of them out")
    check_ranks(checked, gpus)
    if break_even:
        require_solvers()
    gpu = gpu if gpu is not None or checked.engine.device == "cpu" else this_gpu()
    if gpu is not None:
        device = gpu_of(gpu, checked.engine.precision, network)
    else:
        from ups.plan.devices import this_cpu

        device = this_cpu()
    circumstances = Circumstances(
        gpus,
        device,
        price_per_hour=price_per_hour,
        hours_between_failures=failure_hours or (HOURS_BETWEEN_FAILURES if device.queues else None),
        restart_seconds=restart_seconds,
        storage_bandwidth=storage * 1e9,
    )
    with open_data(checked) as opened:
        planned = plan_run(checked, opened, circumstances)
        if measure:
            planned["measured"] = measure_stages(checked, opened)
        if break_even:
            planned["break_even"] = predict_break_even(checked, opened, planned["training_seconds"] * gpus)
    if json:
        report(planned)
        return
    show(planned)


def show(planned: dict[str, Any]) -> None:
    """The plan as text."""
    name = "this CPU" if planned["device"]["name"] == "cpu" else planned["device"]["name"]
    network = f", {planned['hosts']} hosts at {planned['network_bandwidth'] / 1e9:.3g} GB/s"
    say(
        f"{styled('plan', 'bold')}: {planned['ranks']} x {name} ({planned['device']['source']}), "
        f"{planned['strategy']}, {planned['precision']}{network if planned['hosts'] > 1 else ''}"
    )
    for number, stage in enumerate(planned["stages"]):
        say(f"\n{styled(f'stage {number}: ' + stage['type'], 'bold')}")
        say(table(_stage_rows(stage)))
    say(f"\n{styled('run', 'bold')}")
    say(table(_run_rows(planned)))
    for number, one in enumerate(planned.get("measured", ())):
        say(
            f"\nmeasured, stage {number}, one rank on this machine: {_seconds(one['step_seconds'])} of CPU time "
            "for a step"
        )
    if "break_even" in planned:
        say(f"\n{styled('break-even', 'bold')}, predicted from an untrained model on one thread of this machine")
    for task, one in planned.get("break_even", {}).items():
        say(f"  {task}: {one.get('sentence') or one['reason']}")
    say("\nBytes and arithmetic are counted; times are estimates from peaks and assumed efficiencies: docs/plan.md")


def _stage_rows(stage: dict[str, Any]) -> list[tuple[str, str]]:
    memory, step = stage["memory_bytes"], stage["step"]
    verdict = "fits" if stage["fits"] else styled("does not fit", "bold", "red")
    parts = ", ".join(
        f"{name} {_bytes(memory[name])}" for name in ("parameters", "gradients", "optimizer", "average", "activations")
    )
    largest = "none" if stage["largest_micro_batch"] is None else str(stage["largest_micro_batch"])
    if stage["largest_micro_batch"] == stage["samples_of_a_rank"]:
        largest += ", which is all that one rank gets of a batch"
    micro = "; ".join(f"{tasks}: {'+'.join(map(str, sizes))}" for tasks, sizes in stage["micro_batches"].items())
    rows = [
        ("parameters", f"{stage['parameters']:,}, of which {stage['trained']:,} are trained ({stage['optimizer']})"),
        ("memory of a rank", f"{_bytes(memory['peak'])} at the peak, {_bytes(memory['usable'])} usable: {verdict}"),
        ("", parts),
        ("micro-batch", f"{micro}; the largest that fits: {largest}"),
        (
            "step",
            f"about {_seconds(step['seconds'])}: forward {_seconds(step['forward_seconds'])}, backward "
            f"{_seconds(step['backward_seconds'])}, update {_seconds(step['update_seconds'])}; "
            f"{stage['flops']:.3g} FLOP",
        ),
    ]
    if step["sent_bytes"]:
        rows.append(
            (
                "communication",
                f"about {_seconds(step['communication_seconds'])} for {_bytes(step['sent_bytes'])} sent by a rank, of "
                f"which {_seconds(step['not_hidden_seconds'])} are not hidden behind arithmetic",
            )
        )
    return [*rows, ("length", f"{stage['steps']:,} steps, about {_seconds(stage['seconds'])}")]


def _run_rows(planned: dict[str, Any]) -> list[tuple[str, str]]:
    saves, failures = planned["checkpoints"], planned["failures"]
    data = ", ".join(f"{name} {_bytes(size)}" for name, size in planned["data_bytes"].items())
    price = "" if planned["price"] is None else f", price {planned['price']:,.2f}"
    young, expected = "", "left out: no rate is known for this CPU; --failure-hours states one"
    if failures["hours_between"] is not None:
        young = f"Young's interval {saves['young_interval_steps']:,} steps, "
        expected = (
            f"one in {failures['hours_between']:,.0f} h; {100 * failures['effective_part']:.2f} % of the time is work "
            f"that lasts ({100 * failures['effective_part_young']:.2f} % with Young's interval)"
        )
    return [
        ("data", f"{data} (train split, as float32)"),
        (
            "checkpoints",
            f"{_bytes(saves['bytes'])}, {_seconds(saves['save_seconds'])} to write, the loop stops "
            f"{_seconds(saves['stops_seconds'])}; {young}the recipe's interval {saves['interval_steps']:,} steps",
        ),
        ("failures", expected),
        ("time", f"about {_seconds(planned['hours'] * 3600)}, {planned['device_hours']:,.2f} device hours{price}"),
    ]


def _bytes(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.3g} {unit}" if number < 100 else f"{number:.0f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def _seconds(number: float) -> str:
    if number < 1:
        return f"{1000 * number:.3g} ms"
    if number < 120:
        return f"{number:.3g} s"
    return f"{number / 60:.3g} min" if number < 7200 else f"{number / 3600:,.1f} h"
