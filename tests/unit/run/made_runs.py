"""Run directories as a supervisor leaves them, without training anything."""

import json
from pathlib import Path

from ups.record.manifest import commit_directory, make_temporary
from ups.supervise.run_file import RunFile


def made_run(directory: Path, name: str, state: str = "completed", cause: str = "", *, bundle: bool = False) -> Path:
    """A run that has ended in `state`; 'running' stays as its supervisor, this process, would write it."""
    path = directory / name
    path.mkdir(parents=True)
    file = RunFile(path)
    file.begin(ranks=2, max_restarts=3, box_root=path / "box")
    if state != "running":
        file.document["checkpoint"] = 7
        file.pronounce(state, cause, 0 if state == "completed" else 6, "")
    rows = [{"step": step, "loss": 1.0 / step} for step in range(1, 8)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if bundle:
        made_bundle(path / "bundle", name)
    return path


def made_bundle(path: Path, content: str) -> None:
    """A committed directory that counts as a bundle."""
    temporary = make_temporary(path)
    summary = {"one_step_trmse": 0.5, "trmse": "inf"}
    scores = {"waves": {"predictors": {"model": summary, "persistence": {"one_step_trmse": 1.0, "trmse": 2.0}}}}
    (temporary / "bundle.json").write_text(json.dumps({"scores": scores, "provenance": {"content": content}}))
    commit_directory(temporary, path)
