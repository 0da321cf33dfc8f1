"""What the dimensions of an array are: by the names and coordinates of its file, else by how its values change.

Neighbors in time and space resemble each other, neighboring trajectories do not: that is measured where names are
missing. Of several smooth dimensions time is the one that leaves space with ends that look like those of a domain:
along space a field is periodic, fixed or flat at the ends, and its mean over space often does not change. Where the
values do not decide, time comes before space, as in most files. Every result is a guess with a reason;
`ups.data.guess` collects them.

Meshes, scattered points and meshgrids look like fields and are refused, with what to do, unless the user describes the
dimensions (--dims or a task.yaml).
"""

from __future__ import annotations

import re
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from ups.config.description import CHANNEL, COMPONENT, RESERVED, TIME, TRAJECTORY
from ups.data.guess_physics import Sample, guess_boundary, guess_conserved
from ups.errors import ConfigError, DataError
from ups.formats.container import MAX_SMALL_VALUES, Container, Variable


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


TIMES = _words(
    "t time times frame frames step steps timestep timesteps snapshot snapshots tau date iteration"
) | _words("zeit zeiten temps tiempo tempo tijd czas aika vremya zaman jikan shijian")
TRAJECTORIES = _words(
    "n trajectory trajectories traj sample samples simulation simulations sim sims run runs realization realizations "
    "ensemble member members number batch b case cases seed ic experiment experiments index"
)
# Place in other languages: such an axis is called x.
PLACES = _words(
    "ort orte ortskoordinate raum abszisse lieu espace abscisse lugar espacio posicion posición luogo spazio posizione "
    "espaco posicao plaats ruimte miejsce polozenie paikka mesto konum"
)
# Which axis of a right-handed picture a name usually means.
SPACES = {
    **dict.fromkeys(
        ("x", "xs", "xx", "xc", "i", "lon", "longitude", "east", "r", "radius", "position", "space", "s"), 0
    ),
    **dict.fromkeys(PLACES, 0),
    **dict.fromkeys(("y", "ys", "yy", "yc", "j", "lat", "latitude", "north", "theta"), 1),
    **dict.fromkeys(("z", "zs", "zz", "zc", "k", "height", "depth", "level", "lev", "altitude", "phi"), 2),
}
CHANNELS = _words("c ch channel channels field fields variable variables var vars species")
COMPONENTS = _words("component components comp vector direction")
TIME_UNITS = _words("s sec secs second seconds ms us ns min minute minutes h hr hour hours day days d year years yr")
LENGTH_UNITS = _words("m meter meters mm cm um nm km degrees_north degrees_east degree degrees deg rad radian radians")
# Numbers about how a file was made: named, and no parameter of an equation.
ABOUT_THE_FILE = _words("seed random_seed version format_version file_version id")


def is_about_the_file(name: str, value: object, sizes: set[int]) -> bool:
    """Whether a number is about the file: a version, a seed, the size of a dimension."""
    short = name.split("/")[-1].lower()
    count = re.fullmatch(r"(n|num|number_of|n_|num_)_?[a-z]*", short) is not None
    return (
        short in ABOUT_THE_FILE
        or short.startswith("grib_")
        or (count and isinstance(value, float) and value.is_integer() and int(value) in sizes)
    )


def plain_name(name: str, default: str) -> str:
    """A name that a task can have: without spaces, Greek letters written out."""
    written = "".join(c if c.isascii() else unicodedata.name(c, "").split(" ")[-1].lower() for c in name)
    text = re.sub(r"[^A-Za-z0-9_.-]", "_", written)[:60].strip("_.-") or default
    if text.lower() in RESERVED:
        text = f"{text}_"
    return text if re.match(r"[A-Za-z_]", text) else f"{default}_{text}"


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

    seen: dimensions that only their values or their position tell apart. called: names that the user gave, or none.
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
    dims = Dims([""] * rank, [""] * rank, [""] * rank)
    vectors = _vectors(container, variable)
    _by_name(variable, vectors, dims)
    unknown = [i for i in range(rank) if not dims.role[i]]
    if unknown:
        dims.rough = roughness(container, variable)
        _by_coordinates(container, variable, vectors, dims)
        dims.seen |= {i for i in range(rank) if not dims.role[i]}
        _find_trajectories(container, variable, vectors, dims)
        _by_order(container, variable, vectors, dims)
        _by_values(container, variable, dims)
    return dims


