"""The tracker `mlflow`: a run on an MLflow server, through its small client (`mlflow-skinny`).

The server gives run ids, so the run is found again by a tag. It drops a metric that it has already (same name, step,
time and value): rows that are sent twice appear once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ups.buckets.client import bare_addresses
from ups.config.setting import reveal
from ups.config.tracker import MlflowConfig
from ups.errors import TrackerError
from ups.tracking.metrics_file import Row, numbers_of
from ups.tracking.tracker import Ending, TrackedRun, Tracker

RUN_TAG = "ups.run_id"
STATUS = {"completed": "FINISHED", "preempted": "KILLED", "stopped": "KILLED"}
_METRICS_AT_ONCE = 1000
_PARAMETERS_AT_ONCE = 100
_MAX_VALUE = 500
_NOT_IN_A_NAME = re.compile(r"[^\w\-./ ]")


class MlflowTracker(Tracker):
    """Rows are collected and sent by `flush`, which returns when the server has them."""

    def __init__(self, config: MlflowConfig, run: TrackedRun) -> None:
        os.environ.update(_environment(config))  # of this process, which is the tracker's own
        from mlflow import MlflowClient

        uri = config.uri or os.environ.get("MLFLOW_TRACKING_URI", "")
        if not uri:
            raise TrackerError("the tracker 'mlflow' has no server", hint="set its uri, or MLFLOW_TRACKING_URI")
        self._client = MlflowClient(tracking_uri=uri)
        self._waiting: list[Any] = []
        experiment = self._experiment(config.experiment)
        self.id = self._find_or_make(run, experiment)
        self.url = f"{uri.rstrip('/')}/#/experiments/{experiment}/runs/{self.id}" if uri.startswith("http") else uri
        self.url = bare_addresses(self.url)  # it is shown and written down; the variable may hold a password
        self._describe(config, run)

    def log(self, row: Row, number: int) -> None:
        from mlflow.entities import Metric

        step, wall_time = row.get("step"), row.get("time")
        if isinstance(step, int) and isinstance(wall_time, int | float):
            self._waiting += [
                Metric(_NOT_IN_A_NAME.sub("_", name), value, int(wall_time * 1000), step)
                for name, value in numbers_of(row).items()
            ]

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self.id, metrics=self._waiting[:_METRICS_AT_ONCE])
            del self._waiting[:_METRICS_AT_ONCE]

    def attach(self, path: Path, name: str) -> None:
        self._client.log_artifact(self.id, str(path), str(Path(name).parent))

    def end(self, ending: Ending) -> None:
        for name, value in ending.texts.items():
            self._client.set_tag(self.id, f"ups.{name}", value[:_MAX_VALUE])
        self._client.set_terminated(self.id, STATUS.get(ending.state, "FAILED"))

    def _experiment(self, name: str) -> str:
        from mlflow.exceptions import MlflowException

        experiment = self._client.get_experiment_by_name(name)
        if experiment is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run has made it at the same moment
                experiment = self._client.get_experiment_by_name(name)
                if experiment is None:
                    raise
        return str(experiment.experiment_id)

    def _find_or_make(self, run: TrackedRun, experiment: str) -> str:
        """The id that the server has given this run earlier, or gives it now."""
        known = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        made = known or [self._client.create_run(experiment, run_name=run.name, tags={RUN_TAG: run.id})]
        return str(made[0].info.run_id)

    def _describe(self, config: MlflowConfig, run: TrackedRun) -> None:
        """Say that the run continues, and what it is made from; parameters that the server has cannot be changed."""
        from mlflow.entities import Param, RunTag

        config_tags = dict(tag.partition("=")[::2] for tag in config.tags)
        tags = {
            **{f"ups.{name}": value for name, value in run.facts.items()},
            "mlflow.source.git.commit": run.facts.get("git_commit", ""),
            **({"group": config.group} if config.group else {}),
            **{name: value or "true" for name, value in config_tags.items()},
            "ups.state": "running",
        }
        known = self._client.get_run(self.id).data.params
        new = [(name, value) for name, value in _leaves(run.recipe) if name not in known]
        self._client.update_run(self.id, status="RUNNING")
        self._client.log_batch(self.id, tags=[RunTag(name, value[:_MAX_VALUE]) for name, value in tags.items()])
        for start in range(0, len(new), _PARAMETERS_AT_ONCE):
            part = new[start : start + _PARAMETERS_AT_ONCE]
            self._client.log_batch(self.id, params=[Param(name, value[:_MAX_VALUE]) for name, value in part])


def _environment(config: MlflowConfig) -> dict[str, str]:
    """What the client takes from variables. A server that does not answer is given up soon: there is a next try."""
    variables = {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "0",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "DO_NOT_TRACK": "true",
        "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    }
    if config.username is not None:
        variables["MLFLOW_TRACKING_USERNAME"] = config.username
    if config.password is not None:
        variables["MLFLOW_TRACKING_PASSWORD"] = reveal(config.password)
    if config.token is not None:
        variables["MLFLOW_TRACKING_TOKEN"] = reveal(config.token)
    return variables


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The settings of a recipe by their dotted names, without those of trackers."""
    if name == "tracking.trackers":
        return
    if isinstance(value, Mapping) or (isinstance(value, list) and any(isinstance(item, dict) for item in value)):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, str(value)
