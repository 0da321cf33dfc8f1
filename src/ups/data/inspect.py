"""The card of a data set (metadata and a few trajectories), and its picture: fields in space and time, with units.

1D: one row per field, a map of space and time for several trajectories and their profiles at a few times. 2D: frames in
time, one row per field and trajectory. 3D: the middle plane along the last axis. Steady: given fields next to what is
asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from ups.buckets.path import BucketPath, data_path
from ups.data.open import DESCRIBED, recognized
from ups.errors import DataError
from ups.formats.base import Reader
from ups.formats.described import DescribedReader
from ups.formats.zarr_store import StoreReader
from ups.record.files import machine_error
from ups.record.manifest import MANIFEST_NAME, read_manifest
from ups.record.text import size_text
from ups.spec.batch import Window
from ups.spec.descriptors import Moments, by_channel
from ups.spec.grid import is_uniform
from ups.spec.task import Role

NUM_SAMPLED = 16


def make_card(reader: Reader, paths: list[str], *, format: str = "auto") -> dict[str, Any]:
    """Facts about a data set as JSON: shapes, units, ranges, size, time, boundaries, parameters, splits, identity.

    Ranges are of at most NUM_SAMPLED trajectories of each split, evenly chosen; the card says of how many.
    """
    task = reader.task
    if format == "auto":
        described = isinstance(reader, DescribedReader)
        format = DESCRIBED if described else recognized([data_path(path) for path in paths])
    ranges, seen = _ranges(reader)
    lengths = [reader.frames_of(split) for split in reader.splits]
    dt_range = (task.dt_range if "dt" in reader.differing else None) or (task.dt, task.dt)
    card: dict[str, Any] = {
        "paths": paths,
        "format": format,
        "bytes": sum(_bytes_of(data_path(p)) for p in paths),
        "identity": reader.identity(),
        "task": task.name,
        "equation": task.equation,
        "steady": task.steady,
        "splits": dict(reader.splits),
        "frames": reader.num_frames,
        "fewest_frames": min((int(n.min()) for n in lengths if n is not None and len(n)), default=reader.num_frames),
        "dt": task.dt,
        "dt_range": list(dt_range),
        "time_unit": task.time_unit,
        "start_time": reader.source.start_time,
        "duration": task.dt * max(0, reader.num_frames - 1),
        "axes": [
            {
                "name": axis.name,
                "points": len(values),
                "first": float(values[0]),
                "last": float(values[-1]),
                "extent": axis.extent,
                "unit": axis.unit,
                "boundary": axis.boundary_text,
                "uniform": is_uniform(values),
            }
            for axis, values in zip(task.axes, reader.coordinates, strict=True)
        ],
        "fields": ranges["fields"],
        "parameters": ranges["parameters"],
        "ranges_from": seen,
        "conserved": list(task.conserved),
        "symmetries": list(task.symmetries),
        "assumptions": list(reader.assumptions),
    }
    if isinstance(reader, StoreReader):
        card["storage"] = _storage(reader)
        card["generator"] = reader.attributes.get("generator", {})
    else:
        card["first_trajectory"] = reader.where("train", 0)
    return card


def card_lines(card: dict[str, Any]) -> list[tuple[str, str]]:
    """The card as rows of (label, text)."""
    rows = [("task", card["task"] + (f": {card['equation']}" if card["equation"] else ", equation not known"))]
    rows.append(("path", ", ".join(card["paths"][:3]) + (" ..." if len(card["paths"]) > 3 else "")))
    rows.append(("format", card["format"] + (f", {card['storage']}" if "storage" in card else "")))
    rows.append(("size", size_text(card["bytes"])))
    rows.append(("trajectories", ", ".join(f"{count} {split}" for split, count in card["splits"].items())))
    if card["steady"]:
        rows.append(("time", "steady: static fields are given, target fields are asked for"))
    else:
        unit = _unit(card["time_unit"])
        fewest, (smallest, largest) = card["fewest_frames"], card["dt_range"]
        frames = f"{fewest} to {card['frames']}" if fewest < card["frames"] else f"{card['frames']}"
        apart = f"{smallest:g} to {largest:g}" if smallest < largest else f"{card['dt']:g}"
        rows.append(("time", f"{frames} frames, {apart}{unit} apart, from {card['start_time']:g}{unit} on"))
    for axis in card["axes"]:
        span = f"{axis['first']:g} to {axis['last']:g}{_unit(axis['unit'])}"
        uneven = "" if axis["uniform"] else ", not equally spaced"
        rows.append((f"axis {axis['name']}", f"{axis['points']} points, {span}, {axis['boundary']}{uneven}"))
    for entry in card["fields"]:
        numbers = f"{entry['minimum']:.4g} to {entry['maximum']:.4g}, mean {entry['mean']:.4g}, std {entry['std']:.4g}"
        conserved = ", conserved" if entry["field"] in card["conserved"] else ""
        rows.append((f"{entry['role']} {entry['name']}", f"{numbers}{_unit(entry['unit'])}{conserved}"))
    for entry in card["parameters"]:
        measured = f"{entry['found_minimum']:.4g} to {entry['found_maximum']:.4g}{_unit(entry['unit'])}"
        declared = f"{entry['minimum']:.4g} to {entry['maximum']:.4g}, {entry['scale']}"
        rows.append((f"parameter {entry['name']}", f"{measured} (declared {declared})"))
    seen, total = card["ranges_from"], sum(card["splits"].values())
    rows.append(("ranges", "of all trajectories" if seen == total else f"of {seen} of {total} trajectories"))
    rows.append(("symmetries", ", ".join(card["symmetries"]) or "none declared"))
    rows += [("assumed", text) for text in card["assumptions"]]
    rows.append(("identity", card["identity"]))
    return rows


def _ranges(reader: Reader) -> tuple[dict[str, Any], int]:
    """Minimum, maximum, mean and deviation of every channel and parameter over sampled trajectories."""
    task = reader.task
    roles: tuple[Role, ...] = ("state", "static", "target")
    moments = {role: Moments(task.num_channels(role), allow_nonfinite=True) for role in roles}
    parameters = Moments(len(task.parameters), allow_nonfinite=True)
    seen = 0
    for split, count in reader.splits.items():
        for trajectory in np.unique(np.linspace(0, count - 1, min(count, NUM_SAMPLED)).astype(int)) if count else ():
            window = reader.read(split, int(trajectory), 0, 0 if task.steady else 1)
            for role in ("static", "target"):
                moments[role].add(by_channel(getattr(window, role), 0))
            parameters.add(window.parameters[:, None])
            if not task.steady:
                num_frames = reader.frames_in(split, int(trajectory))
                step = max(1, num_frames // 8)
                for start in range(0, num_frames, step):
                    moments["state"].add(by_channel(reader.read(split, int(trajectory), start, 1).state, 1))
            seen += 1
    fields = []
    for role in roles:
        owners = [f for f in task.fields_of(role) for _ in range(f.num_channels(task.num_spatial_dims))]
        for name, owner, numbers in zip(task.channel_names(role), owners, _numbers(moments[role]), strict=True):
            fields.append({"name": name, "field": owner.name, "role": role, "unit": owner.unit, **numbers})
    parameter_rows = [
        {
            "name": p.name,
            "unit": p.unit,
            "minimum": p.minimum,
            "maximum": p.maximum,
            "scale": p.scale,
            "found_minimum": parameters.minimum[i],
            "found_maximum": parameters.maximum[i],
        }
        for i, p in enumerate(task.parameters)
    ]
    return {"fields": fields, "parameters": parameter_rows}, seen


def _numbers(moments: Moments) -> list[dict[str, float]]:
    """One row per channel."""
    columns = zip(moments.minimum, moments.maximum, moments.mean, moments.std(), strict=True)
    return [dict(zip(("minimum", "maximum", "mean", "std"), row, strict=True)) for row in columns]


def _storage(reader: StoreReader) -> str:
    layout = next(iter(reader.layouts.values()))["target" if reader.task.steady else "state"]
    packing = layout.compressor or "uncompressed"
    shard = layout.chunk_bytes * int(np.prod(layout.chunks_per_shard))
    return f"Zarr v3, {packing}, chunks of {size_text(layout.chunk_bytes)} in shards of {size_text(shard)}"


def _bytes_of(path: Path) -> int:
    if isinstance(path, BucketPath) and path.is_dir():
        return sum(path.file_sizes(read_manifest(path).files if (path / MANIFEST_NAME).is_file() else ()).values())
    if path.is_file():
        return path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _unit(unit: str) -> str:
    return "" if unit == "1" else f" {unit}"


MAX_CHANNELS = 6
NUM_MAPS = 3
NUM_FRAMES = 5


def draw(reader: Reader, path: str | Path, *, split: str = "train") -> Path:
    """Write the picture of a few trajectories of a split to `path` (png, pdf or svg)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    available = reader.splits.get(split, 0)
    if not available:
        raise DataError(f"task '{reader.task.name}' has no trajectories in split '{split}' to draw")
    figure = Figure(layout="constrained")
    FigureCanvasAgg(figure)
    chosen = [int(i) for i in np.unique(np.linspace(0, available - 1, NUM_MAPS).astype(int))]
    if reader.task.steady:
        _draw_steady(figure, reader, split, chosen)
    elif len(reader.space) == 1:
        _draw_lines(figure, reader, split, chosen)
    else:
        many = reader.task.num_channels("state") > 1
        _draw_frames(figure, reader, split, chosen[:1] if many else chosen)
    figure.suptitle(_title(reader), fontsize=12)
    target = Path(path)
    try:
        figure.savefig(target, dpi=110)
    except OSError as error:
        raise machine_error(f"cannot write {target}", error) from error
    except ValueError as error:
        raise DataError(f"the picture {target} cannot be written: {error}") from error
    return target


