"""The tracker `wandb`: a run of Weights & Biases, online or as a log for `wandb sync`.

This process is the only one that opens the run, and it closes it with the exit code of the supervisor's verdict: no
exit hook of a rank has a say. The id is that of our run. The line of a row in metrics.jsonl is its step there, so that
the server knows which rows it has; charts have `step` as their axis.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from ups.config.setting import reveal
from ups.config.tracker import WandbConfig
from ups.record.run_dir import RunDir
from ups.tracking.metrics_file import Row, numbers_of
from ups.tracking.tracker import Ending, TrackedRun, Tracker

_ANSWER_SECONDS = 20.0


class WandbTracker(Tracker):
    """Online, rows are on their way when `log` returns; what the server has in the end, `first_row` says next time."""

    def __init__(self, config: WandbConfig, run: TrackedRun) -> None:
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        # Its client believes `wandb/settings` in the current directory, which could name another server for the key.
        with contextlib.chdir("/"):
            wandb.setup()
        offline = config.mode == "offline"
        folder = RunDir(run.dir).tracking  # in which it makes one called `wandb`
        if offline:
            # One whole log, and not a piece from each process: the rows are all there to be written again.
            for earlier in (folder / "wandb").glob(f"offline-run-*-{run.id}"):
                shutil.rmtree(earlier)
        self._run: Any = wandb.init(
            id=run.id,
            resume=None if offline else "allow",
            project=config.project,
            entity=config.entity,
            group=config.group,
            tags=config.tags,
            name=run.name,
            config={"recipe": dict(run.recipe), **{f"ups/{name}": value for name, value in run.facts.items()}},
            dir=str(folder),
            mode=config.mode,
            settings=wandb.Settings(**_settings(config)),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")
        self.id, self.url = run.id, str(self._run.url or "")
        self.first_row = 0 if offline else int(self._run.starting_step)
        if offline:
            self.url = str(Path(self._run.dir).parent)

    def log(self, row: Row, number: int) -> None:
        numbers = numbers_of(row)
        step, wall_time = row.get("step"), row.get("time")
        if isinstance(step, int):
            numbers["step"] = step
        if isinstance(wall_time, int | float):
            numbers["_timestamp"] = wall_time
        self._run.log(numbers, step=number)

    def attach(self, path: Path, name: str) -> None:
        self._run.save(str(path), base_path=str(path.parents[len(Path(name).parts) - 1]), policy="now")

    def end(self, ending: Ending) -> None:
        self._run.summary.update({f"ups/{name}": value for name, value in ending.texts.items()})
        if ending.state == "preempted":
            self._run.mark_preempting()
        # Anything but completed is a failure there, also where a signal was not one for us.
        self._run.finish(exit_code=0 if ending.state == "completed" else ending.exit_code or 1)

    def close(self) -> None:
        import wandb

        with contextlib.suppress(Exception):
            wandb.teardown()


def _settings(config: WandbConfig) -> dict[str, Any]:
    """It is told our rows and nothing of its own accord: no source, packages, host, output or load of this process."""
    settings: dict[str, Any] = {
        "console": "off",
        "silent": True,
        "disable_git": True,
        "disable_code": True,
        "x_disable_stats": True,
        "x_disable_meta": True,
        "x_disable_machine_info": True,
        "x_save_requirements": False,
        "init_timeout": _ANSWER_SECONDS,
        "symlink": False,
    }
    if config.base_url is not None:
        settings["base_url"] = config.base_url
    if config.api_key is not None:
        settings["api_key"] = reveal(config.api_key)
    return settings