def given_dims(container: Container, variable: Variable, names: Sequence[str]) -> Dims:
    """What the user says that each dimension is, with the coordinates that belong to it. Raises ConfigError."""
    shape = variable.shape
    if len(names) != len(shape):
        raise ConfigError(
            f"array '{variable.name}' has {len(shape)} dimensions {shape}, and --dims names {len(names)}",
            hint="name every dimension in the order of the array: trajectory, time, channel, component or an axis",
        )
    odd = [name for name in names if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,31}", name) or names.count(name) > 1]
    if odd:
        raise ConfigError(f"--dims: '{odd[0]}' is named twice, or no name", hint="for example --dims trajectory,time,x")
    role = [name if name in (TRAJECTORY, TIME, CHANNEL, COMPONENT) else "space" for name in names]
    result = Dims(role, [""] * len(shape), ["as you said"] * len(shape), called=tuple(names))
    vectors = _vectors(container, variable)
    # By the name that was given, by what its own name or unit says, by its length alone.
    for fits in (
        lambda i, v: plain(v.name) == names[i].lower() or variable.dims[i] == v.name.split("/")[-1],
        lambda i, v: _role_of_vector(v) == role[i],
        lambda i, v: not role_of_coordinate(v) and shape.count(v.size) == 1,
    ):
        for i in (i for i, name in enumerate(role) if name in (TIME, "space")):
            sizes = (shape[i], shape[i] + 1) if role[i] == TIME else (shape[i],)
            for name, vector in vectors.items():
                free = not result.coordinate[i] and name not in result.coordinate
                if free and vector.size in sizes and fits(i, vector) and rises(container, name):
                    result.coordinate[i] = name
    return result


def _vectors(container: Container, variable: Variable) -> dict[str, Variable]:
    rows = {name: v.as_row for name, v in container.variables.items() if name != variable.name and v.size > 1}
    return {name: row for name, row in rows.items() if len(row.shape) == 1}


def _by_name(variable: Variable, vectors: Mapping[str, Variable], dims: Dims) -> None:
    if variable.name.split("/")[0].split("@")[0] == "*" or "/*/" in variable.name:
        dims.role[0], dims.why[0] = TRAJECTORY, "the file has a group for each"
    for i, dim in enumerate(variable.dims):
        if dims.role[i] or not dim:
            continue
        coordinate = next(
            (n for n in vectors if n.split("/")[-1] == dim and vectors[n].shape[0] == variable.shape[i]), ""
        )
        role = (role_of_coordinate(vectors[coordinate]) if coordinate else "") or role_of_name(dim)
        why = f"the file calls it '{dim}'" if role_of_name(dim) == role else f"by the attributes of '{dim}'"
        if role and (role == "space" or role not in dims.role):
            dims.role[i], dims.why[i] = role, why
        if coordinate and role != TRAJECTORY:
            dims.coordinate[i] = coordinate


def _by_coordinates(container: Container, variable: Variable, vectors: Mapping[str, Variable], dims: Dims) -> None:
    """Arrays called as coordinates are, and as long as a dimension is."""
    used = set(dims.coordinate)
    for wanted in (TIME, "space"):
        names = [n for n in vectors if n not in used and _role_of_vector(vectors[n]) == wanted]
        names.sort(key=lambda n: (SPACES.get(plain(n), 9), n))
        for name in names:
            size = vectors[name].shape[0]
            lengths = (size, size - 1) if wanted == TIME else (size,)
            indices = [i for i, n in enumerate(variable.shape) if n in lengths and not dims.role[i]]
            rivals = [n for n in names if vectors[n].shape[0] == size and n not in dims.coordinate]
            if len(indices) > max(1, len(rivals)):
                indices = [i for i in indices if dims.rough.get(i, 0) < UNRELATED] or indices
            if not indices or (wanted == TIME and TIME in dims.role) or not rises(container, name):
                continue
            index = next((i for i in indices if variable.shape[i] == size), indices[0])
            dims.role[index], dims.coordinate[index] = wanted, name
            dims.why[index] = f"'{name}' has as many entries"
            others = [str(i + 1) for i in indices if i != index]
            if others:
                dims.seen.add(index)
                dims.why[index] += f", and also fits dimension {' and '.join(others)}"


