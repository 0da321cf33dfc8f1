"""Points of a CSV file, and values of a rollout there, as CSV or NetCDF (`ups rollout --at`)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ups.errors import DataError
from ups.inference.query import IN_TIME
from ups.inference.results import MAX_MEMORY_BYTES, NETCDF_SUFFIXES
from ups.record.files import machine_errors, temporary_name
from ups.spec.grid import component_dim

if TYPE_CHECKING:
    import xarray

    from ups.inference.simulator import Simulator
    from ups.spec.task import TaskSpec

VALUE_SUFFIXES = (".csv", *NETCDF_SUFFIXES)


def read_points(path: str, spec: TaskSpec) -> Any:
    """The table of a CSV file: a column of numbers for each axis, maybe `time`, and any others. Raises DataError."""
    import pandas

    names = [axis.name for axis in spec.axes]
    hint = f"the first line names the columns: {','.join(names)}, and {','.join([*names, 'time'])} for some times only"
    try:
        table = pandas.read_csv(path, skipinitialspace=True)
    except (OSError, ValueError, pandas.errors.ParserError) as error:
        raise DataError(f"cannot read points from '{path}': {str(error).strip()[:200]}", hint=hint) from error
    missing = [name for name in names if name not in table.columns]
    if missing or not len(table):
        problem = f"no column {', '.join(missing)}" if missing else "no points"
        raise DataError(f"'{path}' has {problem}", hint=hint)
    for name in [*names, *({"time"} & {*table.columns} if not spec.steady else ())]:
        numbers = pandas.to_numeric(table[name], errors="coerce").to_numpy(np.float64)
        if not (finite := np.isfinite(numbers)).all():
            row = int(np.argmin(finite))
            got = str(table[name].iloc[row])[:40]
            raise DataError(f"'{path}' has '{got}' as {name} in row {row + 1}; expected a number", hint=hint)
        table[name] = numbers
    return table


def values_at(simulator: Simulator, result: Any, table: Any, spec: TaskSpec, *, in_time: bool) -> xarray.Dataset:
    """Values of a rollout at the points of a table: of each row at its time, or at all times."""
    import xarray

    timed = "time" in table.columns and not spec.steady
    times, position = np.unique(table["time"], return_inverse=True) if timed else (None, None)
    frames = 1 if spec.steady else len(times) if times is not None else result.sizes["time"]
    rows = len(table) * frames * result.sizes.get("sample", 1) * result.sizes.get("member", 1)
    if 8 * rows * spec.num_channels(spec.predicted) > MAX_MEMORY_BYTES:
        raise DataError(f"{len(table)} points at {frames} times do not fit into memory", hint="ask for fewer at once")
    points = table[[axis.name for axis in spec.axes]].to_numpy(np.float64)
    values: xarray.Dataset = simulator.query(result, points, times, in_time=IN_TIME if in_time else None)
    if timed:
        values = values.isel(time=xarray.DataArray(position, dims="point"))
    return values


def write_values(values: xarray.Dataset, table: Any, spec: TaskSpec, path: Path) -> None:
    """A new file: NetCDF, or CSV with the columns of the table and one for each channel."""
    temporary = temporary_name(path)
    with machine_errors(f"cannot write {path}"):
        try:
            if path.suffix in NETCDF_SUFFIXES:
                values.to_netcdf(temporary, engine="h5netcdf")
            else:
                _frame(values, table, spec).to_csv(temporary, index=False)
            os.rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def _frame(values: xarray.Dataset, table: Any, spec: TaskSpec) -> Any:
    """A row for each point and, where it names no time, each frame; of several samples or members one for each."""
    parts = []
    for field in spec.fields_of(spec.predicted):
        dim, array = component_dim(spec, field), values[field.name]
        parts += [array.isel({dim[0]: i}, drop=True) for i in range(array.sizes[dim[0]])] if dim else [array]
    channels = spec.channel_names(spec.predicted)
    flat = type(values)(dict(zip(channels, parts, strict=True)))
    rows = flat.to_dataframe(dim_order=["point", *(dim for dim in parts[0].dims if dim != "point")]).reset_index()
    numbers = rows.pop("point")
    for name in reversed([name for name in table.columns if name not in rows or name in channels]):
        rows.insert(0, f"{name}_given" if name in channels else name, table[name].to_numpy()[numbers])
    return rows
