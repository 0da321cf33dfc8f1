"""`ups train`, `run`, `sweep`, `finetune` and `reproduce`: options for a training, and what each prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.launch import app as launch
from ups.cli.options import (
    BUNDLE_HELP,
    JsonOption,
    OverOption,
    PluginOption,
    RanksOption,
    RecipeArgument,
    SetOption,
    new_app,
)
from ups.cli.output import note, report, say, styled, table
from ups.config.recipe import recipe_file, resolve
from ups.config.sweep import axes_of
from ups.errors import ConfigError, GateError
from ups.inference.stored_scores import stored_warnings
from ups.library.recipe import stage_alone, without_place
from ups.library.recipe_steps import before_gate
from ups.library.run_recipe import StepLines, run_resolved
from ups.library.sweep import Sweep
from ups.library.train import Output, Printed, train_resolved
from ups.record.manifest import read_manifest
from ups.record.run_dir import RunDir, is_bundle
from ups.record.text import path_text
from ups.run.directory import run_dir_of
from ups.run.progress_line import ProgressLine
from ups.run.steps_file import read_steps
from ups.supervise.options import find_host_info
from ups.supervise.run_file import TRAINED, RunDocument, read_run
from ups.supervise.why import faults_as_json

if TYPE_CHECKING:
    from ups.library.reproduce import Reproduction
    from ups.supervise.options import HostInfo

app = new_app()


@app.command()
def train(
    recipe: RecipeArgument,
    ranks: RanksOption = 1,
    hosts: Annotated[
        int, typer.Option(min=1, max=10_000, help="Hosts that the ranks are spread over, equally many on each.")
    ] = 1,
    host: Annotated[int | None, typer.Option(min=0, help="Number of this host, from 0; default SLURM_NODEID.")] = None,
    address: Annotated[
        str, typer.Option(metavar="ADDRESS:PORT", help="Where host 0 listens for the others; the same on every host.")
    ] = "",
    interface: Annotated[
        str, typer.Option(metavar="NAME", help="Interface that ranks talk over; default the one that leads to host 0.")
    ] = "",
    stage: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Train this stage alone, from where the one before it ended in the run."),
    ] = None,
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Train a recipe on one or many ranks, supervised; an interrupted run continues where its last checkpoint is.

    A completed run is left as it is; with more steps in its last stage it is trained longer. A stage that is trained
    alone is a run of its own next to the first one, such as runs/NAME-corrector.

    Over several hosts: the same command on each, with its own --host, in a file system that all of them see.
    """
    host_info = _host_info(hosts, ranks, host, address, interface)
    if stage is None:
        resolved = resolve(recipe_file(recipe), set)
        raise typer.Exit(start(resolved, run_dir_of(resolved, recipe, set), ranks, json=json, host_info=host_info))
    whole = resolve(recipe_file(recipe), without_place(set))
    alone = stage_alone(whole, run_dir_of(whole, recipe), stage, set)
    raise typer.Exit(start(alone, run_dir_of(alone, ""), ranks, json=json, host_info=host_info))


def _host_info(hosts: int, ranks: int, host: int | None, address: str, interface: str) -> HostInfo | None:
    """Where this process stands among several hosts; None on one."""
    if hosts > 1:
        return find_host_info(hosts, ranks, host, address, interface)
    if host is not None or address or interface:
        raise ConfigError("--host, --address and --interface are for several hosts", hint="give --hosts as well")
    return None


class Quiet(Output):
    """Nothing but one object on standard output; faults and the verdict as they come on standard error."""

    results: Sequence[Mapping[str, Any]] | None = None
    nothing_to_do = False

    def completed_before(self, run_dir: Path, step: int) -> None:
        self.nothing_to_do = True

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        self.results = results

    def pronounced(self, line: str) -> None:
        note(line)

    @contextmanager
    def following(self, run_dir: Path, recipe: Any) -> Iterator[Callable[[str], None]]:
        yield note


