"""The description of a user's data: `task.yaml`, next to a file, in a recipe, or given to a command.

The fields are those of a task (`ups.spec.task.TaskSpec`), plus where each of them is found in the file. What is said
here is taken as it is, over anything that a file seems to say. Reading the file is left to `ups.formats.described`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, StringConstraints, model_validator

from ups.buckets.client import holds_secret
from ups.config.explain import validated
from ups.config.setting import REQUIRED, Section, setting
from ups.config.yaml_subset import Document, Origin, Value, parse, yaml_text
from ups.errors import ConfigError

# Dimensions of an array that are no axis of space: which simulation, which frame, which of several fields that lie in
# one array, and which component of a vector.
TRAJECTORY, TIME, CHANNEL, COMPONENT = "trajectory", "time", "channel", "component"
RESERVED = (TRAJECTORY, TIME, CHANNEL, COMPONENT)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def _plain(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError("must start with a letter or '_', then letters, digits, '_', '.', '-' (at most 64)")
    return name


def _free(name: str) -> str:
    if name in (*RESERVED, "state", "static", "target", "parameters"):
        raise ValueError("is kept for something else; give the axis another name, such as x")
    return _plain(name)


Name = Annotated[str, AfterValidator(_plain)]
AxisName = Annotated[str, AfterValidator(_free)]
Unit = Annotated[str, StringConstraints(min_length=1, max_length=32)]
Dims = list[str]


class DescribedField(Section):
    """One physical field: what it is, and which array holds it."""

    name: Name = setting(REQUIRED, "Name of the field in results and reports.")
    role: Literal["state", "static", "target"] = setting(
        "state", "state changes in time, static is given and constant in time, target is what a steady task asks for."
    )
    unit: Unit = setting("1", "Unit of its values; '1' where there is none.")
    tensor_rank: int = setting(0, "0 for a scalar, 1 for a vector, 2 for a tensor; see dims.", ge=0, le=2)
    dataset: str | None = setting(None, "Array in the file that holds it; default the one of its name.")
    channel: int | None = setting(
        None, "Which entry along the dimension 'channel', where one array holds several fields.", ge=0, le=4095
    )
    dims: Dims | None = setting(
        None,
        "What each dimension of the array is: trajectory, time, channel, component, or an axis; default that of all.",
        max_length=8,
    )


class DescribedAxis(Section):
    """One axis of space."""

    name: AxisName = setting(REQUIRED, "Name of the axis.")
    boundary: Literal["periodic", "wall", "open", "dirichlet", "neumann", "unknown"] = setting(
        "unknown", "What happens at its two ends; unknown: a model is told nothing, and nothing wraps around."
    )
    ends: list[Literal["wall", "open", "dirichlet", "neumann", "unknown"]] | None = setting(
        None,
        "What happens at the first and at the last end, where these differ; instead of boundary.",
        min_length=2,
        max_length=2,
    )
    extent: float | None = setting(
        None, "Length of the domain along it, in its unit; default points times spacing.", gt=0
    )
    unit: Unit = setting("1", "Unit of its coordinates; '1' where there is none.")
    nodes: int | None = setting(
        None, "Of data on points: nodes along it of the grid that the network works on.", ge=4, le=4096
    )
    start: float | None = setting(None, "Of data on points: coordinate of the first node, in its unit.")
    dataset: str | None = setting(
        None, "Array of its coordinates; default the one of its name, else equal distances over the extent."
    )
    repeated_end: bool = setting(
        False, "Whether the last point of a periodic axis is its first again; such a point is left out."
    )

    @model_validator(mode="after")
    def _ends_fit(self) -> Self:
        if self.ends is not None and self.boundary != "unknown":
            raise ValueError(f"ends and boundary of axis '{self.name}' are both given; keep one")
        if self.repeated_end and self.boundary != "periodic":
            raise ValueError(f"repeated_end is true, and boundary of axis '{self.name}' is {self.boundary}")
        return self


class DescribedParameter(Section):
    """One scalar of the equation, constant over a trajectory: one number for each trajectory, or one for all."""

    name: Name = setting(REQUIRED, "Name of the parameter.")
    unit: Unit = setting("1", "Unit of its values; '1' where there is none.")
    scale: Literal["linear", "log"] = setting("linear", "log where its values spread over orders of magnitude.")
    dataset: str | None = setting(None, "Array that holds it, or (with attribute) whose attribute it is.")
    channel: int | None = setting(
        None, "Which column, where the array holds several numbers for each trajectory.", ge=0, le=4095
    )
    attribute: str | None = setting(None, "Attribute that holds it: of the file, or of `dataset`.")
    value: float | None = setting(None, "The number itself, where the file does not hold it.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if self.value is not None and (self.dataset is not None or self.attribute is not None):
            raise ValueError(f"value of parameter '{self.name}' and where to read it are both given; keep one")
        return self


class DescribedBoundaryValue(Section):
    """What a predicted field is at the first or the last point of an axis, at all times."""

    channel: str = setting(REQUIRED, "Field, or component of one such as velocity_x.")
    axis: str = setting(REQUIRED, "Axis, which is not periodic and has a point on that end of the domain.")
    end: Literal["first", "last"] = setting(REQUIRED, "Which end of the axis.")
    value: float = setting(0.0, "The value there.", unit="unit of the field")


class TaskDescription(Section):
    """What the arrays of a file mean. Everything that is said here overrides what the file seems to say."""

    name: Name | None = setting(None, "Name of the task; default the file's.")
    fields: list[DescribedField] = setting(REQUIRED, "The physical fields.", min_length=1, max_length=64)
    axes: list[DescribedAxis] = setting(REQUIRED, "The axes of space, one to three.", min_length=1, max_length=3)
    dims: Dims | None = setting(
        None,
        "What each dimension of the arrays is, in their order: trajectory, time, channel, component, or an axis.",
        max_length=8,
    )
    parameters: list[DescribedParameter] = setting([], "Scalars of the equation.", max_length=64)
    dt: float | None = setting(
        None, "Time between two frames; default the spacing of the file's times.", unit="time_unit", gt=0
    )
    time_unit: Unit = setting("1", "Unit of time; '1' where there is none.")
    times: str | None = setting(None, "Array of the times of the frames; default the one called time or t.")
    steady: bool = setting(False, "Whether there is no time: static fields are given, target fields are asked for.")
    cut_frames: int | None = setting(
        None,
        "Cut trajectories into pieces of so many frames, each a trajectory of its own; for few long simulations.",
        unit="frames",
        ge=2,
    )
    conserved: list[str] = setting([], "State fields whose integral over the domain does not change.", max_length=64)
    positive: list[str] = setting(
        [], "State fields that are never negative; the model keeps them so in every step.", max_length=64
    )
    divergence_free: list[str] = setting(
        [],
        "Vector fields of the state without divergence, where all axes are periodic; the model adds none.",
        max_length=64,
    )
    boundary_values: list[DescribedBoundaryValue] = setting(
        [], "Values of predicted fields at ends of axes; the model keeps them in every step.", max_length=64
    )
    mask: str = setting(
        "",
        "Static field that is 1 in holes of the domain (obstacles, land), else 0; under a new name holes are where the "
        "first frame of the first predicted field is NaN.",
    )
    symmetries: list[Literal["translation", "reflection", "rotation90", "galilean"]] = setting(
        [], "Transformations of the domain that map solutions to solutions.", max_length=4
    )
    equation: Annotated[str, StringConstraints(max_length=1000)] = setting(
        "", "The equation, for people; never guessed."
    )

    @model_validator(mode="after")
    def _names_are_distinct(self) -> Self:
        groups = (("fields", self.fields), ("axes", self.axes), ("parameters", self.parameters))
        for kind, entries in groups:
            names = [entry.name for entry in entries]
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} names '{twice[0]}' twice; give each its own name")
        return self

    @model_validator(mode="after")
    def _roles_fit(self) -> Self:
        roles = {field.role for field in self.fields}
        if self.steady and ("state" in roles or "target" not in roles):
            raise ValueError("steady: a steady task has target fields and no state field; give fields their role")
        if not self.steady and ("target" in roles or "state" not in roles):
            raise ValueError("fields: a task in time has a state field and no target; or set steady to true")
        if self.steady and (self.dt is not None or self.cut_frames is not None):
            raise ValueError("dt and cut_frames are of tasks in time, and steady is true")
        states = [field.name for field in self.fields if field.role == "state"]
        for word, names in (("conserved", self.conserved), ("positive", self.positive)):
            for name in names:
                if name not in states:
                    raise ValueError(f"{word} names '{name}', which is no state field; these are {', '.join(states)}")
        return self

    @model_validator(mode="after")
    def _dims_are_known(self) -> Self:
        self.check_dims("dims", self.dims, None)
        for number, field in enumerate(self.fields):
            dims = field.dims if field.dims is not None else self.dims
            self.check_dims(f"fields.{number}.dims" if field.dims is not None else "dims", dims, field)
        return self

    def check_dims(self, where: str, dims: Dims | None, field: DescribedField | None) -> None:
        """Raises ValueError where dims cannot be those of a field."""
        if dims is None:
            return
        axes = [axis.name for axis in self.axes]
        for name in dims:
            if name not in (*RESERVED, *axes):
                raise ValueError(
                    f"{where} has '{name}', which is no axis; it takes {', '.join((*RESERVED, *axes))}, "
                    "one for each dimension of the array"
                )
        allowed_twice = COMPONENT if field is not None and field.tensor_rank == 2 else ""
        twice = [name for name in dims if dims.count(name) > 1 and name != allowed_twice]
        if field is None:
            return
        if twice:
            raise ValueError(f"{where} has '{twice[0]}' twice; each dimension is one thing")
        if dims.count(COMPONENT) != field.tensor_rank:
            raise ValueError(
                f"{where}: field '{field.name}' has tensor_rank {field.tensor_rank}, so 'component' must stand there "
                f"{field.tensor_rank} times"
            )
        missing = [name for name in axes if name not in dims]
        if missing:
            raise ValueError(f"{where} of field '{field.name}' lacks axis '{missing[0]}'")
        if field.role == "state" and TIME not in dims:
            raise ValueError(f"{where} of field '{field.name}' lacks 'time', and its role is state")
        if field.role != "state" and TIME in dims:
            raise ValueError(f"{where} of field '{field.name}' has 'time', and its role is {field.role}")
        if CHANNEL in dims and field.channel is None:
            raise ValueError(
                f"{where} has 'channel', so field '{field.name}' must say which: give its channel (0, ...)"
            )
        if CHANNEL not in dims and field.channel is not None:
            raise ValueError(f"{where} has no 'channel', and field '{field.name}' is channel {field.channel} of it")

    def dims_of(self, field: DescribedField) -> Dims | None:
        """What the dimensions of a field's array are, if that is said."""
        return field.dims if field.dims is not None else self.dims


