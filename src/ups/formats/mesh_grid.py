"""Files of points, seen as arrays on a grid over the bounding box of all of them.

Each node of the grid that lies in the domain, or at a corner of a cell with a point in it, gets the value of the plane
through its nearest points. Other nodes have no value (NaN). The weights are computed once for each geometry and kept in
the user's cache. `distance` is the signed distance to the boundary, positive inside; `boundary_K` is the distance to
the boundary points of kind K, at most the size of the box.

N points, D axes, M nodes with a value, K neighbors of each.
"""

from __future__ import annotations

import functools
import hashlib
import io
import itertools
import math
import re
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ups.buckets.path import BucketPath, data_path, natural
from ups.config.description import DescribedField, TaskDescription, read_description
from ups.errors import DataError, MissingExtraError
from ups.formats.base import SPLITS, Array, Int64
from ups.formats.container import Attribute, Container, Variable, open_numpy
from ups.formats.hdf5 import Region
from ups.formats.mesh_files import MESH_SUFFIXES, MeshFile, read_header, read_mesh_file
from ups.record.files import write_file_atomically
from ups.record.run_dir import cache_directory
from ups.spec.batch import Float32, Float64
from ups.spec.task import TaskSpec

AXES = ("x", "y", "z")

OUTSIDE, DISTANCE = "outside", "distance"
_KIND = re.compile(r"boundary_(\d{1,6})")
# Nodes for each point of the largest file, what each axis has a multiple of, the most of one, and the part of the box
# that the grid is larger on each side, for geometries that are a little larger than those that were seen.
_NODES_PER_POINT, _MULTIPLE, _MOST_NODES, _MARGIN = 2.0, 8, {1: 1024, 2: 256, 3: 64}, 0.02
# Nearest points of a node, by the number of axes.
_NEIGHBORS = {1: 4, 2: 8, 3: 14}
# Simplices of each kind of cell, by its first nodes; nodes in the middle of edges are not used.
_SIMPLICES: dict[str, list[tuple[int, ...]]] = {
    "line": [(0, 1)],
    "triangle": [(0, 1, 2)],
    "quad": [(0, 1, 2), (0, 2, 3)],
    "tetra": [(0, 1, 2, 3)],
    "pyramid": [(0, 1, 2, 4), (0, 2, 3, 4)],
    "wedge": [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5)],
    "hexahedron": [(0, 1, 2, 6), (0, 2, 3, 6), (0, 3, 7, 6), (0, 7, 4, 6), (0, 4, 5, 6), (0, 5, 1, 6)],
}
_VERSION = b"1"  # of what is kept


@dataclass(frozen=True, slots=True)
class Box:
    """A regular grid. kinds: of boundary points that are told from others."""

    start: tuple[float, ...]
    extent: tuple[float, ...]
    nodes: tuple[int, ...]
    kinds: tuple[int, ...] = ()

    @property
    def spacing(self) -> Float64:
        return np.asarray(self.extent, np.float64) / self.nodes

    def coordinates(self, axis: int) -> Float64:
        return np.asarray(self.start[axis] + np.arange(self.nodes[axis]) * self.spacing[axis], np.float64)

    def in_nodes(self, points: Float64) -> Float64:
        """Points (N, D) in units of nodes."""
        return np.asarray((points - self.start) / self.spacing, np.float64)


@dataclass(frozen=True, slots=True)
class GridWeights:
    """From the points of a geometry to the grid. nodes (M,): flat, those with a value. index, weights (M, K).
    distances: (1 + kinds, *nodes of the box)."""

    nodes: Int64
    index: Int64
    weights: Float32
    distances: Float32

    def onto(self, values: Array, space: tuple[int, ...]) -> Array:
        """Values (..., N) -> (..., *S), NaN where there is none."""
        out = np.full((*values.shape[:-1], math.prod(space)), np.nan)
        out[..., self.nodes] = (values[..., self.index] * self.weights).sum(-1)
        return out.reshape(*values.shape[:-1], *space)


