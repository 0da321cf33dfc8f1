"""`ups run RECIPE`: `ups.run_recipe` with options, and what it says on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from ups.cli.options import JsonOption, PluginOption, RecipeArgument, SetOption, new_app
from ups.record.run_dir import RunDir

app = new_app()


@app.command()
def run(
    recipe: RecipeArgument,
    ranks: Annotated[int, typer.Option("--ranks", min=1, max=100_000, help="Processes that train together.")] = 1,
    set: SetOption = [],  # noqa: B006 - typer copies it
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """From a recipe to a gated bundle: data, validate, doctor, plan, train, evaluate, gate, bundle, report.

    A step is left out when nothing that it depends on has changed; an interrupted one goes on. Exit code 9: the scores
    do not reach the gate of the recipe, and there is no new bundle.
    """
    from ups.cli.output import note, report, say, styled
    from ups.config.recipe import recipe_file, resolve
    from ups.library.recipe_steps import StepOutput, before_gate
    from ups.library.run_recipe import StepLines, run_resolved
    from ups.run.directory import run_dir_of

    class Terminal(StepLines):
        def write(self, text: str) -> None:
            say(text)

        def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
            from ups.run.scoring import score_lines

            self.line(score_lines(results, styled))

    class Silent(StepOutput):
        """Nothing but one object on standard output; faults and the verdict as they come on standard error."""

        def pronounced(self, line: str) -> None:
            note(line)

        @contextmanager
        def following(self, run_dir: Path, recipe: Any) -> Iterator[Callable[[str], None]]:
            yield before_gate(note, recipe)

    resolved = resolve(recipe_file(recipe), set)
    run_dir = run_dir_of(resolved, recipe, set)
    code = run_resolved(resolved, run_dir, ranks, Silent() if json else Terminal())
    if json:
        report(_facts(run_dir, code))
    raise typer.Exit(code)


def _facts(run_dir: Path, code: int) -> dict[str, Any]:
    """A run after its last step, for programs."""
    from ups.record.manifest import read_manifest
    from ups.record.run_dir import is_bundle
    from ups.run.steps_file import read_steps
    from ups.supervise.run_file import read_run

    document, bundle = read_run(run_dir), RunDir(run_dir).bundle
    there = code == 0 and is_bundle(bundle)
    return {
        "name": run_dir.name,
        "path": str(run_dir),
        **{key: document[key] for key in ("state", "cause", "verdict")},
        "exit_code": code,
        "gate": document.get("gate"),
        "bundle": str(bundle) if there else None,
        "bundle_sha256": read_manifest(bundle).sha256 if there else None,
        "steps": [record.model_dump() for record in read_steps(run_dir)],
    }
