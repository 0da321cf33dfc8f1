"""`ups data import`: `ups.import_data` with options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ups.cli.new_store import check_fractions, write_store
from ups.cli.options import JsonOption


def import_data(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="FILE", help="NumPy, HDF5, NetCDF or Zarr; several are trajectories of one task."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.zarr", help="The new store.")],
    task: Annotated[
        Path | None,
        typer.Option(
            "--task",
            metavar="TASK.yaml",
            help="What the arrays mean; default the task.yaml next to FILE, else a guess.",
        ),
    ] = None,
    valid_fraction: Annotated[float, typer.Option(min=0, max=0.9, help="Part for validation.")] = 0.1,
    test_fraction: Annotated[
        float, typer.Option(min=0, max=0.9, help="Part for the test; at least 6 of 24 or more.")
    ] = 0.1,
    compress: Annotated[bool, typer.Option("--compress", help="Smaller with zstd, but slower to read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a store of that name.")] = False,
    json: JsonOption = False,
) -> None:
    """Make a store of data of your own, a few frames at a time. What is assumed about it is printed, and kept in it."""
    from ups.library.own_data import open_own

    check_fractions(valid_fraction, test_fraction)
    reader, names = open_own(paths, task, valid_fraction=valid_fraction, test_fraction=test_fraction)
    write_store(reader, output, names, "importing", compress=compress, overwrite=overwrite, json=json)