def read_description(path: str | os.PathLike[str]) -> TaskDescription:
    """A checked `task.yaml`. Raises ConfigError with line and field for each mistake."""
    file = os.fspath(path)
    return check_description(parse(yaml_text(file, missing="`ups init DIR --data FILE` writes one"), file))


def describe_values(values: Value, name: str = "task") -> TaskDescription:
    """The same for plain values; `name` stands for the file in messages."""
    return check_description(Document.of(values, name))


def check_description(document: Document) -> TaskDescription:
    """Validate a parsed description."""
    if not isinstance(document.value, dict):
        where = document.origins.get((), Origin("task", 0))
        raise ConfigError(f"{where}: a task description is made of 'name: value' lines", hint="docs/task-yaml.md")
    return validated(TaskDescription, document)


def description_next_to(paths: Iterable[str | os.PathLike[str]]) -> str | None:
    """The description that lies next to a data file: `NAME.task.yaml` for NAME.npy, else `task.yaml`; None without."""
    for path in paths:
        folder, name = os.path.split(os.path.abspath(os.fspath(path)))
        stem = name.split(".")[0] if not name.startswith(".") else name
        inside = os.path.join(name, "task.yaml")  # of a folder
        for candidate in (f"{os.path.splitext(name)[0]}.task.yaml", f"{stem}.task.yaml", inside, "task.yaml"):
            file = os.path.join(folder, candidate)
            if os.path.isfile(file):
                return file
    return None


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
        # By value: a stored recipe has every setting, those of other types with their defaults.
        settings = self.model_dump(exclude_defaults=True, exclude={"type"}).keys()
        if foreign := settings - SETTINGS[self.type]:
            raise ValueError(f"'{sorted(foreign)[0]}' has no meaning for a source of type '{self.type}'")
        if self.type == "import" and not self.files:
            raise ValueError("a source of type 'import' needs files")
        if self.type == "fetch" and not self.dataset:
            raise ValueError("a source of type 'fetch' needs a dataset; `ups data fetch` lists those there are")
        if self.mirror is not None and holds_secret(self.mirror):
            raise ValueError("mirror must not hold a name, a password, a query or a token: a recipe is written down")
        if min(self.trajectories) < 0 or self.trajectories[0] < 1:
            raise ValueError("trajectories are counts of train, valid and test, with at least one to train on")
        return self


# type -> the settings that have a meaning for it
SETTINGS = {
    "generate": {"task", "trajectories", "seed", "resolution", "frames", "parameters"},
    "import": {"files", "description"},
    "fetch": {"dataset", "only", "mirror"},
}