def box_of(paths: Sequence[str | Path]) -> Box:
    """The grid for files: over the box of all points, with nodes by the points of the largest file."""
    low: Float64 | None = None
    most, kinds = 0, set[int]()
    for path in paths:
        mesh = read_mesh_file(path)
        first, last = mesh.points.min(axis=0), mesh.points.max(axis=0)
        if low is None:
            low, high = first, last
        if len(first) != len(low):
            raise DataError(f"{path} has points in {len(first)}D, and {paths[0]} in {len(low)}D")
        low, high = np.minimum(low, first), np.maximum(high, last)
        most = max(most, len(mesh.points))
        kinds |= set() if mesh.boundary is None else {int(kind) for kind in np.unique(mesh.boundary) if kind > 0}
    assert low is not None
    size, dims = high - low, len(low)
    if not (size > 0).all():
        raise DataError(
            f"{paths[0]}: all points lie on one line or plane: axis {AXES[int(np.argmin(size))]} has no size"
        )
    low, size = low - _MARGIN * size, size * (1 + 2 * _MARGIN)
    step = (math.prod(size) / (_NODES_PER_POINT * most)) ** (1 / dims)
    nodes = [int(np.clip(-(-(n / step + 1) // _MULTIPLE) * _MULTIPLE, 8, _MOST_NODES[dims])) for n in size]
    extent = [float(f"{s * n / (n - 1):.9g}") for s, n in zip(size, nodes, strict=True)]
    return Box(tuple(float(f"{v:.9g}") for v in low), tuple(extent), tuple(nodes), tuple(sorted(kinds)))


def box_in(description: TaskDescription) -> Box | None:
    """The grid that a description has; None if it has none."""
    axes = description.axes
    if any(axis.nodes is None or axis.start is None or axis.extent is None for axis in axes):
        return None
    arrays = [found for f in description.fields if (found := _KIND.fullmatch(f.dataset or f.name))]
    return Box(
        tuple(axis.start or 0.0 for axis in axes),
        tuple(axis.extent or 1.0 for axis in axes),
        tuple(axis.nodes or 2 for axis in axes),
        tuple(sorted(int(found[1]) for found in arrays)),
    )


def completed(description: TaskDescription, box: Box) -> TaskDescription:
    """The description with the grid, and with the static fields that are made from the points."""
    axes = [
        axis.model_copy(update={"nodes": n, "start": start, "extent": extent, "dataset": None})
        for axis, n, start, extent in zip(description.axes, box.nodes, box.start, box.extent, strict=True)
    ]
    known = {field.dataset or field.name for field in description.fields}
    made = [DescribedField(name=name, role="static") for name in _made(box) if name not in known]
    mask = description.mask or OUTSIDE
    return description.model_copy(update={"axes": axes, "fields": [*description.fields, *made], "mask": mask})


def on_trained_grid(
    description: TaskDescription | str | None, path: str | Path, task: TaskSpec, grid: Sequence[Float64]
) -> TaskDescription | str | None:
    """The description of a file of points, with the grid that a model was trained on; any other as it is."""
    if description is None or not (files := mesh_files(data_path(path))):
        return description
    said = read_description(description) if isinstance(description, str) else description
    if read_header(files[0]).num_frames == 1:  # which says nothing about the time step
        said = said.model_copy(update={"dt": task.dt})
    extent = tuple(float((c[1] - c[0]) * len(c)) for c in grid)
    found = [kind for name in task.channel_names("static") if (kind := _KIND.fullmatch(name))]
    kinds = tuple(sorted(int(kind[1]) for kind in found))
    return completed(said, Box(tuple(float(c[0]) for c in grid), extent, tuple(map(len, grid)), kinds))


def _made(box: Box) -> list[str]:
    """Arrays that are made from the points."""
    return [OUTSIDE, DISTANCE, *(f"boundary_{kind}" for kind in box.kinds)]


def is_mesh_file(path: Path) -> bool:
    """Whether a file holds points in one to three dimensions, and so no grid."""
    if path.suffix in MESH_SUFFIXES[1:] or not path.is_file():
        return path.is_file()
    try:
        shape = open_numpy(path).variables["points"].shape if path.suffix == ".npz" else ()
    except (DataError, KeyError):
        return False
    return len(shape) == 2 and 1 <= shape[1] <= 3


def mesh_files(path: Path) -> list[Path]:
    """The files of points of a folder, or of its folders train, valid and test; the file itself; none of a grid."""
    if isinstance(path, BucketPath):
        return []
    if not path.is_dir():
        return [path] if is_mesh_file(path) else []
    folders = [part for split in SPLITS if (part := path / split).is_dir()] or [path]
    files = [
        f for d in folders for f in sorted(d.iterdir(), key=lambda f: natural(f.name)) if f.suffix in MESH_SUFFIXES
    ]
    return files if files and is_mesh_file(files[0]) else []


def open_meshes(files: Sequence[Path], description: TaskDescription | None) -> list[Container]:
    """The files on the grid that a description has, else on one over all of them."""
    box = None if description is None else box_in(description)
    box = box or box_of(files)
    names = AXES[: len(box.nodes)] if description is None else tuple(axis.name for axis in description.axes)
    asked = [] if description is None else [f.dataset or f.name for f in description.fields if f.role == "target"]
    return [MeshContainer(str(file), box, names, asked) for file in files]


class MeshContainer(Container):
    """One file of points as arrays on the grid of a box."""

    def __init__(self, path: str, box: Box, names: tuple[str, ...], asked: Sequence[str] = ()) -> None:
        """names: of the axes. asked: targets; a file without is one to predict them for, and has NaN."""
        self.header, self.box, self._names, self._key = read_header(path), box, names, file_state(path)
        if not self.header.num_dims == len(box.nodes) == len(names):
            raise DataError(f"{path} has points in {self.header.num_dims}D, and there are {len(names)} axes")
        variables = {name: Variable(name, (n,), (name,)) for name, n in zip(names, box.nodes, strict=True)}
        variables |= {name: Variable(name, box.nodes, names) for name in _made(box)}
        # What does not change comes first: `ups init` takes the last field of a steady task for the one that is asked.
        for name, (moving, components) in sorted(self.header.fields.items(), key=lambda field: field[1][0]):
            shape, dims = box.nodes, names
            if moving:
                shape, dims = (self.header.num_frames, *shape), ("time", *dims)
            if components:
                kind = "component" if components == len(names) else "channel"
                shape, dims = (*shape, components), (*dims, kind)
            if name in variables or name == "time":
                raise DataError(f"{path}: a field is called '{name}', which means something else: rename it")
            variables[name] = Variable(name, shape, dims)
        self._missing = [name for name in asked if name not in self.header.fields]
        variables |= {name: Variable(name, box.nodes, names) for name in self._missing}
        if self.header.num_frames:
            variables["time"] = Variable("time", (self.header.num_frames,), ("time",))
        parameters: dict[str, Attribute] = dict(_mesh(*self._key).parameters) if self.header.parameters else {}
        super().__init__(path, variables, parameters)

    def read(self, name: str, region: Region) -> Array:
        if name in self._names:
            return self.box.coordinates(self._names.index(name))[region]
        if name in self._missing:
            return np.full(self.box.nodes, np.nan)[region]
        mesh = _mesh(*self._key)
        if name == "time":
            assert mesh.times is not None
            return np.asarray(mesh.times[region])
        mapping, space = _mapping(self._key, self.box), self.box.nodes
        if name not in self.header.fields:
            if name == OUTSIDE:
                holes = np.ones(math.prod(space))
                holes[mapping.nodes] = 0
                return np.asarray(holes.reshape(space)[region])
            return np.asarray(mapping.distances[_made(self.box).index(name) - 1][region])
        moving, components = self.header.fields[name]
        values = mesh.fields[name]
        if moving:
            values, region = values[region[0]], (slice(None), *region[1:])
        if components:
            return np.moveaxis(mapping.onto(np.moveaxis(values, -1, 0), space), 0, -1)[region]
        return mapping.onto(values, space)[region]

    def points(self) -> Float64:
        """(N, D), in units of nodes."""
        return self.box.in_nodes(_mesh(*self._key).points)

    def at_points(self, name: str, channel: int, frames: slice) -> Array:
        """Values (T, C, N) of a field."""
        if name in self._missing:
            return np.full((1, 1, self.header.num_points), np.nan)
        moving, components = self.header.fields[name]
        values = _mesh(*self._key).fields[name]
        values = values[frames] if moving else values[None]
        if not components:
            return values[:, None]
        values = np.moveaxis(values, -1, 1)
        return values if components == len(self.box.nodes) else values[:, channel : channel + 1]

    def close(self) -> None:
        """Nothing is open."""


def file_state(path: str | Path) -> tuple[str, int, int]:
    """A file, and what changes when it is written again."""
    state = Path(path).stat()
    return str(path), state.st_size, state.st_mtime_ns


@functools.lru_cache(maxsize=4)
def _mesh(path: str, size: int, time_ns: int) -> MeshFile:
    if file_state(path) != (path, size, time_ns):
        raise DataError(f"{path} has changed since it was opened", hint="start again, so that all reads see one file")
    return read_mesh_file(path)


@functools.lru_cache(maxsize=4)
def _mapping(key: tuple[str, int, int], box: Box) -> GridWeights:
    """The mapping of a file's geometry, from the cache if it is there."""
    mesh = _mesh(*key)
    digest = hashlib.sha256(_VERSION + repr((box, mesh.cell_kinds)).encode())
    for array in (mesh.points, mesh.boundary, *(mesh.cells or ())):
        digest.update(b"-" if array is None else np.ascontiguousarray(array).tobytes())
    home = cache_directory()
    file = None if home is None else home / "points" / f"{digest.hexdigest()}.npz"
    if file is not None and file.is_file():
        try:
            with np.load(file) as kept:
                return GridWeights(**{name: kept[name] for name in GridWeights.__dataclass_fields__})
        except (OSError, ValueError, KeyError, zipfile.BadZipFile):  # damaged: it is made again
            pass
    mapping = make_mapping(mesh, box, key[0])
    if file is not None:
        content = io.BytesIO()
        np.savez(content, **{name: getattr(mapping, name) for name in GridWeights.__dataclass_fields__})
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            write_file_atomically(file, content.getvalue())
        except OSError:  # a full or read-only disk costs time, not the run
            pass
    return mapping


def make_mapping(mesh: MeshFile, box: Box, path: str = "") -> GridWeights:
    """Weights, nodes and distances of a geometry."""
    try:
        from scipy.spatial import cKDTree
    except ImportError:
        raise MissingExtraError.of("points", "scipy", "reading data on points") from None
    dims, space = len(box.nodes), box.nodes
    places = box.in_nodes(mesh.points)
    if not ((places >= 0) & (places <= np.asarray(space) - 1)).all():
        low, high = np.asarray(box.start), box.start + box.spacing * (np.asarray(space) - 1)
        raise DataError(
            f"{path} has points from {mesh.points.min(0)} to {mesh.points.max(0)}, and the grid covers {low} to {high}",
            hint="geometries must lie where those of the training did: move or scale them",
        )
    tree = cKDTree(places)
    grid = np.stack(np.meshgrid(*map(np.arange, space), indexing="ij"), -1).reshape(-1, dims).astype(np.float64)
    surface, simplices = places[:0], _simplices(mesh)
    if len(simplices):
        inside = _inside(places, simplices, space)
        surface = _surface(places, simplices)
    else:
        usual = float(np.median(tree.query(places, k=[min(2, len(places))])[0]))
        inside = tree.query(grid, k=[1])[0][:, 0] <= max(1.5 * usual, 1.0)
        if mesh.boundary is not None:
            surface = places[mesh.boundary > 0]
    valid = inside.copy()
    below = np.minimum(np.floor(places).astype(np.int64), np.asarray(space) - 2)
    for corner in itertools.product((0, 1), repeat=dims):
        valid[np.ravel_multi_index(tuple((below + corner).T), space)] = True
    nodes = np.flatnonzero(valid)
    if not len(surface):  # a cloud without a boundary: half way to the first node without a value
        outside = np.flatnonzero(~inside)
        surface = grid[outside] if len(outside) else np.full((1, dims), -1.0)
    unit, reach = box.spacing, float(np.linalg.norm(box.extent))
    distances = np.empty((1 + len(box.kinds), len(grid)), np.float32)
    distances[0] = cKDTree(surface * unit).query(grid * unit)[0] * np.where(inside, 1, -1)
    for number, kind in enumerate(box.kinds):
        mine = places[mesh.boundary == kind] if mesh.boundary is not None else places[:0]
        distances[1 + number] = np.minimum(cKDTree(mine * unit).query(grid * unit)[0], reach) if len(mine) else reach
    index, weights = _planes(tree, places, grid[nodes])
    return GridWeights(nodes, index, weights, distances.reshape(-1, *space))


def _planes(tree: Any, points: Float64, targets: Float64) -> tuple[Int64, Float32]:
    """(M, K) nearest points of each target, and the weights of their values for the plane through them at the target,
    fitted by least squares in which near points count more."""
    count = min(_NEIGHBORS[points.shape[1]], len(points))
    apart, index = tree.query(targets, k=list(range(1, count + 1)))
    reach = apart[:, -1:, None] + 1e-9
    offset = (points[index] - targets[:, None]) / reach  # (M, K, D)
    near = (1 - (apart / reach[..., 0]) * 0.9) ** 2 / ((apart / reach[..., 0]) ** 2 + 1e-3)
    columns = np.concatenate([np.ones((*offset.shape[:2], 1)), offset], -1)  # (M, K, 1 + D)
    weighted = columns * near[..., None]
    normal = np.einsum("mki,mkj->mij", weighted, columns)
    # Neighbors on one side only, or on one line, determine no slope: it is then kept small.
    slope = np.arange(1, columns.shape[-1])
    normal[:, slope, slope] += 1e-3 * near.sum(1)[:, None]
    first = np.zeros((len(targets), columns.shape[-1], 1))
    first[:, 0] = 1
    weights = (weighted @ np.linalg.solve(normal, first))[..., 0]
    return index.astype(np.int64), np.asarray(weights / weights.sum(1, keepdims=True), np.float32)


def _simplices(mesh: MeshFile) -> Int64:
    """(n, D + 1) node numbers: all cells of full dimension, cut into simplices."""
    dims = mesh.points.shape[1]
    parts = [np.zeros((0, dims + 1), np.int64)]
    for kind, cells in zip(mesh.cell_kinds, mesh.cells or (), strict=True):
        corners = _SIMPLICES[kind.rstrip("0123456789")]
        if len(corners[0]) == dims + 1:
            parts += [cells[:, list(nodes)] for nodes in corners]
    return np.concatenate(parts)


def _inside(places: Float64, simplices: Int64, space: tuple[int, ...]) -> Array:
    """Which nodes (flat) of the grid lie in a simplex: those in the box of each are tried."""
    corners = places[simplices]  # (n, D + 1, D)
    low, high = np.ceil(corners.min(1) - 1e-6), np.floor(corners.max(1) + 1e-6)
    counts = np.maximum(high - low + 1, 0).astype(np.int64)  # (n, D)
    total = counts.prod(1)
    owner = np.repeat(np.arange(len(simplices)), total)
    rest = np.arange(len(owner)) - np.repeat(np.cumsum(total) - total, total)
    tried = np.empty((len(owner), places.shape[1]), np.int64)
    for axis in reversed(range(places.shape[1])):
        rest, step = np.divmod(rest, counts[owner, axis])
        tried[:, axis] = low[owner, axis] + step
    edges = (corners[:, 1:] - corners[:, :1]).transpose(0, 2, 1)  # (n, D, D)
    flat = np.abs(np.linalg.det(edges)) < 1e-12
    edges[flat] = np.eye(places.shape[1])
    parts = (np.linalg.inv(edges)[owner] @ (tried - corners[owner, 0])[..., None])[..., 0]
    hit = (parts >= -1e-6).all(1) & (parts.sum(1) <= 1 + 1e-6) & ~flat[owner]
    inside = np.zeros(math.prod(space), bool)
    inside[np.ravel_multi_index(tuple(tried[hit].T), space)] = True
    return inside


def _surface(places: Float64, simplices: Int64) -> Float64:
    """Points on the boundary: of faces that belong to one simplex, a few on each."""
    dims = places.shape[1]
    faces = np.concatenate([np.delete(simplices, i, axis=1) for i in range(dims + 1)])
    _, first, counts = np.unique(np.sort(faces, 1), axis=0, return_index=True, return_counts=True)
    corners = places[faces[first[counts == 1]]]  # (n, D, D)
    # Two to each step of the grid along the longest edge.
    longest = float(np.ptp(corners, axis=1).max(initial=0))
    parts = int(np.clip(2 * longest, 2, 64 if dims < 3 else 12))
    shares = [s for s in itertools.product(range(parts + 1), repeat=dims) if sum(s) == parts]
    on_faces: Float64 = np.einsum("sj,njd->nsd", np.asarray(shares) / parts, corners)
    return on_faces.reshape(-1, dims)
