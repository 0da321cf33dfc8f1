"""What a task is: fields, axes, boundaries, parameters, time. Everything a model may be conditioned on.

A `TaskSpec` is written into stores and bundles as JSON and read back from untrusted files, so the checks here are
strict: names, counts and numbers are bounded, and a mistake is a `DataError` that names it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import ConfigDict, Field, PlainValidator, StrictBool, StrictStr, StringConstraints, ValidationError
from pydantic.dataclasses import dataclass

from ups.errors import DataError

Role = Literal["state", "static", "target"]
Boundary = Literal["periodic", "wall", "open", "dirichlet", "neumann", "unknown"]
Symmetry = Literal["translation", "reflection", "rotation90", "galilean"]
Scale = Literal["linear", "log"]
End = Literal["first", "last"]
Residual = Literal["", "darcy"]

MAX_FIELDS = 64
MAX_PARAMETERS = 64
_CONFIG = ConfigDict(extra="forbid")
_Class = TypeVar("_Class", bound=type[Any])


def _finite(value: Any) -> Any:
    """The number as it is: an int stays one, so that a file is written as before. True is not a number."""
    try:
        if not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value):
            return value
    except OverflowError:  # a whole number too large for a float
        pass
    raise ValueError("expected a finite number")


Name = Annotated[str, StringConstraints(strict=True, pattern=r"^[A-Za-z_][A-Za-z0-9_.-]{0,63}$")]
Unit = Annotated[str, StringConstraints(strict=True, max_length=32)]
Number = Annotated[float, PlainValidator(_finite)]
Names = Annotated[tuple[StrictStr, ...], Field(max_length=MAX_FIELDS)]


def first_mistake(error: ValidationError) -> str:
    """Which field is wrong, what was expected, and what is there."""
    first = error.errors(include_url=False, include_context=False)[0]
    got = ascii(first["input"])[:80] if isinstance(first["input"], str | float | bool | None) else ""
    words = first["msg"].removeprefix("Value error, ")
    return f"{'.'.join(map(str, first['loc']))}: {words}{f', got {got}' if got else ''}"


def _refused_as_data(what: str) -> Callable[[_Class], _Class]:
    """A wrong value is a DataError that names the field and what was expected."""

    def decorate(cls: _Class) -> _Class:
        check: Any = cls.__init__

        def __init__(self: Any, *args: Any, **values: Any) -> None:
            try:
                check(self, *args, **values)
            except ValidationError as error:
                raise DataError(f"{what}: {first_mistake(error)}") from None

        setattr(cls, "__init__", __init__)  # noqa: B010 - a class of any kind
        return cls

    return decorate


@_refused_as_data("a field of a task")
@dataclass(frozen=True, slots=True, config=_CONFIG)
class FieldSpec:
    """One physical field on the grid.

    role: `state` changes in time and is predicted from its own past; `static` is given and constant in time;
    `target` is what a steady task predicts from the static fields.
    tensor_rank: 0 scalar (1 channel), 1 vector (one channel per axis), 2 tensor (axes x axes channels).
    """

    name: Name
    role: Role = "state"
    unit: Unit = "1"
    tensor_rank: Annotated[int, Field(strict=True, ge=0, le=2)] = 0

    def num_channels(self, num_spatial_dims: int) -> int:
        return int(num_spatial_dims**self.tensor_rank)


@_refused_as_data("an axis of a task")
@dataclass(frozen=True, slots=True, config=_CONFIG)
class AxisSpec:
    """One spatial axis: its name, what happens at its two ends, and its length in `unit`.

    boundary: of both ends, or (of the first end, of the last one) where they differ. `unknown`: the data do not say, so
    the axis is not treated as periodic and a model is told nothing.
    """

    name: Name
    boundary: Boundary | tuple[Boundary, Boundary] = "periodic"
    extent: Number = 1.0
    unit: Unit = "1"

    def __post_init__(self) -> None:
        if isinstance(self.boundary, tuple):
            first, last = self.boundary
            if first != last and "periodic" in (first, last):
                raise DataError(f"axis '{self.name}' is periodic at one end only: an axis wraps around or has two ends")
            # Equal ends are written as one, so that equal axes are equal.
            object.__setattr__(self, "boundary", first if first == last else (first, last))
        if self.extent <= 0:
            raise DataError(f"extent of axis '{self.name}' must be a positive number, got {self.extent}")

    @property
    def periodic(self) -> bool:
        return self.boundary == "periodic"

    @property
    def ends(self) -> tuple[Boundary, Boundary]:
        """What happens at the first and at the last end."""
        return self.boundary if isinstance(self.boundary, tuple) else (self.boundary, self.boundary)

    @property
    def boundary_text(self) -> str:
        """The boundary in a word: `wall`, or `wall to open` where the ends differ."""
        return self.boundary if isinstance(self.boundary, str) else " to ".join(self.boundary)


@_refused_as_data("a parameter of a task")
@dataclass(frozen=True, slots=True, config=_CONFIG)
class ParameterSpec:
    """One scalar of the equation, constant over a trajectory, with the range it was drawn from."""

    name: Name
    unit: Unit = "1"
    minimum: Number = 0.0
    maximum: Number = 0.0
    scale: Scale = "linear"

    def __post_init__(self) -> None:
        if self.minimum > self.maximum:
            raise DataError(f"range of parameter '{self.name}' is empty: {self.minimum} > {self.maximum}")
        if self.scale == "log" and self.minimum <= 0:
            raise DataError(f"parameter '{self.name}' has a log scale, so its minimum must be above 0")


@_refused_as_data("a boundary value of a task")
@dataclass(frozen=True, slots=True, config=_CONFIG)
class BoundaryValue:
    """What a channel of a predicted field is at the first or at the last point of an axis, at all times."""

    channel: StrictStr
    axis: StrictStr
    end: End
    value: Number = 0.0


@_refused_as_data("a task")
@dataclass(frozen=True, slots=True, config=_CONFIG)
class TaskSpec:
    """One PDE problem: what is given, what is asked, and on what domain.

    dt: time between two stored frames, in `time_unit`; 0 for a steady task. dt_range: smallest and largest, where
    trajectories differ in it; dt is then the usual one.
    conserved: state fields whose integral over the domain does not change in time.
    positive: state fields that are never negative. divergence_free: vector fields of the state without divergence, on
    axes that are all periodic. Models keep both in every step.
    symmetries: transformations of the domain that map solutions to solutions.
    boundary_values: of the predicted fields, where the first or the last point of an axis lies on the boundary.
    residual: the discretized equation of a steady task, by name (`ups.models.constraints`); '' if it has none.
    mask: the static field that is 1 in holes of the domain (obstacles, land), where no other field has a value; '' if
    there are none. Readers give 0 for those values, models keep them, and neither losses nor scores count them.
    """

    name: Name
    fields: Annotated[tuple[FieldSpec, ...], Field(min_length=1, max_length=MAX_FIELDS)]
    axes: Annotated[tuple[AxisSpec, ...], Field(min_length=1, max_length=3)]
    parameters: Annotated[tuple[ParameterSpec, ...], Field(max_length=MAX_PARAMETERS)] = ()
    dt: Number = 0.0
    time_unit: Unit = "1"
    steady: StrictBool = False
    conserved: Names = ()
    symmetries: tuple[Symmetry, ...] = ()
    equation: Annotated[str, StringConstraints(strict=True, max_length=1000)] = ""
    dt_range: tuple[Number, Number] | None = None
    positive: Names = ()
    divergence_free: Names = ()
    boundary_values: Annotated[tuple[BoundaryValue, ...], Field(max_length=MAX_FIELDS)] = ()
    residual: Residual = ""
    mask: Annotated[str, StringConstraints(strict=True, max_length=64)] = ""

    def __post_init__(self) -> None:
        self._check_names()
        self._check_time()
        self._check_constraints()
        self._check_boundary_values()
        self._check_mask()

    def _check_names(self) -> None:
        channels = [name for role in get_args(Role) for name in self.channel_names(role)]
        if twice := _repeated(channels):
            raise DataError(f"task '{self.name}' has two channels called '{twice}': rename one of its fields")
        # In a result they stand next to each other, by name, and next to the dimension of time.
        named = [*(f.name for f in self.fields), *(a.name for a in self.axes), *(p.name for p in self.parameters)]
        if shared := _repeated([*named, "time"]):
            raise DataError(
                f"task '{self.name}' calls two things '{shared}': fields, axes, parameters and time need names of "
                "their own"
            )

    def _check_time(self) -> None:
        roles = {f.role for f in self.fields}
        if self.steady and (self.dt != 0 or "state" in roles or "target" not in roles):
            raise DataError(f"steady task '{self.name}' needs a target field, no state field and dt = 0")
        if not self.steady and (self.dt <= 0 or "state" not in roles or "target" in roles):
            raise DataError(f"transient task '{self.name}' needs a state field, no target field and dt > 0")
        if self.dt_range is not None and (self.steady or not 0 < self.dt_range[0] <= self.dt_range[1]):
            raise DataError(f"dt_range of task '{self.name}' must be two increasing numbers above 0")
        if self.residual and not self.steady:
            raise DataError(f"task '{self.name}' changes in time, and has the equation of a steady one")

    def _check_constraints(self) -> None:
        states = {f.name: f.tensor_rank for f in self.fields if f.role == "state"}
        for name in (*self.conserved, *self.positive):
            if name not in states:
                word = "conserved" if name in self.conserved else "positive"
                raise DataError(f"task '{self.name}' calls '{name[:80]}' {word}, which is not a state field")
        for name in self.divergence_free:
            if states.get(name) != 1 or not all(axis.periodic for axis in self.axes):
                raise DataError(
                    f"task '{self.name}' calls '{name[:80]}' free of divergence: that needs a vector field of the "
                    "state, and axes that are all periodic"
                )

    def _check_boundary_values(self) -> None:
        open_axes = {axis.name for axis in self.axes if not axis.periodic}
        for known in self.boundary_values:
            if known.axis not in open_axes or known.channel not in self.channel_names(self.predicted):
                raise DataError(
                    f"task '{self.name}' knows '{known.channel[:80]}' at an end of '{known.axis[:80]}': that needs a "
                    "predicted channel, and an axis that is not periodic"
                )
        ends = [(known.channel, known.axis, known.end) for known in self.boundary_values]
        if len(set(ends)) != len(ends):
            raise DataError(f"task '{self.name}' has two boundary values for one end of a channel")

    def _check_mask(self) -> None:
        scalars = [f.name for f in self.fields if f.role == "static" and not f.tensor_rank]
        if self.mask and (self.mask not in scalars or self.divergence_free or self.residual):
            raise DataError(
                f"task '{self.name}' has the mask '{self.mask}': that needs a static scalar field of this name, and no "
                "divergence_free or residual, which are for domains without holes"
            )

    @property
    def num_spatial_dims(self) -> int:
        return len(self.axes)

    @property
    def predicted(self) -> Role:
        """The role that a model predicts: the target of a steady task, else the state."""
        return "target" if self.steady else "state"

    def fields_of(self, role: Role) -> tuple[FieldSpec, ...]:
        return tuple(f for f in self.fields if f.role == role)

    def num_channels(self, role: Role) -> int:
        return sum(f.num_channels(self.num_spatial_dims) for f in self.fields_of(role))

    def channel_names(self, role: Role) -> tuple[str, ...]:
        """One name per channel; a vector field `v` on axes x, y gives `v_x`, `v_y`."""
        names: list[str] = []
        axes = [a.name for a in self.axes]
        for field in self.fields_of(role):
            suffixes = [""]
            for _ in range(field.tensor_rank):
                suffixes = [f"{s}_{a}" for s in suffixes for a in axes]
            names += [field.name + s for s in suffixes]
        return tuple(names)

    def to_json(self) -> dict[str, Any]:
        data = asdict(self)
        if self.dt_range is None:  # as a task was written before there was one
            del data["dt_range"]
        for name in ("positive", "divergence_free", "boundary_values", "residual", "mask"):
            if not data[name]:
                del data[name]
        return data

    @classmethod
    def from_json(cls, data: object) -> TaskSpec:
        """Reads what `to_json` wrote. Raises DataError for anything else."""
        if not isinstance(data, Mapping):
            raise DataError("a task specification must be a JSON object")
        try:
            return cls(**data)
        except TypeError as error:  # a key that is not text
            raise DataError(f"task specification is malformed: {str(error)[:200]}") from error


def _repeated(names: list[str]) -> str:
    """The first name, by alphabet, that comes twice; '' if none does."""
    return min((name for name in names if names.count(name) > 1), default="")
