"""`ups eval`, `compare`, `calibrate` and `export`: scores, runs side by side, error bars, a bundle for programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ups.cli.options import BUNDLE_HELP, JsonOption, OnlyTasksOption, PluginOption, StartFrameOption, new_app
from ups.cli.output import note, report, say, styled
from ups.errors import ConfigError
from ups.inference.stored_scores import stored_warnings, written_words
from ups.record.run_dir import find_bundle
from ups.record.text import path_text, size_text
from ups.run.progress_line import ProgressLine

if TYPE_CHECKING:
    from ups.evaluation.comparison import TaskComparison
    from ups.library.scores import Comparison

app = new_app()
DataOption = Annotated[
    list[str],
    typer.Option(
        metavar="TASK=PATH",
        help="Take other trajectories of a task, of this data; needed for a bundle; may be given many times.",
    ),
]
BreakEvenOption = Annotated[
    bool,
    typer.Option("--break-even", help="Also measure after how many solves the model has paid; takes minutes."),
]
RecipeDataOption = Annotated[
    bool, typer.Option("--recipe-data", help="Open the data that the recipe in a bundle names, and print which.")
]


def named_data(texts: list[str]) -> dict[str, str]:
    """Task -> path, from `--data TASK=PATH`."""
    named = {}
    for text in texts:
        name, _, path = text.partition("=")
        if not name or not path:
            hint = "for example burgers1d=shifted/burgers1d.zarr"
            raise ConfigError(f"--data {text}: that is not TASK=PATH", hint=hint)
        named[name] = path
    return named


@app.command()
def evaluate(
    model: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help=BUNDLE_HELP)],
    split: Annotated[str, typer.Option(help="Which trajectories: test or valid.")] = "test",
    task: OnlyTasksOption = [],  # noqa: B006 - typer copies it
    data: DataOption = [],  # noqa: B006 - typer copies it
    recipe_data: RecipeDataOption = False,
    start_frame: StartFrameOption = None,
    trajectories: Annotated[int | None, typer.Option(help="At most so many trajectories of each task.", min=1)] = None,
    out: Annotated[str | None, typer.Option(help="For the report; default RUN/report or BUNDLE-report.")] = None,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Draw report/index.html too.")] = True,
    break_even: BreakEvenOption = False,
    solve_seconds: Annotated[
        float | None, typer.Option(min=0, help="For --break-even: what a solve of your own solver takes.")
    ] = None,
    training_seconds: Annotated[
        float | None,
        typer.Option(min=0, help="For --break-even: of training and tuning; default what the run took."),
    ] = None,
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Score a model next to persistence and the training mean, and write scores.json and a report.

    Whole rollouts from the start frame on held-out trajectories; a trajectory that blows up counts as infinite.
    """
    from ups.library.scores import evaluate as evaluate_model
    from ups.run.scoring import score_lines

    scores = evaluate_model(
        model,
        split=split,
        tasks=task,
        data=named_data(data),
        recipe_data=recipe_data,
        start_frame=start_frame,
        max_trajectories=trajectories,
        break_even=break_even,
        solve_seconds=solve_seconds,
        training_seconds=training_seconds,
        progress=not json,
    )
    if not json:
        say(score_lines(scores.results, styled))  # drawing takes longer
    with ProgressLine(quiet=json) as line:
        if page:
            line.working("drawing the worst cases")
        written = scores.write(out, page=page)
    if json:
        report(scores.to_json())
        return
    for path in written:
        say(f"wrote {path}")


# More models of several seeds are shown as means only.
MAX_COLUMNS = 4
compare_app = new_app()


