"""`ups train RECIPE`: `ups.train` with options, and what it says on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.options import JsonOption, PluginOption, RecipeArgument, SetOption, new_app
from ups.record.run_dir import RunDir

if TYPE_CHECKING:
    from ups.supervise.options import HostInfo

app = new_app()


@app.command()
def train(
    recipe: RecipeArgument,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=100_000, help="Processes that train together.")] = 1,
    hosts: Annotated[
        int,
        typer.Option("--hosts", min=1, max=10_000, help="Hosts that the ranks are spread over, equally many on each."),
    ] = 1,
    host: Annotated[
        int | None,
        typer.Option("--host", min=0, help="Number of this host, from 0; default SLURM_NODEID.", show_default=False),
    ] = None,
    address: Annotated[
        str,
        typer.Option(metavar="ADDRESS:PORT", help="Where host 0 listens for the others; the same on every host."),
    ] = "",
    interface: Annotated[
        str,
        typer.Option(metavar="NAME", help="Interface that ranks talk over; default the one that leads to host 0."),
    ] = "",
    stage: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Train this stage alone, from where the one before it ended in the run."),
    ] = None,
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Train a recipe on one or many ranks, supervised; an interrupted run goes on where its last checkpoint is.

    A completed run is left as it is; with more steps in its last stage it is trained longer. A stage that is trained
    alone is a run of its own next to the first one, such as runs/NAME-corrector.

    Over several hosts: the same command on each, with its own --host, in a file system that all of them see.
    """
    from ups.config.recipe import recipe_file, resolve
    from ups.run.directory import run_dir_of

    host_info = _host_info(hosts, ranks, host, address, interface)
    if stage is None:
        resolved = resolve(recipe_file(recipe), set)
        raise typer.Exit(start(resolved, run_dir_of(resolved, recipe, set), ranks, json=json, host_info=host_info))
    from ups.library.recipe import stage_alone, without_place

    whole = resolve(recipe_file(recipe), without_place(set))
    alone = stage_alone(whole, run_dir_of(whole, recipe), stage, set)
    raise typer.Exit(start(alone, run_dir_of(alone, ""), ranks, json=json, host_info=host_info))


def _host_info(hosts: int, ranks: int, host: int | None, address: str, interface: str) -> HostInfo | None:
    """Where this process stands among several hosts; None on one."""
    from ups.errors import ConfigError
    from ups.supervise.options import find_host_info

    if hosts > 1:
        return find_host_info(hosts, ranks, host, address, interface)
    if host is not None or address or interface:
        raise ConfigError("--host, --address and --interface are for several hosts", hint="give --hosts as well")
    return None


def start(resolved: Any, run_dir: Path, ranks: int, *, json: bool, host_info: HostInfo | None = None) -> int:
    """Train a resolved recipe and say how it ended; returns the exit code of the run."""
    from contextlib import contextmanager

    from ups.cli.output import note, report, say, styled
    from ups.library.train import Output, Printed, train_resolved
    from ups.record.text import path_text

    class Terminal(Printed):
        more_steps = f"ups train {path_text(run_dir)} --set stages.{{}}.{{}}=MORE"

        def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
            from ups.inference.stored_scores import written_words
            from ups.run.scoring import score_lines

            say(score_lines(results, styled))
            say(written_words(bundle))

    class Object(Output):
        """Nothing but one object on standard output; faults and the verdict as they come on standard error."""

        results: Sequence[Mapping[str, Any]] | None = None
        nothing_to_do = False

        def completed_before(self, run_dir: Path, step: int) -> None:
            self.nothing_to_do = True

        def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
            self.results = results

        @contextmanager
        def following(self, run_dir: Path, recipe: Any) -> Iterator[Callable[[str], None]]:
            yield note

        @contextmanager
        def following_host(self) -> Iterator[Callable[[str], None]]:
            yield note

    if not json:
        return train_resolved(resolved, run_dir, ranks, Terminal(), host_info)
    shown = Object()
    code = train_resolved(resolved, run_dir, ranks, shown, host_info)
    report(_facts(run_dir, code, shown.results, nothing_to_do=shown.nothing_to_do))
    return code


def _facts(
    run_dir: Path, code: int, results: Sequence[Mapping[str, Any]] | None, *, nothing_to_do: bool
) -> dict[str, Any]:
    """A run that has ended, for programs. results: None where nothing was scored."""
    from ups.inference.stored_scores import stored_warnings
    from ups.record.run_dir import is_bundle
    from ups.supervise.run_file import TRAINED, read_run
    from ups.supervise.why import faults_as_json

    document = read_run(run_dir)
    scores = None
    if results is not None:
        from ups.evaluation.results import to_json

        scores = to_json(results)
    bundle = RunDir(run_dir).bundle
    bundled = document["state"] in TRAINED and is_bundle(bundle)
    return {
        "name": run_dir.name,
        "path": str(run_dir),
        **{key: document[key] for key in ("state", "cause", "verdict")},
        "exit_code": code,
        "step": document["checkpoint"],
        "attempts": len(document["attempts"]),
        "faults": faults_as_json(document),
        "bundle": str(bundle) if bundled else None,
        "warnings": stored_warnings(bundle)[1] if bundled else [],
        "completed_before": nothing_to_do,
        "results": scores,
    }
