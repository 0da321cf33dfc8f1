"""From user input (numpy, torch, xarray, a dict of fields) to checked tensors, with one clear line per mistake.

Shape legend: B samples, T given frames, C channels, S space, P parameters.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.errors import BundleError
from ups.inference.domain import Domain, check_units, fit_domain, given_coordinates, is_array, is_dataset, labeled_in
from ups.spec.batch import Batch
from ups.spec.grid import component_dim, component_labels
from ups.spec.task import Role, TaskSpec

Float64 = npt.NDArray[np.float64]
# Fields (B, T, C, *S), and whether a sample axis was given.
Part = tuple[Float64, bool]
# One rollout holds at most so many numbers in a frame: a typing mistake must not ask for terabytes.
MAX_FRAME_VALUES = 2**31
# Names of a dimension along which an xarray.DataArray has all channels; the second is that of `Dataset.to_dataarray`.
CHANNEL_DIMS = ("channel", "variable")


@dataclass(frozen=True)
class Start:
    """Where a rollout begins: what the model is given, and what its result is labeled with.

    batch: float32, on the CPU, on the training grid; batched: whether the input has a sample axis.
    dt: the time step. notes: what was assumed, because the input does not say it. lost: part of the RMS of a field
    without its mean, of the worst one, that the training grid is too coarse for.
    """

    batch: Batch
    domain: Domain
    time: float
    dt: float
    batched: bool
    notes: tuple[str, ...] = ()
    lost: float = 0.0


def suggestion(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


@dataclass(frozen=True)
class Given:
    """What a user gives, as arrays of the right shape that are not compared with the trained domain yet.

    state, static: None where the task has none. parameters (1 or B, P). coordinates: by axis, where there are any.
    time: of the last given frame, None where nothing says it.
    """

    state: Part | None
    static: Part | None
    parameters: Float64
    coordinates: dict[str, Float64]
    time: float | None
    dt: float
    notes: tuple[str, ...]


def read_given(
    task: TaskSpec,
    context_frames: int,
    state: Any,
    static: Any,
    parameters: Any,
    *,
    coordinates: Any = None,
    dt: float | None = None,
    time: float | None = None,
) -> Given:
    """Checks and converts what a user gives, in all forms that it may have. The arguments are those of `read_start`."""
    step = _time_step(task, dt)
    given_axes = given_coordinates(task, coordinates, {"state": state, "static": static})
    notes: list[str] = []
    stated_time = _stated_time(task, state, context_frames, step, notes)
    time = stated_time if time is None else _number("time", time)
    if is_dataset(state):
        if static is None and task.fields_of("static"):
            static = state
        if parameters is None and task.parameters:
            parameters = {p.name: state[p.name] for p in task.parameters if p.name in state}
    if task.steady and state is not None and not is_dataset(state):
        raise BundleError(
            f"task '{task.name}' is steady: it has no state, only given fields {_names(task, 'static')}",
            hint="pass them as static=",
            command_hint="INPUT must hold these fields",
        )
    frames = None if task.steady else _fields(task, "state", state, context_frames)
    if task.mask and frames is not None:
        static = _with_mask(task, static, frames[0])
    fixed = _fields(task, "static", static, 1) if task.fields_of("static") else None
    frames, fixed = _without_holes(task, frames, fixed)
    if fixed is None and static is not None and not is_dataset(static):
        raise BundleError(f"task '{task.name}' has no static fields, but some were given")
    values = _parameters(task, parameters, _common_samples(task, frames, fixed))
    return Given(frames, fixed, values, given_axes, time, step, tuple(notes))


def _with_mask(task: TaskSpec, static: Any, frames: Float64) -> Any:
    """Static fields with the mask: where a given frame (B, T, C, *S) has NaN, if it is not among them."""
    static = {} if static is None else static
    if not isinstance(static, Mapping) or task.mask in static:
        return static
    holes = np.asarray(np.isnan(frames).any(axis=(1, 2)), np.float64)
    given = {f.name: static[f.name] for f in task.fields_of("static") if f.name in static}
    return given | {task.mask: holes[0] if (holes == holes[0]).all() else holes}


def _without_holes(task: TaskSpec, frames: Part | None, fixed: Part | None) -> tuple[Part | None, Part | None]:
    """Fields (B, T, C, *S) with 0 in holes, as readers give them. Raises BundleError for NaN elsewhere."""
    if not task.mask or fixed is None or (frames is not None and frames[0].shape[3:] != fixed[0].shape[3:]):
        return frames, fixed
    channel, what = task.channel_names("static").index(task.mask), f"what is given outside of '{task.mask}'"
    holes = ~(fixed[0][:, :, channel : channel + 1] <= 0)  # (B, 1, 1, *S)
    if holes.all(axis=tuple(range(1, holes.ndim))).any():
        raise BundleError(f"'{task.mask}' leaves no point with a value", hint="it is 1 in holes, and 0 elsewhere")
    static = _array(np.where(holes, 0.0, fixed[0]), what)
    static[:, :, channel : channel + 1] = holes
    return None if frames is None else (_array(np.where(holes, 0.0, frames[0]), what), frames[1]), (static, fixed[1])


def read_start(
    task: TaskSpec,
    context_frames: int,
    state: Any,
    static: Any,
    parameters: Any,
    trained: tuple[Float64, ...],
    *,
    coordinates: Any = None,
    rescale: bool = False,
    dt: float | None = None,
    time: float | None = None,
) -> Start:
    """Checks and converts everything a rollout starts from.

    trained: the coordinates of the training grid; coordinates: those of the input, where it has none of its own;
    rescale: see `ups.inference.domain`; dt: the time step, None for the task's. time: of the last given frame, None for
    what a dataset says, else 0.
    """
    given = read_given(task, context_frames, state, static, parameters, coordinates=coordinates, dt=dt, time=time)
    frames, fixed, values, notes = given.state, given.static, given.parameters, [*given.notes]
    space = _common_space(task, tuple(len(c) for c in trained), frames, fixed)
    num_samples = max(_common_samples(task, frames, fixed), values.shape[0])
    batched = any(part is not None and part[1] for part in (frames, fixed)) or values.shape[0] > 1
    domain = fit_domain(task, trained, space, given.coordinates, rescale=rescale)
    if domain.assumed:
        notes.append(f"no coordinates were given for {', '.join(domain.assumed)}: the trained domain is assumed")
    if task.mask and domain.resampling.given != domain.resampling.trained:
        raise BundleError(f"fields with holes are not resampled to the training grid {domain.resampling.trained}")
    frames, lost = _onto(domain, "state", frames)
    fixed, lost_given = _onto(domain, "static", fixed)
    batch = Batch.of(
        task,
        state=None if frames is None else _expand(frames, num_samples),
        static=None if fixed is None else _expand(fixed, num_samples)[:, 0],
        parameters=torch.from_numpy(values).float().expand(num_samples, -1),
        dt=given.dt,
        coordinates=[np.array(c) for c in domain.trained],
    )
    return Start(
        batch=batch,
        domain=domain,
        time=0.0 if given.time is None else given.time,
        dt=given.dt,
        batched=batched,
        notes=tuple(notes),
        lost=max(lost, lost_given),
    )


def _check_ends(domain: Domain, fields: Float64) -> None:
    """Raises BundleError where fields without coordinates have the first point of a periodic axis at its end again."""
    sizes = zip(domain.resampling.task.axes, domain.resampling.given, domain.resampling.trained, strict=True)
    for number, (axis, points, known) in enumerate(sizes):
        one_more = points > 2 and (known % (points - 1) == 0 or (points - 1) % known == 0)
        if not (axis.periodic and axis.name in domain.assumed and one_more):
            continue
        first, last = fields.take(0, number + 3), fields.take(-1, number + 3)
        # The last point may have been computed, and stored in float32.
        if np.ptp(fields) > 0 and np.allclose(first, last, rtol=0, atol=1e-6 * np.abs(fields).max()):
            raise BundleError(
                f"the fields repeat the first of {points - 1} points of the periodic axis '{axis.name}' at its end",
                hint="leave the last point out; if it is not the first one again, pass coordinates=",
            )


def _onto(domain: Domain, role: Role, part: Part | None) -> tuple[Part | None, float]:
    """Fields (B, T, C, *S) on the training grid, and `Start.lost` of them."""
    resampling = domain.resampling
    if part is None or resampling.given == resampling.trained:
        return part, 0.0
    _check_ends(domain, part[0])
    x = torch.from_numpy(part[0])
    moved = resampling.onto(x, role)
    space = tuple(range(3, x.ndim))
    missing = (x - resampling.back(moved, role)).square().mean(space)
    size = x.var(space, correction=0) + 1e-16 * x.square().mean(space)  # the second is rounding
    return (moved.numpy(), part[1]), float((missing / size).nan_to_num().max().sqrt())


def _names(task: TaskSpec, role: Role) -> str:
    return ", ".join(f.name for f in task.fields_of(role)) or "none"


def _array(value: Any, what: str, *, holes: bool = False) -> Float64:
    if isinstance(value, Tensor):
        value = value.detach().cpu().numpy()
    elif holes and np.ma.is_masked(value):
        value = value.astype(np.float64).filled(np.nan)
    elif np.ma.is_masked(value):
        raise BundleError(f"{what} is masked at {value.mask.sum()} points", hint="fill them with numbers")
    elif hasattr(value, "values") and not isinstance(value, Mapping):
        value = value.values
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise BundleError(f"{what} is not a regular array: {str(error)[:100]}") from error
    if array.dtype.kind not in "fiub":
        raise BundleError(f"{what} must hold real numbers, not {array.dtype}")
    if array.size > MAX_FRAME_VALUES:
        raise BundleError(f"{what} has {array.size} values; at most {MAX_FRAME_VALUES} are possible")
    if not (finite := np.isfinite(array) | (np.isnan(array) & holes)).all():
        bad = np.argwhere(~finite)
        raise BundleError(f"{what} is not finite at {len(bad)} points, the first at index {tuple(map(int, bad[0]))}")
    if array.size and np.abs(array).max() > np.finfo(np.float32).max:
        raise BundleError(f"{what} has values up to {np.abs(array).max():.3g}, which float32 cannot hold")
    return np.asarray(array, np.float64)


def _fields(task: TaskSpec, role: Role, value: Any, num_frames: int) -> Part:
    """(B, T, C, *S) and whether a sample axis was given."""
    if value is None:
        raise BundleError(
            f"task '{task.name}' needs {role} fields {_names(task, role)}",
            hint=f"pass an array, a dict of fields or an xarray.Dataset as {role}=",
            command_hint=f"INPUT must hold these fields: {_names(task, role)}",
        )
    if is_dataset(value):
        value = _from_dataset(task, role, value)
    elif is_array(value):
        value = _from_labeled(task, role, value, num_frames)
    if isinstance(value, Mapping):
        return _from_mapping(task, role, value, num_frames)
    what = f"{role} of task '{task.name}'"
    return _shaped(task, what, _array(value, what, holes=bool(task.mask)), num_frames, task.channel_names(role))


def _shaped(task: TaskSpec, what: str, array: Float64, num_frames: int, channels: Sequence[str] | None) -> Part:
    """(B, T, C, *S) of an array that may lack samples and frames. channels: their names, None without such an axis."""
    axes = [f"{num_frames} frames"] if num_frames > 1 else []
    axes += [] if channels is None else [f"{len(channels)} channels ({', '.join(channels)})"]
    axes += [axis.name for axis in task.axes]
    batched = array.ndim == len(axes) + 1
    parts = array if batched else array[None]
    if num_frames == 1:
        parts = parts[:, None]
    if channels is None:
        parts = parts[:, :, None]
    wanted = (num_frames, 1 if channels is None else len(channels))
    if array.ndim not in (len(axes), len(axes) + 1) or parts.shape[1:3] != wanted:
        raise BundleError(
            f"{what} has shape {array.shape}; expected ({', '.join(axes)}), or the same with a sample axis in front"
        )
    return parts, batched


def _from_mapping(task: TaskSpec, role: Role, value: Mapping[Any, Any], num_frames: int) -> Part:
    fields = task.fields_of(role)
    known = [f.name for f in fields]
    for name in value:
        if name not in known:
            raise BundleError(
                f"task '{task.name}' has no {role} field '{name}'{suggestion(str(name), known)}",
                hint=f"its {role} fields are {', '.join(known)}",
            )
    missing = [n for n in known if n not in value]
    if missing:
        raise BundleError(f"{role} field '{missing[0]}' of task '{task.name}' is missing")
    parts, flags = [], []
    for field in fields:
        part, what, components = value[field.name], f"field '{field.name}'", component_labels(task, field)
        if is_array(part):
            labels = dict.fromkeys(component_dim(task, field), components)
            part = _in_order(task, f"variable '{field.name}'", part, num_frames, field.unit, labels)
        array, batched = _shaped(task, what, _array(part, what, holes=bool(task.mask)), num_frames, components or None)
        parts.append(array)
        flags.append(batched)
    first = parts[0].shape
    for field, part in zip(fields, parts, strict=True):
        if (part.shape[:2], part.shape[3:]) != (first[:2], first[3:]):
            raise BundleError(
                f"fields '{fields[0].name}' and '{field.name}' of task '{task.name}' differ in samples, frames or "
                f"grid: {first[:2] + first[3:]} and {part.shape[:2] + part.shape[3:]}"
            )
    return np.concatenate(parts, axis=2), any(flags)


def _from_dataset(task: TaskSpec, role: Role, dataset: Any) -> dict[str, Any]:
    """Field -> variable."""
    names = [str(n) for n in dataset.data_vars]
    for field in task.fields_of(role):
        if field.name not in dataset:
            raise BundleError(
                f"the dataset has no variable '{field.name}'{suggestion(field.name, names)}",
                hint=f"it has {', '.join(names) or 'none'}",
            )
    return {field.name: dataset[field.name] for field in task.fields_of(role)}


def _from_labeled(task: TaskSpec, role: Role, array: Any, num_frames: int) -> Any:
    """An array of xarray as the array or the mapping that it stands for: all channels of a role, or its only field."""
    fields = task.fields_of(role)
    dim = next((name for name in CHANNEL_DIMS if name in array.dims), None)
    if dim is None and len(fields) == 1:
        return {fields[0].name: array}
    units = sorted({field.unit for field in fields})
    unit = units[0] if len(units) == 1 else ""
    if not unit and getattr(array, "attrs", {}).get("units"):
        raise BundleError(
            f"{role} of task '{task.name}' states one unit, and its fields have several: {', '.join(units)}",
            hint="pass a dict of fields, or leave the unit out",
        )
    labels = {dim or CHANNEL_DIMS[0]: list(task.channel_names(role))}
    return _in_order(task, f"{role} of task '{task.name}'", array, num_frames, unit, labels)


def _in_order(task: TaskSpec, what: str, array: Any, num_frames: int, unit: str, labels: dict[str, list[str]]) -> Any:
    """The values of an array of xarray with its dimensions in our order, of the last `num_frames` frames.

    labels: further dimension that it has -> what its entries are called, in our order.
    """
    import xarray

    array = xarray.DataArray(array)  # a Variable has no labels
    check_units(what, array, unit)
    wanted = [d for d in ("sample",) if d in array.dims]
    if "time" in array.dims:
        have = array.sizes["time"]
        if have < num_frames:
            raise BundleError(f"{what} has {have} frames; task '{task.name}' takes {num_frames}")
        array = array.isel(time=slice(have - num_frames, have) if num_frames > 1 else have - 1)
        wanted += ["time"] if num_frames > 1 else []
    elif num_frames > 1:
        raise BundleError(f"{what} has no dimension 'time', and {num_frames} frames are needed")
    wanted += [*labels, *(axis.name for axis in task.axes)]
    if set(array.dims) != set(wanted):
        raise BundleError(f"{what} has dimensions {tuple(array.dims)}; expected {tuple(wanted)} in any order")
    for dim, names in labels.items():
        if dim in array.coords and array[dim].dtype.kind in "OU":
            stated = [str(name) for name in array[dim].values]
            if sorted(stated) != sorted(names):
                raise BundleError(f"'{dim}' of {what} is {', '.join(stated)[:80]}; expected {', '.join(names)}")
            array = array.sel({dim: names})
    return array.transpose(*wanted).values


def _time_step(task: TaskSpec, dt: float | None) -> float:
    if dt is None:
        return task.dt
    if task.steady:
        raise BundleError(f"task '{task.name}' is steady: it has no time step")
    dt = _number("dt", dt)
    low, high = task.dt_range or (task.dt, task.dt)
    if not low * (1 - 1e-3) <= dt <= high * (1 + 1e-3):
        trained = f"time steps from {low:g} to {high:g}" if low < high else f"a time step of {low:g}"
        raise BundleError(f"task '{task.name}' was trained with {trained}, not {dt:g}")
    return dt


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not np.isfinite(value):
        raise BundleError(f"{name} must be a number, not {str(value)[:40]!r}")
    return float(value)


def _stated_time(task: TaskSpec, state: Any, num_frames: int, step: float, notes: list[str]) -> float | None:
    """Time of the last given frame, where objects of xarray state it; else None."""
    parts = labeled_in("state", state).values()
    clocks = [part["time"] for part in parts if "time" in part.coords and part["time"].size]
    if any(not clock.variable.equals(clocks[0].variable) for clock in clocks):
        raise BundleError(f"the state fields of task '{task.name}' have different times")
    return _last_time(task, clocks[0], num_frames, step, notes) if clocks else None


def _last_time(task: TaskSpec, clock: Any, num_frames: int, step: float, notes: list[str]) -> float:
    """The last of some times. Frames that are given together must be one time step apart."""
    check_units("time", clock, task.time_unit)
    stamps = np.atleast_1d(clock.values)
    if stamps.dtype.kind in "fiumM" and not (stamps[1:] > stamps[:-1]).all():
        raise BundleError(f"times do not increase: they go from {stamps[0]} to {stamps[-1]}", hint="sort it by time")
    if stamps.dtype.kind not in "fiu" or not np.isfinite(stamps[-1]):
        notes.append("the time of the input is not a number: time starts at 0")
        return 0.0
    steps = np.diff(stamps[-num_frames:].astype(np.float64))
    if not task.steady and len(steps) and not np.allclose(steps, step, rtol=1e-3, atol=0):
        raise BundleError(
            f"the given frames are {steps[0]:g} apart in time, and not the time step of {step:g}",
            hint="" if task.dt_range is None else "say the time step of the input: dt=",
        )
    return float(stamps[-1])


def _common_space(task: TaskSpec, default: tuple[int, ...], *parts: Part | None) -> tuple[int, ...]:
    spaces = [part[0].shape[3:] for part in parts if part is not None]
    if len(set(spaces)) > 1:
        raise BundleError(
            f"state and static fields of task '{task.name}' are on different grids: {spaces[0]} and {spaces[1]}"
        )
    return tuple(spaces[0]) if spaces else default


def _common_samples(task: TaskSpec, *parts: Part | None) -> int:
    counts = {part[0].shape[0] for part in parts if part is not None and part[1]}
    if len(counts) > 1:
        raise BundleError(
            f"state and static fields of task '{task.name}' have different numbers of samples: {sorted(counts)}"
        )
    count = counts.pop() if counts else 1
    if count == 0:
        raise BundleError(f"no samples were given for task '{task.name}'")
    return count


def check_parameters(task: TaskSpec, names: Iterable[Any]) -> None:
    """Raises BundleError unless these are the names of all parameters of a task."""
    known, present = [p.name for p in task.parameters], list(names)
    for name in present:
        if name not in known:
            raise BundleError(
                f"task '{task.name}' has no parameter '{name}'{suggestion(str(name), known)}",
                hint=f"its parameters are {', '.join(known) or 'none'}",
            )
    for spec in task.parameters:
        if spec.name not in present:
            trained = f"it was trained between {spec.minimum:g} and {spec.maximum:g}"
            raise BundleError(
                f"parameter '{spec.name}' of task '{task.name}' is missing",
                hint=f"pass it in parameters=; {trained}",
                command_hint=f"give it with --parameter {spec.name}=VALUE; {trained}",
            )


def _parameters(task: TaskSpec, parameters: Any, num_samples: int) -> Float64:
    """(1 or B, P). Everything the task names must be given, by name."""
    parameters = {} if parameters is None else parameters
    if not isinstance(parameters, Mapping):
        example = task.parameters[0].name if task.parameters else "name"
        raise BundleError(f"parameters must be a dict such as {{'{example}': 1.0}}, not {type(parameters).__name__}")
    check_parameters(task, parameters)
    columns = []
    for spec in task.parameters:
        value, what = parameters[spec.name], f"parameter '{spec.name}'"
        if is_array(value) and value.dims not in ((), ("sample",)):
            raise BundleError(f"{what} has dimensions {value.dims}; expected none, or ('sample',)")
        check_units(what, value, spec.unit)
        values = np.atleast_1d(_array(value, what))
        # one sample and many values: the values make the samples
        allowed = {1, len(values) or 1} if num_samples == 1 else {1, num_samples}
        if values.ndim != 1 or len(values) not in allowed:
            raise BundleError(
                f"parameter '{spec.name}' must be one number or one for each of the {num_samples} samples, "
                f"not shape {values.shape}"
            )
        if spec.scale == "log" and (values.astype(np.float32) <= 0).any():
            raise BundleError(f"parameter '{spec.name}' must be above 0, not {values.min():g}")
        columns.append(values)
    rows = max([len(c) for c in columns], default=1)
    if any(len(c) not in (1, rows) for c in columns):
        raise BundleError(f"parameters of task '{task.name}' have different numbers of values")
    return np.stack([np.broadcast_to(c, rows) for c in columns], axis=1) if columns else np.zeros((1, 0))


def _expand(part: Part, num_samples: int) -> Tensor:
    tensor = torch.from_numpy(part[0]).float()
    return tensor.expand(num_samples, *tensor.shape[1:])