def _role_of_vector(variable: Variable) -> str:
    role = role_of_coordinate(variable)
    return role if role in (TIME, "space") else ""


def rises(container: Container, name: str) -> bool:
    """Whether an array rises or falls from each entry to the next."""
    steps = np.diff(container.whole(name).reshape(-1))
    return bool(np.isfinite(steps).all() and ((steps > 0).all() or (steps < 0).all()))


def _find_trajectories(container: Container, variable: Variable, vectors: Mapping[str, Variable], dims: Dims) -> None:
    """Unrelated neighbors are trajectories, of several dimensions of them those with a number for each entry."""
    shape = variable.shape
    left = [i for i, role in enumerate(dims.role) if not role]
    if TRAJECTORY in dims.role or not left:
        return
    numbers = {i: _only_fit(vectors, shape, i) for i in left}
    mixed = [i for i in left if any(not rises(container, name) for name in numbers[i])]
    rough = [i for i in left if dims.rough.get(i, 0) >= UNRELATED]
    large = [i for i in rough if shape[i] > FEW_CHANNELS] or (rough if len(rough) > 1 else [])
    if large:
        known = [i for i in large if i in mixed]
        best = known[0] if known else 0 if 0 in large else max(large, key=lambda i: dims.rough[i])
        dims.role[best], dims.why[best] = TRAJECTORY, "its neighboring entries have nothing to do with each other"
        if known and len(large) > 1:
            dims.why[best] += f", and '{numbers[best][0]}' has a number for each"
        return
    # A sweep over a parameter: neighbors resemble each other, but there is a number for each. Numbers that rise may as
    # well be a coordinate: then there must be other dimensions for time and space.
    rising = [i for i in left if numbers[i] and i not in mixed]
    needed = (TIME not in dims.role) + ("space" not in dims.role)
    if not mixed and (len(rising) > 1 or len(left) - 1 < needed):
        return
    for i in (*mixed, *rising)[:1]:
        dims.role[i], dims.why[i] = TRAJECTORY, "the file has one more number for each entry"


def _only_fit(vectors: Mapping[str, Variable], shape: tuple[int, ...], i: int) -> list[str]:
    """Rows of numbers whose names say nothing, and whose length is that of this dimension alone."""
    if shape.count(shape[i]) > 1:
        return []
    return [name for name, v in vectors.items() if v.shape == (shape[i],) and not _role_of_vector(v)]


def _by_order(container: Container, variable: Variable, vectors: Mapping[str, Variable], dims: Dims) -> None:
    """What rises or falls along one dimension is its coordinate, whatever it is called; of what is still open."""
    for i, role in enumerate(dims.role):
        if role not in ("", TIME, "space") or dims.coordinate[i]:
            continue
        for name in _only_fit(vectors, variable.shape, i):
            named = vectors[name].dims[0] not in ("", variable.dims[i])
            if not named and not role_of_coordinate(vectors[name]) and rises(container, name):
                dims.coordinate[i] = name
                break


