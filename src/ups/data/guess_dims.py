"""What the dimensions of an array are: by the names and coordinates of its file, else by how its values change.

Neighbors in time and space resemble each other, neighboring trajectories do not: that is measured where names are
missing. Everything found here is a guess with a reason; `ups.data.guess` collects them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ups.config.description import CHANNEL, COMPONENT, RESERVED, TIME, TRAJECTORY
from ups.data.names_in_files import (
    CHANNELS,
    COMPONENTS,
    LENGTH_UNITS,
    SPACES,
    TIME_UNITS,
    TIMES,
    TRAJECTORIES,
)
from ups.formats.container import Container, Variable, decoded

MAX_CHANNELS = 12
# Where nothing else looks like trajectories, so many unrelated entries are fields and no trajectories.
FEW_CHANNELS = 4
# Adjacent entries that differ by more than this part of what independent ones would are called unrelated.
UNRELATED = 0.4
SAMPLED_VALUES = 1 << 18


@dataclass
class Dims:
    """role: what each dimension is ('space' is not yet named); coordinate: the array that belongs to each, or ''.

    seen: dimensions that only their values or their place tell apart.
    """

    role: list[str]
    coordinate: list[str]
    why: list[str]
    seen: set[int] = field(default_factory=set)
    rough: dict[int, float] = field(default_factory=dict)


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
    return role_of_name(variable.name) or (TIME if unit in TIME_UNITS else "space" if unit in LENGTH_UNITS else "")


def guess_dims(container: Container, variable: Variable) -> Dims:
    """What each dimension of the array of a field is."""
    rank = len(variable.shape)
    found = Dims([""] * rank, [""] * rank, [""] * rank)
    vectors = {
        name: v for name, v in container.variables.items() if name != variable.name and len(v.shape) == 1 and v.size > 1
    }
    _by_name(variable, vectors, found)
    unknown = [i for i in range(rank) if not found.role[i]]
    if unknown:
        found.rough = roughness(container, variable)
        _by_coordinates(container, variable, vectors, found)
        found.seen |= {i for i in range(rank) if not found.role[i]}
        _by_values(variable, vectors, found)
    return found


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
            if len(places) > 1:
                places = [i for i in places if found.rough.get(i, 0) < UNRELATED] or places
            if not places or (wanted == TIME and TIME in found.role) or not _rises(container, name):
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


def _rises(container: Container, name: str) -> bool:
    steps = np.diff(container.whole(name))
    return bool(np.isfinite(steps).all() and ((steps > 0).all() or (steps < 0).all()))


def _by_values(variable: Variable, vectors: Mapping[str, Variable], found: Dims) -> None:
    """What is left: unrelated neighbors are trajectories, few entries are fields, then time comes before space."""
    rank, shape = len(variable.shape), variable.shape
    left = [i for i in range(rank) if not found.role[i]]
    if TRAJECTORY not in found.role:
        rough = [i for i in left if found.rough.get(i, 0) >= UNRELATED]
        large = [i for i in rough if shape[i] > FEW_CHANNELS] or (rough if len(rough) > 1 else [])
        if large:
            best = 0 if 0 in large else max(large, key=lambda i: found.rough[i])
            found.role[best], found.why[best] = TRAJECTORY, "its neighboring entries have nothing to do with each other"
        else:
            # A sweep over a parameter: neighbors resemble each other, but there is a number for each.
            lone = [
                i
                for i in left
                if sum(n == shape[i] for n in shape) == 1
                and any(v.shape == (shape[i],) and not _role_of_vector(v) for v in vectors.values())
            ]
            if lone:
                found.role[lone[0]], found.why[lone[0]] = TRAJECTORY, "the file has one more number for each entry"
    left = [i for i in range(rank) if not found.role[i]]
    spaces = found.role.count("space")
    room = 3 - spaces + (TIME not in found.role)
    small = [i for i in left if shape[i] <= MAX_CHANNELS and (found.rough.get(i, 1) >= UNRELATED or len(left) > room)]
    if small and CHANNEL not in found.role and COMPONENT not in found.role and (len(left) > 1 or spaces):
        i = min(small, key=lambda i: (shape[i], -i))
        found.role[i], found.why[i] = CHANNEL, f"it has only {shape[i]} entries: taken as separate fields"
        left.remove(i)
    if left and TIME not in found.role and (len(left) > 1 or spaces):
        found.role[left[0]], found.why[left[0]] = TIME, "by its place: time stands before space"
        left = left[1:]
    for i in left:
        found.role[i], found.why[i] = "space", "by its place: space stands last"


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
        values = decoded(variable, np.asarray(container.read(variable.name, tuple(region)), np.float64))
        values = np.moveaxis(values, i, -1)
        with np.errstate(invalid="ignore"):
            change = np.nanmean(np.diff(values, axis=-1) ** 2)
            spread = 2 * np.nanmean((values - np.nanmean(values, axis=-1, keepdims=True)) ** 2) * length / (length - 1)
        found[i] = float(change / spread) if spread > 0 and np.isfinite(change) else 0.0
    return found


def axis_names(names: list[str]) -> list[str]:
    """Names for the axes of space, in the order of the array: their own where they have one, else x, y, z."""
    chosen = [re.sub(r"[^A-Za-z0-9_]", "_", plain(name)) if name else "" for name in names]
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