def start(resolved: Any, run_dir: Path, ranks: int, *, json: bool, host_info: HostInfo | None = None) -> int:
    """Train a resolved recipe and say how it ended; returns the exit code of the run."""

    if not json:
        shown = Printed(say, styled, f"ups train {path_text(run_dir)} --set stages.{{}}.{{}}=MORE")
        return train_resolved(resolved, run_dir, ranks, shown, host_info)
    progress = Quiet()
    code = train_resolved(resolved, run_dir, ranks, progress, host_info)
    report(_facts(run_dir, code, progress.results, nothing_to_do=progress.nothing_to_do))
    return code


def _facts(
    run_dir: Path, code: int, results: Sequence[Mapping[str, Any]] | None, *, nothing_to_do: bool
) -> dict[str, Any]:
    """A run that has ended, for programs. results: None where nothing was scored."""
    document, facts = _end_of(run_dir, code)
    scores = None
    if results is not None:
        from ups.evaluation.results import to_json

        scores = to_json(results)
    bundle = RunDir(run_dir).bundle
    bundled = document["state"] in TRAINED and is_bundle(bundle)
    return {
        **facts,
        "step": document["checkpoint"],
        "attempts": len(document["attempts"]),
        "faults": faults_as_json(document),
        "bundle": str(bundle) if bundled else None,
        "warnings": stored_warnings(bundle)[1] if bundled else [],
        "completed_before": nothing_to_do,
        "results": scores,
    }


def _end_of(run_dir: Path, code: int) -> tuple[RunDocument, dict[str, Any]]:
    document = read_run(run_dir)
    facts = {"name": run_dir.name, "path": str(run_dir), "state": document["state"], "cause": document["cause"]}
    return document, {**facts, "verdict": document["verdict"], "exit_code": code}


run_app = new_app()