def _draw_lines(figure: Any, reader: Reader, split: str, chosen: list[int]) -> None:
    windows = [reader.read(split, i, 0, reader.frames_in(split, i)) for i in chosen]
    names = reader.task.channel_names("state")[:MAX_CHANNELS]
    x = reader.coordinates[0]
    times = [reader.times_in(split, i) for i in chosen]
    figure.set_size_inches(3.6 * (len(chosen) + 1) + 1.2, 3.6 * len(names) + 0.8)
    axes = figure.subplots(len(names), len(chosen) + 1, squeeze=False)
    labels = _labels(reader, "state")
    for row, name in enumerate(names):
        for column, window in enumerate(windows):
            axis = axes[row, column]
            style = _style(window.state[:, row])  # of each trajectory: amplitudes may differ by orders
            edges = (_edges(x), _edges(times[column]))
            image = axis.pcolormesh(*edges, window.state[:, row], shading="flat", rasterized=True, **style)
            axis.set_xlabel(_axis_label(reader, 0))
            if column == 0:
                axis.set_ylabel(_with_unit("t", reader.task.time_unit))
            if row == 0:
                axis.set_title(_name_of(reader, split, window), fontsize=9)
            # Below: at the side its label would look like that of the next panel.
            figure.colorbar(image, ax=axis, location="bottom", label=labels[name], aspect=30)
        _draw_profiles(axes[row, -1], windows[0].state[:, row], x, times[0], labels[name])
        axes[row, -1].set_xlabel(_axis_label(reader, 0))
        if row == 0:
            axes[row, -1].set_title(f"{split} trajectory {chosen[0]} at {len(_some(len(times[0])))} times", fontsize=9)


