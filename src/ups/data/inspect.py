"""The card of a data set: what a person wants to know before using it, from metadata and a few trajectories."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ups.buckets.path import BucketPath, data_path
from ups.data.open import DESCRIBED, recognized
from ups.formats.base import GridReader, Reader
from ups.formats.described import DescribedReader
from ups.formats.zarr_store import StoreReader
from ups.record.manifest import MANIFEST_NAME, read_manifest
from ups.record.text import size_text
from ups.spec.grid import is_uniform
from ups.spec.moments import Moments, by_channel
from ups.spec.task import Role

NUM_SAMPLED = 16

_Number = TypeVar("_Number", int, float)


def make_card(
    reader: GridReader, paths: list[str], *, format: str = "auto", num_sampled: int = NUM_SAMPLED
) -> dict[str, Any]:
    """Facts about a data set as JSON: shapes, units, ranges, size, time, boundaries, parameters, splits, identity.

    Ranges are of at most `num_sampled` trajectories of each split, evenly chosen; the card says of how many.
    """
    task = reader.task
    ranges, seen = _ranges(reader, num_sampled)
    card: dict[str, Any] = {
        "paths": paths,
        "format": _format_of(reader, paths) if format == "auto" else format,
        "bytes": sum(_bytes_of(data_path(p)) for p in paths),
        "identity": reader.identity(),
        "task": task.name,
        "equation": task.equation,
        "steady": task.steady,
        "splits": dict(reader.splits),
        "frames": reader.num_frames,
        "fewest_frames": min(_each(reader, reader.frames_in), default=reader.num_frames),
        "dt": task.dt,
        "dt_range": [
            min(_each(reader, reader.dt_in), default=task.dt),
            max(_each(reader, reader.dt_in), default=task.dt),
        ],
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


def _format_of(reader: GridReader, paths: list[str]) -> str:
    return DESCRIBED if isinstance(reader, DescribedReader) else recognized([data_path(path) for path in paths])


def card_lines(card: dict[str, Any]) -> list[tuple[str, str]]:
    """The card as rows of (label, text) for a person."""
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
        found = f"{entry['found_minimum']:.4g} to {entry['found_maximum']:.4g}{_unit(entry['unit'])}"
        declared = f"{entry['minimum']:.4g} to {entry['maximum']:.4g}, {entry['scale']}"
        rows.append((f"parameter {entry['name']}", f"{found} (declared {declared})"))
    seen, total = card["ranges_from"], sum(card["splits"].values())
    rows.append(("ranges", "of all trajectories" if seen == total else f"of {seen} of {total} trajectories"))
    rows.append(("symmetries", ", ".join(card["symmetries"]) or "none declared"))
    rows += [("assumed", text) for text in card["assumptions"]]
    rows.append(("identity", card["identity"]))
    return rows


def _each(reader: GridReader, what: Callable[[str, int], _Number]) -> Iterator[_Number]:
    """Frames or time step of each trajectory, where trajectories differ."""
    if reader.differing:
        for split, count in reader.splits.items():
            yield from (what(split, trajectory) for trajectory in range(count))


def _ranges(reader: Reader, num_sampled: int) -> tuple[dict[str, Any], int]:
    """Minimum, maximum, mean and deviation of every channel and parameter over sampled trajectories."""
    task = reader.task
    roles: tuple[Role, ...] = ("state", "static", "target")
    moments = {role: Moments(task.num_channels(role), allow_nonfinite=True) for role in roles}
    parameters = Moments(len(task.parameters), allow_nonfinite=True)
    seen = 0
    for split, count in reader.splits.items():
        for trajectory in np.unique(np.linspace(0, count - 1, min(count, num_sampled)).astype(int)) if count else ():
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
    found = [
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
    return {"fields": fields, "parameters": found}, seen


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
