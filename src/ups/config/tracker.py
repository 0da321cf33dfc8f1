"""The settings of trackers. metrics.jsonl is always written, and needs none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Self

from pydantic import model_validator

from ups.buckets.client import holds_secret
from ups.config.setting import REQUIRED, PartSection, secret, setting
from ups.registry import TRACKERS


class TrackerConfig(PartSection):
    """Base of the settings of a tracker. needs: the extra and the module that it is of no use without.

    address: the setting that is an address.
    """

    registry = TRACKERS
    needs: ClassVar[tuple[str, str] | None] = None
    address: ClassVar[str] = ""

    type: str = setting(REQUIRED, "Which tracker this is.")

    # For the section, not for the field: the message about a field would repeat its value.
    @model_validator(mode="after")
    def _no_password(self) -> Self:
        if holds_secret(getattr(self, self.address, None) or ""):
            raise ValueError(
                f"{self.address} must not hold a name or a password, nor a query or a token: there are fields for it"
            )
        return self


class TensorBoardConfig(TrackerConfig):
    """Event files in RUN/tensorboard."""

    type: Literal["tensorboard"] = setting("tensorboard", "Which tracker this is.")


class MlflowConfig(TrackerConfig):
    """A run on an MLflow server."""

    needs = ("mlflow", "mlflow")
    address = "uri"

    type: Literal["mlflow"] = setting("mlflow", "Which tracker this is.")
    uri: str | None = setting(None, "Address of the server; default what MLFLOW_TRACKING_URI says.")
    experiment: str = setting("ups", "Experiment that the run is put into; made if there is none.", min_length=1)
    group: str | None = setting(None, "Runs that belong together have the same group.")
    tags: list[str] = setting([], "Tags of the run: NAME, or NAME=VALUE.", max_length=64)
    username: str | None = setting(None, "Name for a server that asks for one.")
    password: str | None = secret(None, "Its password, as ${env:NAME}.")
    token: str | None = secret(None, "A token in place of name and password, as ${env:NAME}.")


class WandbConfig(TrackerConfig):
    """A run of Weights & Biases."""

    needs = ("wandb", "wandb")
    address = "base_url"

    type: Literal["wandb"] = setting("wandb", "Which tracker this is.")
    project: str = setting("ups", "Project that the run is put into.", min_length=1, max_length=128)
    entity: str | None = setting(None, "Person or team that owns the project; default that of the key.")
    group: str | None = setting(None, "Runs that belong together have the same group.")
    tags: list[str] = setting([], "Tags of the run.", max_length=64)
    mode: Literal["online", "offline"] = setting("online", "offline leaves a log in the run for `wandb sync`.")
    base_url: str | None = setting(None, "Address of a server of your own.")
    api_key: str | None = secret(None, "The key, as ${env:NAME}; default what WANDB_API_KEY or ~/.netrc says.")


def by_name(trackers: Sequence[TrackerConfig]) -> dict[str, TrackerConfig]:
    """The trackers of a recipe by the name under which a run knows them: the type, with a number if it comes twice."""
    named: dict[str, TrackerConfig] = {}
    for tracker in trackers:
        same = sum(other.type == tracker.type for other in named.values())
        named[f"{tracker.type}-{same}" if same else tracker.type] = tracker
    return named