def _draw_profiles(axis: Any, values: Any, x: Any, times: Any, label: str) -> None:
    from matplotlib import colormaps

    frames = _some(len(times))
    for order, frame in enumerate(frames):
        color = colormaps["viridis"](0.9 * order / max(1, len(frames) - 1))
        axis.plot(x, values[frame], color=color, linewidth=1.2, label=f"t = {times[frame]:.3g}")
    axis.set_ylabel(label)
    axis.grid(alpha=0.25)
    axis.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))


def _draw_frames(figure: Any, reader: Reader, split: str, chosen: list[int]) -> None:
    frames = {i: _some(reader.frames_in(split, i), exactly=len(_some(reader.num_frames))) for i in chosen}
    num_columns = len(_some(reader.num_frames))
    names = reader.task.channel_names("state")[:MAX_CHANNELS]
    rows = [(trajectory, channel) for trajectory in chosen for channel in range(len(names))]
    width, depth = (float(points[-1] - points[0]) for points in reader.coordinates[:2])
    height = 2.5 * min(2.0, max(0.5, depth / width))
    figure.set_size_inches(2.6 * num_columns + 1.4, height * len(rows) + 0.7)
    axes = figure.subplots(len(rows), num_columns, squeeze=False, sharex=True, sharey=True)
    labels = _labels(reader, "state")
    # Frames one by one: a whole 3D trajectory may be larger than memory.
    shots = {i: [reader.read(split, i, frame, 1) for frame in frames[i]] for i in chosen}
    for row, (trajectory, channel) in enumerate(rows):
        planes = [_plane(window.state[0, channel]) for window in shots[trajectory]]
        style = _style(np.stack(planes))
        for column, plane in enumerate(planes):
            axis = axes[row, column]
            image = _show(axis, reader, plane, style)
            if channel == 0:
                where = f"{_name_of(reader, split, shots[trajectory][0])}\n" if column == 0 else ""
                time = reader.times_in(split, trajectory)[frames[trajectory][column]]
                axis.set_title(f"{where}t = {time:.3g}", fontsize=9, loc="left")
            if row == len(rows) - 1:
                axis.set_xlabel(_axis_label(reader, 0))
            if column == 0:
                axis.set_ylabel(_axis_label(reader, 1))
        figure.colorbar(image, ax=axes[row].tolist(), label=labels[names[channel]], fraction=0.03, pad=0.01)