@run_app.command()
def run(
    recipe: RecipeArgument,
    ranks: RanksOption = 1,
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """From a recipe to a gated bundle: data, validate, doctor, plan, train, evaluate, gate, bundle, report.

    A step is skipped when nothing that it depends on has changed; an interrupted one continues. Exit code 9: the
    scores do not reach the gate of the recipe, and there is no new bundle.
    """

    class Silent(Quiet):
        @contextmanager
        def following(self, run_dir: Path, recipe: Any) -> Iterator[Callable[[str], None]]:
            yield before_gate(note, recipe)

    resolved = resolve(recipe_file(recipe), set)
    run_dir = run_dir_of(resolved, recipe, set)
    code = run_resolved(resolved, run_dir, ranks, Silent() if json else StepLines(say, styled))
    if json:
        report(_step_facts(run_dir, code))
    raise typer.Exit(code)


def _step_facts(run_dir: Path, code: int) -> dict[str, Any]:
    """A run after its last step, for programs."""
    (document, facts), bundle = _end_of(run_dir, code), RunDir(run_dir).bundle
    there = code == 0 and is_bundle(bundle)
    return {
        **facts,
        "gate": document.get("gate"),
        "bundle": str(bundle) if there else None,
        "bundle_sha256": read_manifest(bundle).sha256 if there else None,
        "steps": [record.model_dump() for record in read_steps(run_dir)],
    }


sweep_app = new_app()


@sweep_app.command()
def sweep(
    recipe: RecipeArgument,
    over: OverOption,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Runs at the same time on this host.")] = 1,
    ranks: Annotated[int, typer.Option(min=1, max=100_000, help="Processes of each run.")] = 1,
    slurm: Annotated[
        str,
        typer.Option(metavar="OPTIONS", help="Submit an array, with these options of `ups launch slurm`: '--time 30'."),
    ] = "",
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Train a recipe with each combination of values, supervised; a table at the end.

    The same command continues an interrupted sweep: finished runs are kept, others continue from their checkpoints.
    Exit code 6: a run has failed; the others are trained nevertheless.
    """
    import shlex
    import sys

    if slurm:
        if jobs > 1 or ranks > 1 or plugin:
            raise ConfigError(
                "--jobs, --ranks and --plugin are for this host", hint="use --slurm '--ranks-per-node 8 ...'"
            )
        named = [word for name, texts in (("--over", over), ("--set", set)) for text in texts for word in (name, text)]
        words = ["slurm", recipe, *slurm.split(), *named, *(["--json"] if json else [])]
        typer.main.get_command(launch).main(words, prog_name="ups launch", standalone_mode=False)
        return
    work = Sweep(recipe, set, axes_of(over), ranks, scripts=plugin)
    with ProgressLine() as line:
        code = work.run(jobs, line)
    rows = work.rows()
    if json:
        report({"runs": rows, "exit_code": code})
    else:
        error = "{task} {score} {model:.4g} ({reference_name} {reference:.4g})"
        ends = [row["why"] or ", ".join(error.format(**score) for score in row["scores"]) for row in rows]
        lines = [[row["name"], row["state"], end] for row, end in zip(rows, ends, strict=True)]
        say(table([["run", "state", "error (reference), or why it is not completed"], *lines]))
    if code:
        done = sum(row["state"] == "completed" for row in rows)
        note(f"{done} of {len(rows)} runs are completed; to continue: {shlex.join(['ups', *sys.argv[1:]])}")
    else:
        note(f"compare them with: ups compare {' '.join(shlex.quote(path_text(cell.run_dir)) for cell in work.cells)}")
    raise typer.Exit(code)


finetune_app = new_app()


@finetune_app.command()
def finetune(
    bundle: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help=BUNDLE_HELP)],
    data: Annotated[str, typer.Argument(metavar="DATA", help="A store or a file, as `ups data inspect` reads it.")],
    budget: Annotated[float, typer.Option(metavar="SECONDS", help="Time to train.", min=0.001)] = 300.0,
    name: Annotated[str | None, typer.Option(help="Name of the run; default TASK-finetuned.")] = None,
    task: Annotated[
        str | None, typer.Option(help="What to call the data; default as the task of the bundle that it fits.")
    ] = None,
    ranks: RanksOption = 1,
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Train the model of a bundle on DATA, from its weights, and leave a bundle of the new model.

    The recipe is that of the bundle with your data, one stage and half the learning rate; --set changes any of its
    fields, and runs/NAME/config.yaml shows it. The same command continues an interrupted run.
    """
    from ups.library.finetune import resolve_finetuning

    changes = [*([f"run.name={name}"] if name else []), *set]
    resolved = resolve_finetuning(bundle, data, task, budget, changes)
    raise typer.Exit(start(resolved, run_dir_of(resolved, "", changes), ranks, json=json))


reproduce_app = new_app()


@reproduce_app.command()
def reproduce(
    bundle: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help="A bundle, a run that has one, or hf://...")],
    data: Annotated[
        list[str],
        typer.Option(metavar="TASK=PATH", help="The data of a task; default made anew by its solver, in the run."),
    ] = [],  # noqa: B006 - typer copies it
    seeds: Annotated[
        int, typer.Option(min=0, max=1000, help="Also train so many other seeds: how far scores differ by chance.")
    ] = 0,
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Retrain a bundle from what it says about its training, and compare: bitwise, within seed noise, or not.

    Every difference that is known is named: seed, setting, data, version, machine. Exit code 9: neither bitwise nor
    within seed noise. The same command continues an interrupted one.
    """
    from dataclasses import asdict

    from ups.cli.eval import named_data
    from ups.library.reproduce import reproduce as reproduce_bundle

    output = Quiet() if json else Printed(say, styled)
    result = reproduce_bundle(bundle, named_data(data), seeds=seeds, changes=set, output=output)
    if json:
        report(asdict(result))
    else:
        _say_reproduction(result)
    raise typer.Exit(0 if result.reproduced else GateError.exit_code)


def _say_reproduction(result: Reproduction) -> None:
    rows = [["score", "bundle", "retrained", "standard deviations apart"]]
    for row in result.scores:
        apart = "not known" if row["std"] is None else f"{row['deviations']:.2g} (one is {row['std']:.2g})"
        rows.append([f"{row['task']}: {row['score']}", f"{row['before']:.6g}", f"{row['now']:.6g}", apart])
    say(table(rows))
    for row in result.differences:
        say("{kind} differs: {name} was {before} and is {now}".format(**row))
    words = f"{result.num_tensors - result.num_differing} of {result.num_tensors} tensors are equal"
    if result.num_differing and not result.differences:
        words += "; nothing that the bundle records differs"
    if result.verdict == "not bitwise":
        words += "; seed noise is not known: --seeds 3 measures it"
    say(f"{result.verdict}: {words}; {path_text(Path(result.bundle))}")
