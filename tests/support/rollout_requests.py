"""Requests to a server of the small calibrated bundle, and the comparison of two results."""

from __future__ import annotations

import numpy as np
import xarray

from tests.support.serving import Served
from ups.serve.results import plain

TOLERANCE = 1e-4
STATE = np.sin(2 * np.pi * np.arange(16) / 16)[None]
REQUEST = {"task": "advection", "state": STATE.tolist(), "parameters": {"beta": 1.0}, "steps": 7}
LONG = REQUEST | {"steps": 100_000, "every": 10}


def same(found: xarray.Dataset, expected: xarray.Dataset, tolerance: float = TOLERANCE) -> None:
    assert set(found.variables) == set(expected.variables)
    assert {name: expected.attrs[name] for name in expected.attrs} == {n: found.attrs[n] for n in expected.attrs}
    for name, variable in expected.variables.items():
        assert found[name].dims == variable.dims
        assert plain(dict(found[name].attrs)) == plain(dict(variable.attrs)), name
        if variable.dtype.kind in "OU":
            assert found[name].values.tolist() == variable.values.tolist()
        else:
            size = max(1e-30, float(np.nanmax(np.abs(variable.values.astype(float)), initial=0)))
            a, b = (array.astype(float) / size for array in (found[name].values, variable.values))
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=str(name))


def metric(server: Served, name: str) -> float:
    text = server.request("GET", "/metrics")[2].decode()
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name + " ")))