def _by_values(container: Container, variable: Variable, dims: Dims) -> None:
    """What is left: few entries are fields, then time is what the values show, else what stands before space."""
    shape = variable.shape
    left = [i for i, role in enumerate(dims.role) if not role]
    spaces = dims.role.count("space")
    room = 3 - spaces + (TIME not in dims.role)
    small = [
        i
        for i in left
        if shape[i] <= MAX_CHANNELS
        and not dims.coordinate[i]
        and (dims.rough.get(i, 1) >= UNRELATED or len(left) > room)
    ]
    if small and CHANNEL not in dims.role and COMPONENT not in dims.role and (len(left) > 1 or spaces):
        i = min(small, key=lambda i: (shape[i], -i))
        dims.role[i], dims.why[i] = CHANNEL, f"it has only {shape[i]} entries: taken as separate fields"
        left.remove(i)
    where = {"time": "by its place: time stands before space", "space": "by its place: space stands last"}
    if variable.column_major:
        where = {"time": "by its place: time stands after space", "space": "by its place: space stands first"}
        left.reverse()
    if left and TIME not in dims.role and (len(left) > 1 or spaces):
        first, shown = find_time(container, variable, dims.role, left)
        if shown:
            where = {"time": shown, "space": "because another dimension looks like time"}
        dims.role[first], dims.why[first] = TIME, where["time"]
        left.remove(first)
    for i in left:
        dims.role[i], dims.why[i] = "space", where["space"]


def roughness(container: Container, variable: Variable) -> dict[int, float]:
    """For each dimension, the squared difference of neighbors relative to that of unrelated entries: 0 smooth, 1 none.

    Taken along every dimension from one block of the array, which is thinned but for the dimension itself.
    """
    ratios: dict[int, float] = {}
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
        ratios[i] = float(change / spread) if spread > 0 and np.isfinite(change) else 0.0
    return ratios


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
    by_size = [known.get(size, "") for size in variable.shape]
    if variable.shape[:1] != main.shape[:1] or "" in by_size:
        # The same without time, or without trajectory and time, in the same order.
        for left in ({TIME}, {TRAJECTORY}, {TRAJECTORY, TIME}, {TIME, CHANNEL}, {CHANNEL}):
            pairs = [(n, label) for n, label in zip(main.shape, labels, strict=True) if label not in left]
            if variable.shape == tuple(n for n, _ in pairs):
                return [label for _, label in pairs]
    return by_size if "" not in by_size and len(set(by_size)) == len(by_size) else None


MAX_TRAJECTORIES = 6
MAX_FRAMES = 12
MAX_VALUES = 1 << 23


def find_time(
    container: Container, variable: Variable, role: Sequence[str], open_dims: Sequence[int]
) -> tuple[int, str]:
    """The dimension among those that are still open, and what shows it; no words where only its place speaks for it."""
    first = open_dims[0]
    if len(open_dims) < 2:
        return first, ""
    scores = {i: _score(container, variable, role, i) for i in open_dims}
    best = max(open_dims, key=lambda i: scores[i])  # the first of equal ones
    if scores[best] <= scores[first]:
        return first, ""
    return best, "the others have ends like those of space"


