"""What a task is: fields, axes, boundaries, parameters, time. Everything a model may be conditioned on.

A `TaskSpec` is written into stores and bundles as JSON and read back from untrusted files, so the checks here are
strict: names, counts and numbers are bounded, and a mistake is a `DataError` that names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ups.errors import DataError

Role = Literal["state", "static", "target"]
Boundary = Literal["periodic", "wall", "open", "dirichlet", "neumann", "unknown"]
Symmetry = Literal["translation", "reflection", "rotation90", "galilean"]
Scale = Literal["linear", "log"]
End = Literal["first", "last"]
RESIDUALS = ("darcy",)

MAX_FIELDS = 64
MAX_PARAMETERS = 64
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")


def _check_name(kind: str, name: object) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise DataError(f"{kind} name {str(name)[:80]!r} is not a plain name of at most 64 characters")


def _check_choice(kind: str, value: object, choices: tuple[object, ...]) -> None:
    if isinstance(value, bool) or value not in choices:
        raise DataError(f"{kind} {str(value)[:80]!r} is not one of {', '.join(map(str, choices))}")


def _short(value: object) -> str:
    try:
        return repr(value)[:80]
    except ValueError:  # a whole number of thousands of digits
        return "a number of that size"


def _check_unit(kind: str, unit: object) -> None:
    if not _is_text(unit, 32):
        raise DataError(f"unit of {kind} must be a text of at most 32 characters, '1' where there is none")


def _is_text(value: object, limit: int) -> bool:
    """Whether a value is text that can be written to a file: JSON has halves of surrogate pairs, UTF-8 has not."""
    return isinstance(value, str) and len(value) <= limit and not any("\ud800" <= c <= "\udfff" for c in value)


def _is_number(value: object) -> bool:
    """Whether a value is a finite number; true is none, and neither is a whole number too large for a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One physical field on the grid.

    role: `state` changes in time and is predicted from its own past; `static` is given and constant in time;
    `target` is what a steady task predicts from the static fields.
    tensor_rank: 0 scalar (1 channel), 1 vector (one channel per axis), 2 tensor (axes x axes channels).
    """

    name: str
    role: Role = "state"
    unit: str = "1"
    tensor_rank: int = 0

    def __post_init__(self) -> None:
        _check_name("field", self.name)
        _check_choice(f"role of field '{self.name}'", self.role, get_args(Role))
        _check_unit(f"field '{self.name}'", self.unit)
        _check_choice(f"tensor rank of field '{self.name}'", self.tensor_rank, (0, 1, 2))

    def num_channels(self, num_spatial_dims: int) -> int:
        return int(num_spatial_dims**self.tensor_rank)


@dataclass(frozen=True, slots=True)
class AxisSpec:
    """One spatial axis: its name, what happens at its two ends, and its length in `unit`.

    boundary: of both ends, or (of the first end, of the last one) where they differ. `unknown`: the data do not say, so
    the axis is not treated as periodic and a model is told nothing.
    """

    name: str
    boundary: Boundary | tuple[Boundary, Boundary] = "periodic"
    extent: float = 1.0
    unit: str = "1"

    def __post_init__(self) -> None:
        _check_name("axis", self.name)
        if isinstance(self.boundary, list | tuple):
            if len(self.boundary) != 2:
                raise DataError(f"axis '{self.name}' has two ends, not {len(self.boundary)} boundaries")
            first, last = self.boundary
            for kind in (first, last):
                _check_choice(f"boundary of axis '{self.name}'", kind, get_args(Boundary))
            if first != last and "periodic" in (first, last):
                raise DataError(f"axis '{self.name}' is periodic at one end only: an axis wraps around or has two ends")
            # Equal ends are written as one, so that equal axes are equal.
            object.__setattr__(self, "boundary", first if first == last else (first, last))
        else:
            _check_choice(f"boundary of axis '{self.name}'", self.boundary, get_args(Boundary))
        _check_unit(f"axis '{self.name}'", self.unit)
        if not (_is_number(self.extent) and self.extent > 0):
            raise DataError(f"extent of axis '{self.name}' must be a positive number, not {_short(self.extent)}")

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


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One scalar of the equation, constant over a trajectory, with the range it was drawn from."""

    name: str
    unit: str = "1"
    minimum: float = 0.0
    maximum: float = 0.0
    scale: Scale = "linear"

    def __post_init__(self) -> None:
        _check_name("parameter", self.name)
        _check_unit(f"parameter '{self.name}'", self.unit)
        _check_choice(f"scale of parameter '{self.name}'", self.scale, get_args(Scale))
        for end in (self.minimum, self.maximum):
            if not _is_number(end):
                raise DataError(f"range of parameter '{self.name}' must be finite, not {_short(end)}")
        if self.minimum > self.maximum:
            raise DataError(f"range of parameter '{self.name}' is empty: {self.minimum} > {self.maximum}")
        if self.scale == "log" and self.minimum <= 0:
            raise DataError(f"parameter '{self.name}' has a log scale, so its minimum must be above 0")


