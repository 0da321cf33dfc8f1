"""VTKHDF (UnstructuredGrid) and XDMF, whose arrays lie in HDF5 files: read behind the guard (`ups.formats.hdf5`).

The points of a file are fixed in time. Of its cells those of the highest dimension are kept; values of cells are not
read. Both formats write a plane in 3D: axes at the end in which all points are equal are left out, and so are
components of vectors along them that are zero. An array `boundary` at the points holds their kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder  # only builds a tree: expat parses, without entities

import numpy as np

from ups.errors import DataError
from ups.formats.base import MAX_READ_BYTES, Array
from ups.formats.hdf5 import read_region, survey_all
from ups.record.files import inside, safe_read

MAX_XML_BYTES = 16 << 20
# Kinds of cells: name -> (number of the type in VTK, nodes, dimensions, topology of XDMF, its code in a mixed one).
CELL_KINDS = {
    "line": (3, 2, 1, "polyline", 2),
    "triangle": (5, 3, 2, "triangle", 4),
    "quad": (9, 4, 2, "quadrilateral", 5),
    "tetra": (10, 4, 3, "tetrahedron", 6),
    "hexahedron": (12, 8, 3, "hexahedron", 9),
    "wedge": (13, 6, 3, "wedge", 8),
    "pyramid": (14, 5, 3, "pyramid", 7),
    "line3": (21, 3, 1, "edge_3", 34),
    "triangle6": (22, 6, 2, "triangle_6", 36),
    "quad8": (23, 8, 2, "quadrilateral_8", 37),
    "tetra10": (24, 10, 3, "tetrahedron_10", 38),
    "hexahedron20": (25, 20, 3, "hexahedron_20", 48),
}
_VERTEX = 1
VTKHDF_VERSION = (2, 0)
_CELLS_HINT = "make simple cells with pyvista: pyvista.read(FILE).triangulate().save(NEW.vtkhdf)"


class _Arrays:
    """The arrays of an HDF5 file by name, each read whole; together they may take MAX_READ_BYTES."""

    def __init__(self, path: Path) -> None:
        self.path, self.bytes_read = path, 0
        (self.survey,) = survey_all([path], "tree")

    def names(self, group: str) -> list[str]:
        return [name.removeprefix(group) for name in self.survey.arrays if name.startswith(group)]

    def get(self, name: str, rows: int | None = None) -> Array:
        """rows: at least so many in the first dimension. Raises DataError for what is not there."""
        array = self.survey.arrays.get(name)
        if array is None:
            why = [text for text in self.survey.left_out if name in text]
            raise DataError(f"{self.path} has no array '{name}' of numbers" + (f": {why[0]}" if why else ""))
        self.bytes_read += math.prod(array.shape) * 8
        if self.bytes_read > MAX_READ_BYTES:
            raise DataError(
                f"{self.path}: its arrays would take more than {MAX_READ_BYTES >> 30} GiB",
                hint="write fewer frames to a file, as trajectories of their own",
            )
        if rows is not None and (not array.shape or array.shape[0] < rows):
            raise DataError(f"{self.path}: '{name}' has the shape {array.shape}, and {rows} rows are needed")
        return np.array(read_region(self.survey.key, array, tuple(slice(0, n, 1) for n in array.shape)))


def read_vtkhdf(path: Path) -> dict[str, Array]:
    """The arrays of a VTKHDF file with an UnstructuredGrid of one part."""
    file = _Arrays(path)
    kind = (file.survey.attributes.get("VTKHDF", {}).get("Type") or ["no VTKHDF file"])[0]
    if kind != "UnstructuredGrid":
        raise DataError(
            f"{path} holds {str(kind)[:80]}, and an UnstructuredGrid is read",
            hint="pyvista.read(FILE).cast_to_unstructured_grid().save(NEW.vtkhdf) makes one; an image is grid data",
        )
    steps = "VTKHDF/Steps/"
    times = file.get(f"{steps}Values") if f"{steps}Values" in file.survey.arrays else np.zeros(1)
    frames = len(times)
    counts = {name: file.get(f"VTKHDF/NumberOf{name}", 1) for name in ("Points", "Cells", "ConnectivityIds")}
    num_points, num_cells, num_nodes = (int(values.flat[0]) for values in counts.values())
    parts = file.get(f"{steps}NumberOfParts") if f"{steps}NumberOfParts" in file.survey.arrays else np.ones(1)
    if (parts != 1).any() or (frames == 1 and counts["Points"].size > 1):
        raise DataError(f"{path} has several parts", hint="merge them: pyvista.read(FILE).save(NEW.vtkhdf)")
    if num_points < 1 or min(num_cells, num_nodes) < 0:
        raise DataError(f"{path} claims {num_points} points, {num_cells} cells and {num_nodes} nodes of them")
    stored = file.get("VTKHDF/Points", num_points)
    if stored.ndim != 2 or stored.shape[1] != 3:
        raise DataError(
            f"{path}: 'VTKHDF/Points' has the shape {stored.shape}", hint="it must be (number of points, 3)"
        )

    def rows_of(name: str, count: int, offsets: str) -> list[slice]:
        """Rows of an array at each time: from its offsets, else one time after another."""
        known = f"{steps}{offsets}" in file.survey.arrays
        begin = file.get(f"{steps}{offsets}", frames).reshape(-1)[:frames] if known else np.arange(frames) * count
        have = file.survey.arrays[name].shape[0]
        if (begin < 0).any() or (begin + count > have).any():
            raise DataError(f"{path}: '{name}' has {have} rows, and its offsets need {int(begin.max()) + count}")
        return [slice(int(first), int(first) + count) for first in begin]

    if f"{steps}PointOffsets" in file.survey.arrays:
        for here in {part.start: part for part in rows_of("VTKHDF/Points", num_points, "PointOffsets")}.values():
            if not np.array_equal(stored[here], stored[:num_points]):
                raise DataError(f"{path}: its points move, and they must be fixed over a trajectory")
    fields = {}
    for name in file.names("VTKHDF/PointData/"):
        at = rows_of(f"VTKHDF/PointData/{name}", num_points, f"PointDataOffsets/{name}")
        values = file.get(f"VTKHDF/PointData/{name}", num_points)
        fixed = all(part == at[0] for part in at)
        if frames * values[at[0]].nbytes > MAX_READ_BYTES and not fixed:  # offsets may repeat what is stored once
            raise DataError(f"{path}: '{name}' at {frames} times would take more than {MAX_READ_BYTES >> 30} GiB")
        fields[name] = values[at[0]] if fixed else np.stack([values[part] for part in at])
    data = {name: file.get(f"VTKHDF/FieldData/{name}") for name in file.names("VTKHDF/FieldData/")}
    numbers = {name: float(values.flat[0]) for name, values in data.items() if values.size == 1}
    cells: dict[str, Array] = {}
    if num_cells:
        ends = file.get("VTKHDF/Offsets", num_cells + 1)[: num_cells + 1].astype(np.int64)
        nodes = file.get("VTKHDF/Connectivity", num_nodes)[:num_nodes]
        if ends[0] != 0 or (np.diff(ends) < 1).any() or ends[-1] > len(nodes):
            raise DataError(f"{path}: 'VTKHDF/Offsets' must rise from 0 to the {len(nodes)} entries of Connectivity")
        cells = _blocks(path, file.get("VTKHDF/Types", num_cells)[:num_cells], ends, nodes)
    return _named(path, stored[:num_points], cells, fields, times if frames > 1 else None, numbers)


def read_xdmf(path: Path) -> dict[str, Array]:
    """The arrays of an XDMF file: a grid, or a collection of grids in time."""
    try:
        root = _parse(path, safe_read(path, MAX_XML_BYTES, follow_link=True))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    grids = [grid for grid in root.iter("Grid") if grid.get("GridType", "Uniform") == "Uniform"]
    series = [grid for grid in grids if grid.find("Time") is not None]
    shared = next((grid for grid in grids if grid.find("Geometry") is not None), None)
    timeless = [grid for grid in grids if grid.find("Time") is None and grid.find("Geometry") is not None]
    if shared is None or len(timeless) > 1:
        raise DataError(
            f"{path} has {len(timeless)} grids with a Geometry, and one is read, or one for each time",
            hint="grids of XDMF have GridType Uniform, and a Time with a Value where they are a collection in time",
        )
    files: dict[str, _Arrays] = {}

    def values(item: Element | None, what: str) -> Array:
        item = item.find("DataItem") if item is not None else None
        text = (item.text or "").strip() if item is not None else ""
        if item is None or not text:
            raise DataError(f"{path}: {what} has no DataItem with values")
        if item.get("Format") == "XML":
            try:
                return np.array(text.split(), np.float64).reshape([int(n) for n in item.get("Dimensions", "").split()])
            except ValueError as error:
                raise DataError(f"{path}: {what}: {str(error)[:100]}") from error
        name, _, inner = text.partition(":")
        there = inside(path.parent, name)
        if item.get("Format") != "HDF" or there is None or not inner:
            raise DataError(
                f"{path}: {what} lies in {text[:80]!r}, format {item.get('Format')}",
                hint="values are read from an HDF5 file in the same directory, named FILE.h5:/array",
            )
        if name not in files:
            files[name] = _Arrays(there)
        return files[name].get(inner.strip("/"))

    def reference(grid: Element, tag: str) -> str:
        item = grid.find(f"{tag}/DataItem")
        return (item.text or "").strip() if item is not None else ""

    for grid, tag in ((grid, tag) for grid in series for tag in ("Geometry", "Topology")):
        if grid.find(tag) is not None and reference(grid, tag) != reference(shared, tag):
            raise DataError(f"{path}: its {tag} changes in time, and it must be fixed over a trajectory")
    points = values(shared.find("Geometry"), "the Geometry")
    cells = _topology(path, shared.find("Topology"), values)
    frames: dict[str, list[Array]] = {}
    for grid in series or [shared]:
        for entry in grid.findall("Attribute"):
            if entry.get("Center", "Node") == "Node":
                name = entry.get("Name", "")[:80]
                frames.setdefault(name, []).append(values(entry, f"'{name}'"))
    count = max(len(series), 1)
    lacking = [name for name, parts in frames.items() if len(parts) != count or len({p.shape for p in parts}) > 1]
    if lacking:
        raise DataError(f"{path}: '{lacking[0]}' is not there, of one shape, at each of the {count} times")
    fields = {name: np.stack(parts) if count > 1 else parts[0] for name, parts in frames.items()}
    try:
        times = np.array([float(grid.find("Time").get("Value", "")) for grid in series])  # type: ignore[union-attr]
    except ValueError as error:
        raise DataError(f"{path}: a Time has no Value: {error}") from error
    return _named(path, points, cells, fields, times if count > 1 else None, {})


def _parse(path: Path, content: bytes) -> Element:
    """The tree of an XML file without entities of its own: they could refer to other files, or grow without end."""
    from xml.parsers import expat

    def refuse(*_: Any) -> None:
        raise DataError(f"{path} declares XML entities, which are not read", hint="a mesh file needs none")

    builder, parser = TreeBuilder(), expat.ParserCreate()
    parser.StartElementHandler = lambda tag, attributes: builder.start(tag.rpartition(":")[2], attributes)
    parser.EndElementHandler = lambda tag: builder.end(tag.rpartition(":")[2])
    parser.CharacterDataHandler, parser.EntityDeclHandler = builder.data, refuse
    try:
        parser.Parse(content, True)
    except expat.ExpatError as error:
        raise DataError(f"{path} is no sound XML file: {error}") from error
    return builder.close()


def _topology(path: Path, topology: Element | None, values: Any) -> dict[str, Array]:
    """Cells by kind."""
    name = (topology.get("TopologyType") or topology.get("Type") or "").lower() if topology is not None else ""
    if name in ("", "polyvertex"):
        return {}
    nodes = values(topology, "the Topology")
    kind = next((kind for kind, row in CELL_KINDS.items() if row[3] == name), "")
    if kind:
        if nodes.size % CELL_KINDS[kind][1]:
            raise DataError(f"{path}: the Topology of type {name} has {nodes.size} nodes")
        return {kind: nodes.reshape(-1, CELL_KINDS[kind][1])}
    if name != "mixed":
        raise DataError(f"{path}: cells of the type '{name[:40]}' are not read", hint=_CELLS_HINT)
    codes = {row[4]: row[:2] for row in CELL_KINDS.values()} | {1: (_VERTEX, 1)}
    types, ends, flat, at = [], [0], [], 0
    stream = nodes.reshape(-1).astype(np.int64)
    while at < len(stream):
        number, count = codes.get(int(stream[at]), (-1, 1))
        at += 2 if int(stream[at]) in (1, 2) else 1  # vertices and lines say how many nodes follow
        types.append(number)
        flat.append(stream[at : at + count])
        at += count
        ends.append(ends[-1] + len(flat[-1]))
    return _blocks(path, np.array(types), np.array(ends), np.concatenate(flat))


def _blocks(path: Path, types: Array, ends: Array, nodes: Array) -> dict[str, Array]:
    """Cells one after another as a block (M, K) of each kind."""
    blocks = {}
    for number in np.unique(types).tolist():
        if number == _VERTEX:
            continue
        name = next((kind for kind, row in CELL_KINDS.items() if row[0] == number), "")
        if not name:
            raise DataError(f"{path} has cells of the type {number}, which are not read", hint=_CELLS_HINT)
        count = CELL_KINDS[name][1]
        first = ends[:-1][types == number]
        if (np.diff(ends)[types == number] != count).any():
            raise DataError(f"{path}: a cell of the kind {name} does not have {count} nodes")
        blocks[name] = nodes[first[:, None] + np.arange(count)]
    return blocks


def _named(
    path: Path,
    points: Array,
    cells: Mapping[str, Array],
    fields: dict[str, Array],
    times: Array | None,
    parameters: Mapping[str, float],
) -> dict[str, Array]:
    """The arrays by the names that they have in an `.npz`."""
    if not fields or points.ndim != 2:
        raise DataError(
            f"{path} has no values at points",
            hint="values of cells are not read: pyvista.read(FILE).cell_data_to_point_data().save(NEW.vtkhdf)",
        )
    dims = points.shape[1]
    while dims > 1 and np.ptp(points[:, dims - 1]) == 0:
        dims -= 1
    for name, values in fields.items():
        if values.ndim > 1 and values.shape[-1] == 3 and not values[..., dims:].any():
            fields[name] = values[..., :dims]
        elif values.ndim > 1 and values.shape[-1] == 1 and values.shape[-2] == len(points):
            fields[name] = values[..., 0]
    if reserved := [name for name in fields if name in ("points", "times") or name.startswith(("cells", "parameter_"))]:
        raise DataError(f"{path} calls a field '{reserved[0]}', a name that means something else", hint="rename it")
    highest = max((CELL_KINDS[kind][2] for kind in cells), default=0)
    arrays = {"points": points[:, :dims], **fields}
    arrays |= {f"cells_{kind}": block for kind, block in cells.items() if CELL_KINDS[kind][2] == highest}
    arrays |= {f"parameter_{name}": np.array(value) for name, value in parameters.items()}
    return arrays | ({} if times is None else {"times": times})


def vtk_group(file: Any, kind: bytes, times: Array) -> Any:
    """The group of a new VTKHDF file, with its steps; arrays are put into its PointData."""
    group = file.create_group("VTKHDF")
    group.attrs["Version"] = np.array(VTKHDF_VERSION, np.int64)
    group.attrs.create("Type", kind, dtype=f"S{len(kind)}")  # of fixed length: what VTK expects
    steps = group.create_group("Steps")
    steps.attrs["NSteps"] = np.int64(len(times))
    steps["Values"] = np.asarray(times, np.float64)
    steps.create_group("PointDataOffsets")
    group.create_group("PointData")
    return group


def filled_up(values: Array, rank: int, dims: int) -> Array:
    """(..., D) or (..., D^2) -> three components of a vector, nine of a tensor, as ParaView wants them; with zeros."""
    lead = values.shape[:-1]
    room = [(0, 0)] * len(lead) + [(0, 3 - dims)] * rank
    return np.pad(values.reshape(*lead, *(dims,) * rank), room).reshape(*lead, 3**rank)


def write_vtkhdf(
    file: Any,
    points: Array,
    cells: Mapping[str, Array],
    fields: Mapping[str, Array],
    times: Array | None,
    parameters: Mapping[str, float],
) -> None:
    """Write what `read_vtkhdf` reads: an UnstructuredGrid of one part, into an open HDF5 file. No cells: vertices."""
    group = vtk_group(file, b"UnstructuredGrid", np.zeros(1) if times is None else times)
    steps, frames = group["Steps"], 1 if times is None else len(times)
    blocks = cells or {"vertex": np.arange(len(points))[:, None]}
    lengths = np.concatenate([np.full(len(block), block.shape[1]) for block in blocks.values()])
    numbers = [np.full(len(b), CELL_KINDS[kind][0] if kind in CELL_KINDS else _VERTEX) for kind, b in blocks.items()]
    group["Points"] = np.pad(points, ((0, 0), (0, 3 - points.shape[1])))
    group["Connectivity"] = np.concatenate([block.reshape(-1) for block in blocks.values()]).astype(np.int64)
    group["Offsets"] = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    group["Types"] = np.concatenate(numbers).astype(np.uint8)
    for name, count in (("Points", len(points)), ("Cells", len(lengths)), ("ConnectivityIds", int(lengths.sum()))):
        group[f"NumberOf{name}"] = np.array([count], np.int64)
    zeros = np.zeros(frames, np.int64)  # all steps have the one mesh
    steps["NumberOfParts"], steps["PartOffsets"], steps["PointOffsets"] = zeros + 1, zeros, zeros
    steps["CellOffsets"], steps["ConnectivityIdOffsets"] = zeros[:, None], zeros[:, None]
    for name, values in fields.items():
        moving = times is not None and values.shape[:2] == (frames, len(points))
        rows = values.reshape(-1, *values.shape[2:]) if moving else values
        dims = points.shape[1]
        rank = {dims**2: 2, dims: 1}.get(rows.shape[1], 0) if rows.ndim > 1 else 0
        group[f"PointData/{name}"] = filled_up(rows, rank, dims) if rank else rows
        steps[f"PointDataOffsets/{name}"] = np.arange(frames) * len(points) if moving else zeros
    for name, value in parameters.items():
        group[f"FieldData/{name}"], steps[f"FieldDataOffsets/{name}"] = np.array([value]), zeros