def _score(container: Container, variable: Variable, role: Sequence[str], time: int) -> tuple[int, int]:
    """(axes at whose ends something is seen, whether a mean stays) if this dimension were time."""
    fixed = [i for i, name in enumerate(role) if name == TRAJECTORY]
    fields = [i for i, name in enumerate(role) if name in (CHANNEL, COMPONENT)]
    space = [i for i in range(len(role)) if i not in (time, *fixed, *fields)]
    wanted = {**dict.fromkeys(fixed, MAX_TRAJECTORIES), time: MAX_FRAMES}
    region = tuple(slice(0, n, -(-n // wanted[i]) if i in wanted else 1) for i, n in enumerate(variable.shape))
    shape = [len(range(n)[part]) for n, part in zip(variable.shape, region, strict=True)]
    if not space or int(np.prod(shape, dtype=np.int64)) > MAX_VALUES:
        return 0, 0
    values = container.decoded(variable.name, region, np.float64)
    values = values.transpose(*fixed, time, *fields, *space)
    rows = shape[fixed[0]] if fixed else 1
    sample = Sample(values.reshape(rows, shape[time], -1, *(shape[i] for i in space)))
    guesses = [guess_boundary(sample, axis) for axis in range(len(space))]
    seen = sum(guess.boundary != "unknown" and (guess.repeated_end or not guess.unsure) for guess in guesses)
    return seen, int(bool(guess_conserved(sample)))


_CELLS = frozenset(
    {"cells", "connectivity", "topology", "triangles", "tri", "tets", "elements", "faces", "simplices", "edge_index"}
)
_POINTS = frozenset({"points", "nodes", "vertices", "coords", "coordinates", "positions", "pos", "xy", "xyz"})
_AXES = {"x": 0, "y": 1, "z": 2, "lon": 0, "lat": 1, "longitude": 0, "latitude": 1}
_MESH_HINT = (
    "interpolate the fields to a grid, with scipy.interpolate.griddata, and save them as (trajectory, time, x, y) with "
    "x and y; if they are on a grid already, say what each dimension is, as in --dims trajectory,time,x"
)


def refuse_mesh(container: Container) -> None:
    """Raise DataError for a file with an array that connects points to cells."""
    for name, v in container.variables.items():
        if _connects(container, v, name.split("/")[-1].lower() in _CELLS):
            what = f"{container.label} holds a mesh, which is not read: '{name}' {v.shape} connects its points"
            raise DataError(what, hint=_MESH_HINT)


def _connects(container: Container, variable: Variable, named: bool) -> bool:
    """Whether an array holds numbers of points; without a name that says so, each of as many as another array has."""
    cells = (len(variable.shape) == 2 and 2 <= min(variable.shape) <= 8) or (named and len(variable.shape) == 1)
    if not cells or not 8 <= variable.size <= MAX_SMALL_VALUES:
        return False
    values = container.whole(variable.name)
    if (values != np.round(values)).any() or values.min() < 0:
        return False
    sizes = {n for v in container.variables.values() if v is not variable for n in v.shape}
    count = len(np.unique(values))
    all_used = values.min() <= 1 and count == np.ptp(values) + 1 and count > 16
    return named or bool(all_used and count in sizes and max(variable.shape) not in sizes)


def refuse_scattered(container: Container, main: Variable, dims: Dims) -> None:
    """Raise DataError for a file in which one dimension of a field has several coordinates."""
    arrays = container.variables.items()
    gridded = any(role == "space" and name for role, name in zip(dims.role, dims.coordinate, strict=True))
    for role, size in zip(dims.role, main.shape, strict=True):
        points = role == "space" and dims.role.count("space") == 1
        # Points in no order look like trajectories.
        points |= role == TRAJECTORY and not gridded and (len(main.shape) == 2 or size == max(main.shape))
        if not points or main.shape.count(size) > 1 or size < 8:
            continue
        rows = {plain(n): n for n, v in arrays if v.as_row.shape == (size,) and plain(n) in _AXES}
        named = [(n, sorted(v.shape)) for n, v in arrays if n.split("/")[-1].lower() in _POINTS]
        tables = [n for n, shape in named if shape in ([2, size], [3, size])]
        if tables or len({_AXES[name] for name in rows}) > 1:
            raise DataError(
                f"{container.label} holds scattered points, which are not read: {', '.join(tables or rows.values())} "
                f"are coordinates of the {size} entries of one dimension of '{main.name}' {main.shape}",
                hint=_MESH_HINT,
            )


def refuse_meshgrid(container: Container) -> None:
    """Raise DataError for coordinates that are stored for every point of a grid of several axes."""
    tables = {
        n: v.shape for n, v in container.variables.items() if plain(n) in _AXES and min(v.shape[:2], default=1) > 1
    }
    if len(tables) > 1 and len({*tables.values()}) == 1 and len(next(iter(tables.values()))) > 1:
        raise DataError(
            f"{container.label}: {', '.join(tables)} have a value for each point of a grid, and coordinates are one "
            "vector for each axis",
            hint="on a rectangular grid save x = X[:, 0] and y = Y[0, :]; interpolate fields on a curved grid to a "
            "rectangular one, with scipy.interpolate.griddata",
        )
