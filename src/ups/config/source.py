"""Where the data of a task comes from, if it is not there: `ups run` makes what is missing."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from ups.buckets.client import holds_secret
from ups.config.description import TaskDescription
from ups.config.setting import REQUIRED, Section, setting
from ups.registry import TASKS

SPLITS = 3


class SourceConfig(Section):
    """How the data of a task is made: by a solver, from files of your own, or by fetching what is published."""

    type: Literal["generate", "import", "fetch"] = setting(
        REQUIRED,
        "generate: a reference solver, as `ups data generate`; import: files of yours, as `ups data import`; fetch: a "
        "published data set, as `ups data fetch`.",
    )
    task: str | None = setting(None, "generate: which solver; default the name of the task.")
    trajectories: list[int] = setting(
        [512, 64, 64],
        "generate: trajectories of train, valid and test.",
        unit="trajectories",
        min_length=SPLITS,
        max_length=SPLITS,
    )
    seed: int = setting(0, "generate: key of every random draw.", ge=0, lt=2**63)
    resolution: int | None = setting(None, "generate: stored points of each axis.", unit="points", ge=2, le=65536)
    frames: int | None = setting(None, "generate: stored frames.", unit="frames", ge=1, le=10**6)
    parameters: dict[str, float] = setting({}, "generate: parameters that are given instead of drawn.")
    files: str | list[str] | None = setting(None, "import: a file, or several files of one task.")
    description: TaskDescription | str | None = setting(
        None,
        "import: what the arrays mean: a task.yaml (relative to this file), or its content; default the task.yaml next "
        "to the files, else a guess.",
    )

    dataset: str | None = setting(
        None,
        "fetch: which one, such as pdebench/burgers1d; the path of the task is its directory, DIR/pdebench/burgers1d, "
        "or files in it.",
    )
    only: list[str] = setting(
        [], "fetch: patterns of files, such as '*Nu0.01.*', where the path is the directory.", max_length=1000
    )
    mirror: str | None = setting(None, "fetch: an address to fetch from instead of the publisher's.")

    @model_validator(mode="after")
    def _fits_its_type(self) -> Self:
        given = {name for name in type(self).model_fields if name != "type" and not _is_default(self, name)}
        if foreign := given - SETTINGS[self.type]:
            raise ValueError(f"'{sorted(foreign)[0]}' has no meaning for a source of type '{self.type}'")
        if self.type == "import" and not self.files:
            raise ValueError("a source of type 'import' needs files")
        if self.type == "fetch" and not self.dataset:
            raise ValueError("a source of type 'fetch' needs a dataset; `ups data fetch` lists those there are")
        if self.mirror is not None and holds_secret(self.mirror):
            raise ValueError("mirror must not hold a name, a password, a query or a token: a recipe is written down")
        if self.task is not None and self.task not in TASKS.names():
            raise ValueError(f"there is no solver '{self.task}'; known here: {', '.join(TASKS.names())}")
        if min(self.trajectories) < 0 or self.trajectories[0] < 1:
            raise ValueError("trajectories are counts of train, valid and test, with at least one to train on")
        return self


# type -> the settings that have a meaning for it
SETTINGS = {
    "generate": {"task", "trajectories", "seed", "resolution", "frames", "parameters"},
    "import": {"files", "description"},
    "fetch": {"dataset", "only", "mirror"},
}


def _is_default(source: SourceConfig, name: str) -> bool:
    return bool(getattr(source, name) == type(source).model_fields[name].get_default(call_default_factory=True))
