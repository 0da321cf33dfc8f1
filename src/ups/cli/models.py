"""`ups models`: the models that come with the package. Imports no torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ups.cli.options import JsonOption, new_app
from ups.cli.output import report, say, styled
from ups.inference.stored_scores import score_rows
from ups.record.files import read_object
from ups.record.run_dir import BUNDLE_FILE, CALIBRATION_NAME, shipped_models
from ups.record.text import size_text
from ups.run.progress_line import table

app = new_app()


@app.command()
def models(json: JsonOption = False) -> None:
    """List the models that come with the package: size, tasks and scores on held-out trajectories.

    Every command and `ups.Simulator.load` take their names where they take a bundle.
    """
    found = {name: _facts(bundle) for name, bundle in shipped_models().items()}
    if json:
        report(found)
        return
    if not found:
        say("this copy of ups comes without models")
    for name, facts in found.items():
        bars = "with error bars" if facts["calibrated"] else "without error bars"
        say(f"{styled(name, 'bold')}  {size_text(facts['size_bytes'])}, {bars}  {facts['path']}")
        rows = [("task", "score", "error", "reference")]
        for task, scores in facts["tasks"].items():
            shown = [(s["score"], f"{s['model']:.4g}", f"{s['reference']:.4g} {s['reference_name']}") for s in scores]
            rows += [("", *one) if n else (task, *one) for n, one in enumerate(shown or [("not scored", "", "")])]
        say(table(rows))


def _facts(bundle: Path) -> dict[str, Any]:
    document = read_object(bundle / BUNDLE_FILE) or {}
    scores = document.get("scores", {})
    names = [task["name"] for task in document.get("tasks", [])]
    tasks = {name: [asdict(row) for row in score_rows(name, scores.get(name))] for name in names}
    size = sum(path.stat().st_size for path in bundle.iterdir())
    calibrated = (bundle / CALIBRATION_NAME).exists()
    return {"path": str(bundle), "size_bytes": size, "calibrated": calibrated, "tasks": tasks}
