"""What the dimensions of an array are: by the names and coordinates of its file, else by how its values change.

Neighbors in time and space resemble each other, neighboring trajectories do not: that is measured where names are
missing. Everything found here is a guess with a reason; `ups.data.guess` collects them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ups.config.description import CHANNEL, COMPONENT, RESERVED, TIME, TRAJECTORY
from ups.data.names_in_files import (
    CHANNELS,
    COMPONENTS,
    LENGTH_UNITS,
    PLACES,
    SPACES,
    TIME_UNITS,
    TIMES,
    TRAJECTORIES,
)
from ups.data.time_or_space import find_time
from ups.errors import ConfigError
from ups.formats.container import Container, Variable

MAX_CHANNELS = 12
# Where nothing else looks like trajectories, so many unrelated entries are fields and no trajectories.
FEW_CHANNELS = 4
# Adjacent entries that differ by more than this part of what independent ones would are called unrelated.
UNRELATED = 0.4
SAMPLED_VALUES = 1 << 18
LARGEST = float(np.finfo(np.float32).max)


@dataclass
class Dims:
    """role: what each dimension is ('space' is not yet named); coordinate: the array that belongs to each, or ''.

    seen: dimensions that only their values or their place tell apart. called: names that a person gave, or none.
    """

    role: list[str]
    coordinate: list[str]
    why: list[str]
    seen: set[int] = field(default_factory=set)
    rough: dict[int, float] = field(default_factory=dict)
    called: tuple[str, ...] = ()


def plain(name: str) -> str:
    """A name without what people add to the names of coordinates: `x-coordinate`, `time_axis`, `n_samples`."""
    name = name.split("/")[-1].lower()
    name = re.sub(r"[-_ ]?(coordinates?|coords?|axis|dim|grid|values|centers?|points)$", "", name)
    name = re.sub(r"^(dim|n|num|grid|coord)[-_]", "", name)
    return re.sub(r"^n(?=[xyzt]$)", "", name)


def role_of_name(name: str) -> str:
    """trajectory, time, channel, component, space or '' by a name alone."""
    word = plain(name)
    for role, words in (
        (TIME, TIMES),
        (TRAJECTORY, TRAJECTORIES),
        (CHANNEL, CHANNELS),
        (COMPONENT, COMPONENTS),
        ("space", SPACES),
    ):
        if word in words:
            return role
    return ""


def role_of_coordinate(variable: Variable) -> str:
    """The same for a coordinate: by its attributes `axis` and `standard_name`, its name, its units."""
    said = {key: str(value).lower() for key, value in variable.attributes.items() if isinstance(value, str)}
    if said.get("axis") == "t" or said.get("standard_name") == "time" or " since " in said.get("units", ""):
        return TIME
    if said.get("axis") in ("x", "y", "z"):
        return "space"
    unit = said.get("units", said.get("unit", ""))
    by_unit = TIME if unit in TIME_UNITS else "space" if unit in LENGTH_UNITS else ""
    return role_of_name(variable.name) or role_of_name(said.get("long_name", "")) or by_unit


def guess_dims(container: Container, variable: Variable) -> Dims:
    """What each dimension of the array of a field is."""
    rank = len(variable.shape)
    found = Dims([""] * rank, [""] * rank, [""] * rank)
    vectors = _vectors(container, variable)
    _by_name(variable, vectors, found)
    unknown = [i for i in range(rank) if not found.role[i]]
    if unknown:
        found.rough = roughness(container, variable)
        _by_coordinates(container, variable, vectors, found)
        found.seen |= {i for i in range(rank) if not found.role[i]}
        _find_trajectories(container, variable, vectors, found)
        _by_order(container, variable, vectors, found)
        _by_values(container, variable, found)
    return found


def given_dims(container: Container, variable: Variable, given: Sequence[str]) -> Dims:
    """What a person says that each dimension is, with the coordinates that belong to it. Raises ConfigError."""
    shape = variable.shape
    if len(given) != len(shape):
        raise ConfigError(
            f"array '{variable.name}' has {len(shape)} dimensions {shape}, and --dims names {len(given)}",
            hint="name every dimension in the order of the array: trajectory, time, channel, component or an axis",
        )
    odd = [name for name in given if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,31}", name) or given.count(name) > 1]
    if odd:
        raise ConfigError(f"--dims: '{odd[0]}' is named twice, or no name", hint="for example --dims trajectory,time,x")
    role = [name if name in (TRAJECTORY, TIME, CHANNEL, COMPONENT) else "space" for name in given]
    found = Dims(role, [""] * len(shape), ["as you said"] * len(shape), called=tuple(given))
    vectors = _vectors(container, variable)
    # By the name that was given, by what its own name or unit says, by its length alone.
    for fits in (
        lambda i, v: plain(v.name) == given[i].lower() or variable.dims[i] == v.name.split("/")[-1],
        lambda i, v: _role_of_vector(v) == role[i],
        lambda i, v: not role_of_coordinate(v) and shape.count(v.size) == 1,
    ):
        for i in (i for i, name in enumerate(role) if name in (TIME, "space")):
            sizes = (shape[i], shape[i] + 1) if role[i] == TIME else (shape[i],)
            for name, vector in vectors.items():
                free = not found.coordinate[i] and name not in found.coordinate
                if free and vector.size in sizes and fits(i, vector) and rises(container, name):
                    found.coordinate[i] = name
    return found


def _vectors(container: Container, variable: Variable) -> dict[str, Variable]:
    rows = {name: v.as_row for name, v in container.variables.items() if name != variable.name and v.size > 1}
    return {name: row for name, row in rows.items() if len(row.shape) == 1}


def _by_name(variable: Variable, vectors: Mapping[str, Variable], found: Dims) -> None:
    if variable.name.split("/")[0].split("@")[0] == "*" or "/*/" in variable.name:
        found.role[0], found.why[0] = TRAJECTORY, "the file has a group for each"
    for i, dim in enumerate(variable.dims):
        if found.role[i] or not dim:
            continue
        coordinate = next(
            (n for n in vectors if n.split("/")[-1] == dim and vectors[n].shape[0] == variable.shape[i]), ""
        )
        role = (role_of_coordinate(vectors[coordinate]) if coordinate else "") or role_of_name(dim)
        why = f"the file calls it '{dim}'" if role_of_name(dim) == role else f"by the attributes of '{dim}'"
        if role and (role == "space" or role not in found.role):
            found.role[i], found.why[i] = role, why
        if coordinate and role != TRAJECTORY:
            found.coordinate[i] = coordinate


def _by_coordinates(container: Container, variable: Variable, vectors: Mapping[str, Variable], found: Dims) -> None:
    """Arrays called as coordinates are, and as long as a dimension is."""
    taken = set(found.coordinate)
    for wanted in (TIME, "space"):
        names = [n for n in vectors if n not in taken and _role_of_vector(vectors[n]) == wanted]
        names.sort(key=lambda n: (SPACES.get(plain(n), 9), n))
        for name in names:
            size = vectors[name].shape[0]
            lengths = (size, size - 1) if wanted == TIME else (size,)
            places = [i for i, n in enumerate(variable.shape) if n in lengths and not found.role[i]]
            rivals = [n for n in names if vectors[n].shape[0] == size and n not in found.coordinate]
            if len(places) > max(1, len(rivals)):
                places = [i for i in places if found.rough.get(i, 0) < UNRELATED] or places
            if not places or (wanted == TIME and TIME in found.role) or not rises(container, name):
                continue
            place = next((i for i in places if variable.shape[i] == size), places[0])
            found.role[place], found.coordinate[place] = wanted, name
            found.why[place] = f"'{name}' has as many entries"
            others = [str(i + 1) for i in places if i != place]
            if others:
                found.seen.add(place)
                found.why[place] += f", and also fits dimension {' and '.join(others)}"


def _role_of_vector(variable: Variable) -> str:
    role = role_of_coordinate(variable)
    return role if role in (TIME, "space") else ""


def rises(container: Container, name: str) -> bool:
    """Whether an array rises or falls from each entry to the next."""
    steps = np.diff(container.whole(name).reshape(-1))
    return bool(np.isfinite(steps).all() and ((steps > 0).all() or (steps < 0).all()))


def _find_trajectories(container: Container, variable: Variable, vectors: Mapping[str, Variable], found: Dims) -> None:
    """Unrelated neighbors are trajectories, of several dimensions of them those with a number for each entry."""
    shape = variable.shape
    left = [i for i, role in enumerate(found.role) if not role]
    if TRAJECTORY in found.role or not left:
        return
    numbers = {i: _only_fit(vectors, shape, i) for i in left}
    mixed = [i for i in left if any(not rises(container, name) for name in numbers[i])]
    rough = [i for i in left if found.rough.get(i, 0) >= UNRELATED]
    large = [i for i in rough if shape[i] > FEW_CHANNELS] or (rough if len(rough) > 1 else [])
    if large:
        known = [i for i in large if i in mixed]
        best = known[0] if known else 0 if 0 in large else max(large, key=lambda i: found.rough[i])
        found.role[best], found.why[best] = TRAJECTORY, "its neighboring entries have nothing to do with each other"
        if known and len(large) > 1:
            found.why[best] += f", and '{numbers[best][0]}' has a number for each"
        return
    # A sweep over a parameter: neighbors resemble each other, but there is a number for each. Numbers that rise may as
    # well be a coordinate: then there must be other dimensions for time and space.
    rising = [i for i in left if numbers[i] and i not in mixed]
    needed = (TIME not in found.role) + ("space" not in found.role)
    if not mixed and (len(rising) > 1 or len(left) - 1 < needed):
        return
    for i in (*mixed, *rising)[:1]:
        found.role[i], found.why[i] = TRAJECTORY, "the file has one more number for each entry"


def _only_fit(vectors: Mapping[str, Variable], shape: tuple[int, ...], i: int) -> list[str]:
    """Rows of numbers whose names say nothing, and whose length is that of this dimension alone."""
    if shape.count(shape[i]) > 1:
        return []
    return [name for name, v in vectors.items() if v.shape == (shape[i],) and not _role_of_vector(v)]


def _by_order(container: Container, variable: Variable, vectors: Mapping[str, Variable], found: Dims) -> None:
    """What rises or falls along one dimension is its coordinate, whatever it is called; of what is still open."""
    for i, role in enumerate(found.role):
        if role not in ("", TIME, "space") or found.coordinate[i]:
            continue
        for name in _only_fit(vectors, variable.shape, i):
            named = vectors[name].dims[0] not in ("", variable.dims[i])
            if not named and not role_of_coordinate(vectors[name]) and rises(container, name):
                found.coordinate[i] = name
                break


def _by_values(container: Container, variable: Variable, found: Dims) -> None:
    """What is left: few entries are fields, then time is what the values show, else what stands before space."""
    shape = variable.shape
    left = [i for i, role in enumerate(found.role) if not role]
    spaces = found.role.count("space")
    room = 3 - spaces + (TIME not in found.role)
    small = [
        i
        for i in left
        if shape[i] <= MAX_CHANNELS
        and not found.coordinate[i]
        and (found.rough.get(i, 1) >= UNRELATED or len(left) > room)
    ]
    if small and CHANNEL not in found.role and COMPONENT not in found.role and (len(left) > 1 or spaces):
        i = min(small, key=lambda i: (shape[i], -i))
        found.role[i], found.why[i] = CHANNEL, f"it has only {shape[i]} entries: taken as separate fields"
        left.remove(i)
    where = {"time": "by its place: time stands before space", "space": "by its place: space stands last"}
    if variable.column_major:
        where = {"time": "by its place: time stands after space", "space": "by its place: space stands first"}
        left.reverse()
    if left and TIME not in found.role and (len(left) > 1 or spaces):
        first, shown = find_time(container, variable, found.role, left)
        if shown:
            where = {"time": shown, "space": "because another dimension looks like time"}
        found.role[first], found.why[first] = TIME, where["time"]
        left.remove(first)
    for i in left:
        found.role[i], found.why[i] = "space", where["space"]


def roughness(container: Container, variable: Variable) -> dict[int, float]:
    """For each dimension, the squared difference of neighbors relative to that of unrelated entries: 0 smooth, 1 none.

    Taken along every dimension from one block of the array, which is thinned but for the dimension itself.
    """
    found: dict[int, float] = {}
    shape = variable.shape
    for i in range(len(shape)):
        if shape[i] < 2:
            continue
        length = min(shape[i], 64)
        budget = max(1, SAMPLED_VALUES // length)
        others = [j for j in range(len(shape)) if j != i]
        each = max(2, int(budget ** (1 / max(1, len(others)))))
        region = [slice(0, n, 1) for n in shape]
        region[i] = slice(0, length, 1)
        for j in others:
            step = max(1, shape[j] // min(each, shape[j], 16))
            region[j] = slice(0, shape[j], step)
        values = np.moveaxis(container.decoded(variable.name, tuple(region), np.float64), i, -1)
        values = np.where(np.abs(values) < LARGEST, values, np.nan)  # one infinite value must not hide the others
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # of rows that are all NaN
            change = np.nanmean(np.diff(values, axis=-1) ** 2)
            spread = 2 * np.nanmean((values - np.nanmean(values, axis=-1, keepdims=True)) ** 2) * length / (length - 1)
        found[i] = float(change / spread) if spread > 0 and np.isfinite(change) else 0.0
    return found


def axis_names(names: list[str]) -> list[str]:
    """Names for the axes of space, in the order of the array: their own where they have one, else x, y, z."""
    own = [plain(name) for name in names]
    chosen = ["" if name in PLACES else re.sub(r"[^A-Za-z0-9_]", "_", name) for name in own]
    free = [letter for letter in "xyz" if letter not in chosen]
    result: list[str] = []
    for name in chosen:
        usable = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,31}", name) and name not in (*RESERVED, *result)
        result.append(name if usable else free.pop(0))
    return result


def labels_of(variable: Variable, main: Variable, labels: list[str]) -> list[str] | None:
    """What the dimensions of another array are, seen from the main one: by name, else by size; None if that fails."""
    by_name = {dim: label for dim, label in zip(main.dims, labels, strict=True) if dim}
    if variable.dims and all(dim in by_name for dim in variable.dims):
        return [by_name[dim] for dim in variable.dims]
    if variable.shape == main.shape:
        return labels
    known = {}
    for size, label in zip(main.shape, labels, strict=True):
        known[size] = "" if size in known else label
    found = [known.get(size, "") for size in variable.shape]
    if variable.shape[:1] != main.shape[:1] or "" in found:
        # The same without time, or without trajectory and time, in the same order.
        for left in ({TIME}, {TRAJECTORY}, {TRAJECTORY, TIME}, {TIME, CHANNEL}, {CHANNEL}):
            kept = [(n, label) for n, label in zip(main.shape, labels, strict=True) if label not in left]
            if variable.shape == tuple(n for n, _ in kept):
                return [label for _, label in kept]
    return found if "" not in found and len(set(found)) == len(found) else None
