"""Small files of every PDEBench layout, with the true field names, axes order, attributes and storage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np

CONFIG_DIFFSORP = "sim:\n  D: 0.0005\n  por: 0.29\n  rho_s: 2880\n  k_f: 0.00035\n  n_f: 0.874\n  seed: 3\n"
CONFIG_DIFFREACT = "sim:\n  Du: 1e-3\n  Dv: 0.005\n  k: 5e-3\n  x_left: -1\n"
CONFIG_RDB = "sim:\n  gravity: 1.0\n  dam_radius: 0.5\n"
CONFIG_INCOMPRESSIBLE = "NU: 0.01\ndomain_size: [1, 1]\nsample_late: true\n"


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape).astype(np.float32)


def cells(n: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
    return (low + (np.arange(n) + 0.5) * (high - low) / n).astype(np.float32)


def _with_coordinates(file: h5py.File, space: tuple[int, ...], num_times: int, dt: float) -> None:
    for name, n in zip("xyz", space, strict=False):
        file[f"{name}-coordinate"] = cells(n)
    if num_times:
        file["t-coordinate"] = (np.arange(num_times) * dt).astype(np.float32)


def single(path: Path, seed: int = 0, attributes: dict[str, float] | None = None, **storage: Any) -> np.ndarray:
    """(10, 7, 16) `tensor`; t-coordinate with one entry too many, as PDEBench has it."""
    data = numbers(10, 7, 16, seed=seed)
    with h5py.File(path, "w") as file:
        file.create_dataset("tensor", data=data, **storage)
        _with_coordinates(file, (16,), 8, 0.05)
        file.attrs.update(attributes if attributes is not None else {"beta": 0.4})
    return data


def grouped(path: Path, shape: tuple[int, ...], config: str, num_groups: int = 10, **storage: Any) -> np.ndarray:
    """One group per trajectory with `data` (T, X[, Y], C), `grid/x`, ... and a YAML text."""
    data = numbers(num_groups, *shape)
    with h5py.File(path, "w") as file:
        for i in range(num_groups):
            group = file.create_group(f"{i:04d}")
            group.create_dataset("data", data=data[i], **storage)
            for name, n in zip("xy", shape[1:-1], strict=False):
                group[f"grid/{name}"] = cells(n, -1.0, 1.0)
            group["grid/t"] = np.linspace(0, 5, shape[0]).astype(np.float32)
            group.attrs["config"] = config
    return data


def darcy(path: Path, **storage: Any) -> tuple[np.ndarray, np.ndarray]:
    nu, tensor = numbers(10, 8, 8), numbers(10, 1, 8, 8)
    with h5py.File(path, "w") as file:
        file.create_dataset("nu", data=nu, **storage)
        file.create_dataset("tensor", data=tensor, **storage)
        _with_coordinates(file, (8, 8), 0, 0)
        file.attrs["beta"] = 0.1
    return nu, tensor


def compressible(path: Path, dims: int, **storage: Any) -> dict[str, np.ndarray]:
    space = (8, 6, 4)[:dims]
    names = ["density", "pressure", *("Vx", "Vy", "Vz")[:dims]]
    fields = {name: numbers(10, 5, *space, seed=i) for i, name in enumerate(names)}
    with h5py.File(path, "w") as file:
        for name in reversed(names):
            file.create_dataset(name, data=fields[name], **storage)
        _with_coordinates(file, space, 6, 0.01)
        file.attrs.update({"eta": 0.1, "zeta": 0.1})
        if dims > 1:
            file.attrs["M"] = 0.5
    return fields


def incompressible(path: Path) -> dict[str, np.ndarray]:
    """velocity, particles, force, t: chunks of one frame, lzf."""
    fields = {
        "velocity": numbers(4, 6, 8, 8, 2),
        "particles": numbers(4, 6, 8, 8, 1),
        "force": numbers(4, 8, 8, 2),
        "t": np.tile(np.arange(6, dtype=np.float32) * 0.005, (4, 1)),
    }
    with h5py.File(path, "w") as file:
        for name, values in fields.items():
            ones = 2 if values.ndim == 5 else 1
            chunks = (1,) * ones + values.shape[ones:]
            file.create_dataset(name, data=values, chunks=chunks, compression="lzf")
        file.attrs["config"] = CONFIG_INCOMPRESSIBLE
        file.attrs["latestIndex"] = 3
    return fields