@dataclass(frozen=True, slots=True)
class BoundaryValue:
    """What a channel of a predicted field is at the first or at the last point of an axis, at all times."""

    channel: str
    axis: str
    end: End
    value: float = 0.0

    def __post_init__(self) -> None:
        _check_choice(f"end of axis '{str(self.axis)[:80]}'", self.end, get_args(End))
        if not _is_number(self.value):
            raise DataError(f"boundary value of '{str(self.channel)[:80]}' must be finite, not {_short(self.value)}")


@dataclass(frozen=True, slots=True)
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
    """

    name: str
    fields: tuple[FieldSpec, ...]
    axes: tuple[AxisSpec, ...]
    parameters: tuple[ParameterSpec, ...] = ()
    dt: float = 0.0
    time_unit: str = "1"
    steady: bool = False
    conserved: tuple[str, ...] = ()
    symmetries: tuple[Symmetry, ...] = ()
    equation: str = ""
    dt_range: tuple[float, float] | None = None
    positive: tuple[str, ...] = ()
    divergence_free: tuple[str, ...] = ()
    boundary_values: tuple[BoundaryValue, ...] = ()
    residual: str = ""

    def __post_init__(self) -> None:
        _check_name("task", self.name)
        _check_unit(f"time of task '{self.name}'", self.time_unit)
        if not 1 <= len(self.axes) <= 3:
            raise DataError(f"task '{self.name}' has {len(self.axes)} axes; 1 to 3 are possible")
        if not 1 <= len(self.fields) <= MAX_FIELDS or len(self.parameters) > MAX_PARAMETERS:
            raise DataError(f"task '{self.name}' has no fields, or more than {MAX_FIELDS} fields or parameters")
        for kind, names in (
            ("field", [f.name for f in self.fields]),
            ("axis", [a.name for a in self.axes]),
            ("parameter", [p.name for p in self.parameters]),
        ):
            if len(set(names)) != len(names):
                raise DataError(f"task '{self.name}' names a {kind} twice: {names}")
        channels = [name for role in get_args(Role) for name in self.channel_names(role)]
        twice = sorted({name for name in channels if channels.count(name) > 1})
        if twice:
            raise DataError(f"task '{self.name}' has two channels called '{twice[0]}': rename one of its fields")
        # In a result they stand next to each other, by name, and next to the dimension of time.
        named = [*(f.name for f in self.fields), *(a.name for a in self.axes), *(p.name for p in self.parameters)]
        shared = sorted({name for name in [*named, "time"] if [*named, "time"].count(name) > 1})
        if shared:
            raise DataError(
                f"task '{self.name}' calls two things '{shared[0]}': fields, axes, parameters and time need names of "
                "their own"
            )
        if not _is_text(self.equation, 1000):
            raise DataError(f"equation of task '{self.name}' must be a text of at most 1000 characters")
        self._check_time()
        states = {f.name for f in self.fields if f.role == "state"}
        for name in self.conserved:
            if name not in states:
                raise DataError(f"task '{self.name}' conserves '{str(name)[:80]}', which is not a state field")
        for name in self.positive:
            if name not in states:
                raise DataError(f"task '{self.name}' calls '{str(name)[:80]}' positive, which is not a state field")
        vectors = {f.name for f in self.fields if f.role == "state" and f.tensor_rank == 1}
        for name in self.divergence_free:
            if name not in vectors or not all(axis.periodic for axis in self.axes):
                raise DataError(
                    f"task '{self.name}' calls '{str(name)[:80]}' free of divergence: that needs a vector field of the "
                    "state, and axes that are all periodic"
                )
        for known in self.boundary_values:
            axis = next((a for a in self.axes if a.name == known.axis), None)
            if axis is None or axis.periodic or known.channel not in self.channel_names(self.predicted):
                raise DataError(
                    f"task '{self.name}' knows '{str(known.channel)[:80]}' at an end of '{str(known.axis)[:80]}': that "
                    "needs a predicted channel, and an axis that is not periodic"
                )
        ends = [(known.channel, known.axis, known.end) for known in self.boundary_values]
        if len(set(ends)) != len(ends):
            raise DataError(f"task '{self.name}' has two boundary values for one end of a channel")
        if self.residual:
            _check_choice(f"discretized equation of task '{self.name}'", self.residual, RESIDUALS)
            if not self.steady:
                raise DataError(f"task '{self.name}' changes in time, and has the equation of a steady one")
        for symmetry in self.symmetries:
            _check_choice(f"symmetry of task '{self.name}'", symmetry, get_args(Symmetry))

    def _check_time(self) -> None:
        roles = {f.role for f in self.fields}
        if not _is_number(self.dt):
            raise DataError(f"dt of task '{self.name}' must be a finite number, not {_short(self.dt)}")
        if not isinstance(self.steady, bool):
            raise DataError(f"steady of task '{self.name}' must be true or false, not {_short(self.steady)}")
        if self.steady and (self.dt != 0 or "state" in roles or "target" not in roles):
            raise DataError(f"steady task '{self.name}' needs a target field, no state field and dt = 0")
        if not self.steady and (self.dt <= 0 or "state" not in roles or "target" in roles):
            raise DataError(f"transient task '{self.name}' needs a state field, no target field and dt > 0")
        if self.dt_range is not None:
            ends = tuple(self.dt_range) if isinstance(self.dt_range, list | tuple) else ()
            if self.steady or len(ends) != 2 or not all(map(_is_number, ends)) or not 0 < ends[0] <= ends[1]:
                raise DataError(f"dt_range of task '{self.name}' must be two increasing numbers above 0")
            object.__setattr__(self, "dt_range", ends)

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
        for name in ("positive", "divergence_free", "boundary_values", "residual"):
            if not data[name]:
                del data[name]
        return data

    @classmethod
    def from_json(cls, data: object) -> TaskSpec:
        """Reads what `to_json` wrote. Raises DataError for anything else."""
        if not isinstance(data, Mapping):
            raise DataError("a task specification must be a JSON object")
        try:
            values = dict(data)
            values["fields"] = tuple(FieldSpec(**f) for f in _bounded(values, "fields"))
            values["axes"] = tuple(AxisSpec(**a) for a in _bounded(values, "axes"))
            values["parameters"] = tuple(ParameterSpec(**p) for p in _bounded(values, "parameters"))
            values["conserved"] = tuple(_bounded(values, "conserved"))
            values["symmetries"] = tuple(_bounded(values, "symmetries"))
            values["positive"] = tuple(_bounded(values, "positive"))
            values["divergence_free"] = tuple(_bounded(values, "divergence_free"))
            values["boundary_values"] = tuple(BoundaryValue(**b) for b in _bounded(values, "boundary_values"))
            return cls(**values)
        except (TypeError, ValueError) as error:
            raise DataError(f"task specification is malformed: {str(error)[:200]}") from error


def _bounded(values: Mapping[str, Any], key: str) -> list[Any]:
    items = values.get(key, [])
    if not isinstance(items, list | tuple) or len(items) > max(MAX_FIELDS, MAX_PARAMETERS):
        raise DataError(f"'{key}' of a task specification must be a list of at most {MAX_FIELDS} entries")
    return list(items)