def _draw_steady(figure: Any, reader: Reader, split: str, chosen: list[int]) -> None:
    task = reader.task
    roles: tuple[Role, ...] = ("static", "target")
    columns = [(role, i, n) for role in roles for i, n in enumerate(task.channel_names(role)[:MAX_CHANNELS])]
    figure.set_size_inches(4.0 * len(columns) + 0.4, 3.3 * len(chosen) + 0.7)
    axes = figure.subplots(len(chosen), len(columns), squeeze=False)
    labels = {**_labels(reader, "static"), **_labels(reader, "target")}
    for row, trajectory in enumerate(chosen):
        window = reader.read(split, trajectory, 0, 0)
        for column, (role, channel, name) in enumerate(columns):
            axis = axes[row, column]
            values = getattr(window, role)[channel]
            asked = "given" if role == "static" else "asked for"
            head = f"{_name_of(reader, split, window)}: " if column == 0 else ""
            axis.set_title(f"{head}{name} ({asked})", fontsize=9)
            axis.set_xlabel(_axis_label(reader, 0))
            if len(reader.space) == 1:
                axis.plot(reader.coordinates[0], values)
                axis.set_ylabel(labels[name])
                continue
            image = _show(axis, reader, _plane(values), _style(values))
            axis.set_ylabel(_axis_label(reader, 1))
            figure.colorbar(image, ax=axis, label=labels[name])


def _show(axis: Any, reader: Reader, plane: Any, style: dict[str, Any]) -> Any:
    x, y = reader.coordinates[:2]
    image = axis.pcolormesh(_edges(x), _edges(y), plane.T, shading="flat", rasterized=True, **style)
    axis.set_aspect("equal")
    return image


def _plane(values: Any) -> Any:
    """(X, Y) of a 2D field, or the middle plane of a 3D one."""
    return values if values.ndim == 2 else values[..., values.shape[2] // 2]


def _style(values: Any) -> dict[str, Any]:
    """Colors and range: two-sided around 0 where a field has both signs; a few outliers do not set the range."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return {"cmap": "viridis", "vmin": 0.0, "vmax": 1.0}
    low, high = (float(v) for v in np.percentile(finite, [0.2, 99.8]))
    if low < 0 < high and min(-low, high) > 0.1 * max(-low, high):
        bound = max(-low, high)
        return {"cmap": "RdBu_r", "vmin": -bound, "vmax": bound}
    return {"cmap": "viridis", "vmin": low, "vmax": high if high > low else low + 1e-6}


def _some(num_frames: int, exactly: int | None = None) -> list[int]:
    """Some frames of a trajectory; as many as asked for, even if some are then shown twice."""
    return [int(i) for i in np.linspace(0, num_frames - 1, exactly or min(NUM_FRAMES, num_frames)).round()]


def _edges(centers: Any) -> Any:
    """(n + 1,) borders of the cells around n points."""
    if len(centers) < 2:
        return np.array([centers[0] - 0.5, centers[0] + 0.5])
    middle = (centers[1:] + centers[:-1]) / 2
    return np.concatenate([[2 * centers[0] - middle[0]], middle, [2 * centers[-1] - middle[-1]]])


def _title(reader: Reader) -> str:
    task = reader.task
    plane = f", plane {task.axes[2].name} = middle" if len(task.axes) == 3 else ""
    boundary = "/".join(dict.fromkeys(a.boundary_text for a in task.axes))
    points = " x ".join(map(str, reader.space))
    return f"{task.name}: {task.equation or 'no equation given'}\n{points} points, {boundary}{plane}"


def _name_of(reader: Reader, split: str, window: Window) -> str:
    values = [f"{p.name} = {v:.3g}" for p, v in zip(reader.task.parameters, window.parameters, strict=True)]
    return ", ".join([f"{split} trajectory {window.trajectory}", *values[:3]])


def _labels(reader: Reader, role: Any) -> dict[str, str]:
    """Channel name -> label with its unit."""
    task = reader.task
    owners = [f for f in task.fields_of(role) for _ in range(f.num_channels(task.num_spatial_dims))]
    return {name: _with_unit(name, f.unit) for name, f in zip(task.channel_names(role), owners, strict=True)}


def _axis_label(reader: Reader, number: int) -> str:
    axis = reader.task.axes[number]
    return _with_unit(axis.name, axis.unit)


def _with_unit(name: str, unit: str) -> str:
    return name if unit == "1" else f"{name} [{unit}]"