@compare_app.command()
def compare(
    models: Annotated[
        list[str], typer.Argument(metavar="RUN|BUNDLE|SCORES", help="Runs, bundles, reports or scores.json files.")
    ],
    task: OnlyTasksOption = [],  # noqa: B006 - typer copies it
    out: Annotated[str | None, typer.Option(help="Directory for a page with tables and curves.")] = None,
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Print scores of several models next to their references, with paired differences to the first.

    A run without scores is scored first. Refuses scores of other data or of another protocol.
    """
    from ups.library.scores import compare as compare_models

    show(compare_models(*models, tasks=task, progress=not json), out, json=json)


def show(comparison: Comparison, out: str | None, *, json: bool) -> None:
    """Print a comparison, and write its page into `out`."""
    from ups.library.scores import seed_table

    written = comparison.write(Path(out)) if out is not None else None
    if json:
        report({**comparison.to_json(), "page": None if written is None else str(written)})
        return
    for one in comparison.tasks:
        if comparison.groups:
            say(styled(f"{one.task}: mean and standard deviation over seeds", "bold"))
            say(seed_table(one, comparison.groups))
        if not comparison.groups or len(one.results) <= MAX_COLUMNS:
            say(_lines(one, comparison.costs))
    for line in comparison.notes:
        note(line)
    for label, rows in comparison.recipe_changes.items():
        say(f"recipe of {label} against {comparison.models[0]}:" + ("" if rows else " no difference known"))
        for field, old, new in rows:
            say(f"  {field}: {old} -> {new}")
    if written is not None:
        say(f"wrote {written}")


def _lines(compared: TaskComparison, costs: dict[str, dict[str, float]]) -> str:
    """A table for people: models side by side with the reference, a star for the best if it is no accident."""
    from ups.evaluation.report import difference_words

    steady = compared.first["steady"]
    rows = [["error", *compared.results, "reference", "", ""]]
    for head, key in compared.scores():
        winner, words = compared.winner(key)
        cells = [f"{compared.summary(label)[key]:.4g}" + ("*" if winner == label else "") for label in compared.results]
        name, value = compared.reference(key)
        rows.append([head, *cells, f"{value:.4g}", name, words])
    for name in next(iter(costs.values()), {}):
        cells = [f"{costs[label][name]:.4g}" for label in compared.results]
        rows.append([name, *cells, "", "", ""])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        # padded before it is styled: a style is characters, too
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(styled(c, "bold") if "*" in c else c for c in padded).rstrip())
    first = next(iter(compared.results))
    for label in compared.results:
        line = f"  {'solution' if steady else 'rollout'} of {label}: {compared.rollout_verdict(label)}"
        if label in compared.differences:
            line += f"; minus {first}: {difference_words(compared.differences[label])}"
        lines.append(line)
    plan = compared.first["protocol"]
    length = "" if steady else f", {plan['num_steps']} steps"
    title = f"{compared.task}: {plan['num_trajectories']} trajectories{length}, * significantly best"
    return "\n".join([styled(title, "bold"), *lines])


export_app = new_app("Turn a run into something others can use.")


@export_app.command(short_help="Weights, config, statistics and a card with scores.")
def bundle(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run.")],
    out: Annotated[str | None, typer.Option(help="Directory of the bundle; default RUN/bundle.")] = None,
    trajectories: Annotated[int, typer.Option(help="Test trajectories of each task to score.", min=1)] = 64,
    break_even: BreakEvenOption = False,
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Write a bundle: weights, config, statistics and a card with scores, as plain files without pickle."""
    from ups.evaluation.results import to_json
    from ups.run.scoring import bundle_of_run, score_lines

    with ProgressLine(quiet=json) as line:
        path, results = bundle_of_run(
            run, Path(out) if out is not None else None, trajectories, line.count, break_even=break_even
        )
    if json:
        report({"bundle": str(path), "results": to_json(results), "warnings": stored_warnings(path)[1]})
        return
    say(score_lines(results, styled))
    say(written_words(path))


def _add_export(kind: str, files: str) -> None:
    """The command of one kind of export."""
    words = f"Write one step of each task as {files}, after a rollout beside torch (docs/export.md)."

    @export_app.command(kind, help=words, short_help=f"Each task as {files}.")
    def command(
        model: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help=BUNDLE_HELP)],
        out: Annotated[
            str | None, typer.Option("--out", "-o", metavar="DIR", help="Directory; default beside the bundle.")
        ] = None,
        task: OnlyTasksOption = [],  # noqa: B006 - typer copies it
        plugin: PluginOption = [],  # noqa: B006 - typer copies it
        json: JsonOption = False,
    ) -> None:
        from ups.inference.bundle import load_bundle
        from ups.inference.export import export, export_path

        path = find_bundle(model)
        directory, differences = Path(out) if out else export_path(path, kind), dict[str, float]()
        with ProgressLine(quiet=json) as line:
            line.working("exporting and comparing; a minute for each task")
            export(load_bundle(path), directory, kind, task or None, differences.__setitem__)
        if json:
            report({"directory": str(directory), "kind": kind, "difference": differences})
            return
        for name, difference in differences.items():
            say(f"{name}: the steps of a rollout are {difference:.2g} of the RMS apart from torch in total")
        say(f"wrote {directory}")


_add_export("onnx", "an ONNX file, for onnxruntime in any language")
_add_export("torch", "a program of torch.export (.pt2)")


@export_app.command(short_help="One HTML file that simulates in a browser, without a network.")
def page(
    model: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help=BUNDLE_HELP)],
    out: Annotated[str | None, typer.Option("--out", "-o", metavar="FILE", help="Default NAME.html.")] = None,
    task: OnlyTasksOption = [],  # noqa: B006 - typer copies it
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="onnxruntime-web from npm, a .tgz or a directory; without it, npm is asked once."
        ),
    ] = None,
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Write a page that works from a double click: its steps run in the browser (docs/export-page.md)."""
    from ups.inference.bundle import load_bundle
    from ups.inference.page import export_page

    path, differences = find_bundle(model), dict[str, float]()
    name = path.parent.name if path.name == "bundle" else path.name
    file = Path(out or f"{name}.html")
    with ProgressLine(quiet=json) as line:
        line.working("writing the page; a task that was not exported before takes a minute")
        size = export_page(
            load_bundle(path), name, file, Path(runtime) if runtime else None, task or None, differences.__setitem__
        )
    if json:
        report({"page": str(file), "bytes": size, "difference": differences})
        return
    say(f"wrote {file}, {size_text(size)}: open it in a browser")


calibrate_app = new_app()


@calibrate_app.command()
def calibrate(
    model: Annotated[str, typer.Argument(metavar="RUN|BUNDLE", help=BUNDLE_HELP)],
    data: DataOption = [],  # noqa: B006 - typer copies it
    recipe_data: RecipeDataOption = False,
    plugin: PluginOption = [],  # noqa: B006 - typer copies it
    json: JsonOption = False,
) -> None:
    """Measure how wrong a bundle may be, on trajectories that chose nothing, and store the statements in it.

    Afterwards `ups rollout --level 0.9` gives error bars.
    """
    from ups.library.scores import calibrate as calibrate_model

    documents = calibrate_model(model, data=named_data(data), recipe_data=recipe_data, progress=not json)
    if json:
        report({"tasks": {task: one.model_dump(mode="json") for task, one in documents.items()}})
        return
    say("\n".join(f"{task}: {one.words()}" for task, one in documents.items()))
    say(f"wrote {path_text(find_bundle(model))}")
