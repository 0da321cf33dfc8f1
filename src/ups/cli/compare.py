"""`ups compare`: scores of several models side by side. What may be compared: `ups.evaluation.comparison`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ups.cli.options import JsonOption, new_app
from ups.cli.output import note, report, say, styled

if TYPE_CHECKING:
    from ups.evaluation.comparison import Scored, TaskComparison

app = new_app()


@app.command()
def compare(
    models: Annotated[
        list[str],
        typer.Argument(metavar="A B...", help="Runs, bundles, reports or scores.json files.", show_default=False),
    ],
    task: Annotated[list[str], typer.Option(metavar="NAME", help="Only this task; may be given many times.")] = [],  # noqa: B006
    out: Annotated[str | None, typer.Option(help="Directory for a page with tables and curves.")] = None,
    json: JsonOption = False,
) -> None:
    """Print scores of several models beside their references, with paired differences to the first.

    A run without scores is scored first. Refuses scores of other data or of another protocol.
    """
    from ups.errors import ConfigError
    from ups.evaluation.comparison import compare as compare_scores
    from ups.evaluation.results import to_json

    if len(models) < 2:
        raise ConfigError("a comparison needs two models or more", hint="ups compare runs/A runs/B")
    scored = [_only(one, task) for one in _labelled(models)]
    tasks, notes = compare_scores(scored)
    changes = {one.label: _changes(scored[0], one) for one in scored[1:]}
    written = _write_page(Path(out), tasks, notes, changes) if out is not None else None
    if json:
        report(
            {
                "models": [one.label for one in scored],
                "tasks": [to_json(_plain(found)) for found in tasks],
                "notes": notes,
                "recipe_changes": {label: [list(row) for row in rows] for label, rows in changes.items()},
                "page": None if written is None else str(written),
            }
        )
        return
    for found in tasks:
        say(_lines(found))
    for line in notes:
        note(line)
    for label, rows in changes.items():
        say(f"recipe of {label} against {scored[0].label}:" + ("" if rows else " no difference known"))
        for field, old, new in rows:
            say(f"  {field}: {old} -> {new}")
    if written is not None:
        say(f"wrote {written}")


def _labelled(names: Sequence[str]) -> list[Scored]:
    """Scores of each model, in order; labelled by what was typed, without what tells nothing."""
    if len({Path(n).resolve() for n in names}) < len(names):
        from ups.errors import ConfigError

        raise ConfigError("the same model is named twice")
    short = [_short_name(name) for name in names]
    labels = [s if short.count(s) == 1 else n for s, n in zip(short, names, strict=True)]
    return [_load(name, label) for name, label in zip(names, labels, strict=True)]


def _short_name(name: str) -> str:
    parts = [p for p in Path(name).parts if p not in ("scores.json", "report", "bundle", "runs", ".", "..", "/")]
    return parts[-1] if parts else name


def _load(name: str, label: str) -> Scored:
    from ups.evaluation.comparison import read_scores
    from ups.run.reporting import report_folder
    from ups.run.trained import find_model

    path = Path(name)
    if path.is_file():
        return read_scores(path, label)
    if (path / "scores.json").is_file():
        return read_scores(path / "scores.json", label)
    folder = find_model(name)
    known = report_folder(folder) / "scores.json"
    if not (known.is_file() and _is_current(folder, known)):
        _score(name, label, known.parent)
    return read_scores(known, label)


def _is_current(folder: Path, scores: Path) -> bool:
    """Whether scores that were kept are of the newest checkpoint of a run, or of this bundle."""
    from ups.evaluation.comparison import MAX_BYTES
    from ups.record.checkpoints import latest_verified
    from ups.record.foreign import read_object
    from ups.record.manifest import read_manifest

    identity = (read_object(scores, MAX_BYTES) or {}).get("identity")
    if not isinstance(identity, dict):
        return False
    if (folder / "bundle.json").is_file():
        return bool(identity.get("bundle") == read_manifest(folder).sha256)
    newest = latest_verified(folder)
    return newest is not None and identity.get("checkpoint") == newest.name


def _score(name: str, label: str, folder: Path) -> None:
    """Score a model and leave scores.json in `folder`."""
    from ups.run.reporting import write_scores
    from ups.run.scoring import score
    from ups.run.trained import load_trained

    trained = load_trained(name)
    results = score(trained, progress=lambda what: note(f"{label}: scoring {what}"))
    write_scores(folder, trained, results, page=False)


def _only(one: Scored, tasks: Sequence[str]) -> Scored:
    from dataclasses import replace

    if not tasks:
        return one
    return replace(one, results={name: result for name, result in one.results.items() if name in tasks})


def _changes(a: Scored, b: Scored) -> list[tuple[str, str, str]]:
    """(field, value in a, value in b) of the recipes; empty if one of them is not known."""
    from ups.cli.config import changes_between, shown_value
    from ups.config.yaml_subset import parse

    if not a.config_text or not b.config_text:
        return []
    pairs = changes_between(parse(a.config_text, a.label).value, parse(b.config_text, b.label).value)
    return [(field, shown_value(old), shown_value(new)) for field, old, new in pairs]


def _lines(found: TaskComparison) -> str:
    """A table for people: models side by side with the reference, a star for the best if it is no accident."""
    from ups.evaluation.headline import SCORES
    from ups.evaluation.report.page import difference_words

    steady = found.first["steady"]
    rows = [["error", *found.results, "reference", "", ""]]
    for head, key in SCORES:
        if steady and key == "one_step_trmse":
            continue
        winner, words = found.winner(key)
        cells = [f"{found.summary(label)[key]:.4g}" + ("*" if winner == label else "") for label in found.results]
        name, value = found.reference(key)
        rows.append(["solution" if steady and key == "trmse" else head, *cells, f"{value:.4g}", name, words])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        # padded before it is styled: a style is characters, too
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  " + "  ".join(styled(c, "bold") if "*" in c else c for c in padded).rstrip())
    first = next(iter(found.results))
    for label in found.results:
        line = f"  {'solution' if steady else 'rollout'} of {label}: {found.rollout_verdict(label)}"
        if label in found.differences:
            line += f"; minus {first}: {difference_words(found.differences[label])}"
        lines.append(line)
    plan = found.first["protocol"]
    length = "" if steady else f", {plan['num_steps']} steps"
    title = f"{found.task}: {plan['num_trajectories']} trajectories{length}, * significantly best"
    return "\n".join([styled(title, "bold"), *lines])


def _plain(found: TaskComparison) -> dict[str, Any]:
    from ups.evaluation.headline import SCORES

    return {
        "task": found.task,
        "protocol": dict(next(iter(found.results.values()))["protocol"]),
        "scores": {label: dict(found.summary(label)) for label in found.results},
        "references": {name: dict(summary) for name, summary in found.references().items()},
        "best": {key: found.winner(key)[0] for _, key in SCORES},
        "verdicts": {label: found.rollout_verdict(label) for label in found.results},
        "differences": {label: dict(d) for label, d in found.differences.items()},
    }


def _write_page(
    folder: Path,
    tasks: Sequence[TaskComparison],
    notes: Sequence[str],
    changes: dict[str, list[tuple[str, str, str]]],
) -> Path:
    from ups.evaluation.report.side_by_side import write_comparison
    from ups.record.manifest import write_file_atomically

    folder.mkdir(parents=True, exist_ok=True)
    text = write_comparison(tasks, notes, title="Comparison", changes=changes)
    write_file_atomically(folder / "index.html", text.encode())
    return folder / "index.html"
