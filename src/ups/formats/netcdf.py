"""NetCDF-4 files as xarray datasets, behind the guard of the HDF5 reader.

xarray and h5netcdf are not given the file: they follow links and external storage, and believe every size. The file is
surveyed by `hdf5_guard`, values are read by `hdf5_arrays`, and xarray gets plain arrays with names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ups.errors import DataError
from ups.formats.hdf5_arrays import drop_hdf5, read_region
from ups.formats.hdf5_guard import survey_netcdf_file


@dataclass(frozen=True)
class NetcdfInput:
    """dataset: an xarray.Dataset in memory; left_out: what else the file has, in words."""

    dataset: Any
    left_out: tuple[str, ...]


def read_netcdf(path: str | Path) -> NetcdfInput:
    """The variables of a file's root group, decoded by the CF conventions. Raises DataError.

    A dimension without a coordinate variable is a dimension without coordinates: nothing is known about its spacing.
    """
    import xarray

    key, survey = survey_netcdf_file(path)
    drop_hdf5(key[0])
    variables = {}
    for name, array in survey.variables.items():
        whole = tuple(slice(0, n, 1) for n in array.shape)
        values = np.array(read_region(key, array, whole))  # a copy: the map of the file is let go below
        variables[name] = xarray.Variable(survey.dims[name], values, survey.attributes[name])
    drop_hdf5(key[0])
    try:
        # A one-dimensional variable with the name of its dimension becomes that dimension's coordinate.
        dataset = xarray.decode_cf(xarray.Dataset(variables)).load()  # decoding is lazy: here, or outside of this guard
    except Exception as error:  # the decoders raise nearly every type for attributes that make no sense
        raise DataError(
            f"{path} cannot be decoded by the CF conventions: {str(error)[:200]}",
            hint="look at the attributes units, calendar, scale_factor, add_offset and _FillValue of its variables",
        ) from error
    return NetcdfInput(dataset, survey.left_out)
