"""`ups data import`: `ups.import_data` with options."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from ups.cli.options import JsonOption
from ups.cli.output import report, say, table


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
    test_fraction: Annotated[float, typer.Option(min=0, max=0.9, help="Part for the test.")] = 0.1,
    compress: Annotated[bool, typer.Option("--compress", help="Smaller with zstd, but slower to read.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a store of that name.")] = False,
    json: JsonOption = False,
) -> None:
    """Make a store of data of your own, a few frames at a time. What is assumed about it is printed, and kept in it."""
    from ups.errors import ConfigError
    from ups.formats.zarr_store import StoreReader
    from ups.library.own_data import open_own, write_store
    from ups.run.progress_line import ProgressLine

    if valid_fraction + test_fraction >= 1:
        raise ConfigError("valid_fraction + test_fraction must stay below 1: nothing would be left to train on")
    reader, names = open_own(paths, task, valid_fraction=valid_fraction, test_fraction=test_fraction)
    started = time.monotonic()
    with ProgressLine(quiet=json) as line:
        manifest = write_store(
            reader,
            output,
            names,
            compress=compress,
            overwrite=overwrite,
            progress=lambda done, total: line.count("importing", done, total, "trajectories"),
        )
    facts = {
        "path": str(output),
        "task": reader.task.name,
        "splits": dict(reader.splits),
        "assumptions": list(reader.assumptions),
        "bytes": manifest.total_bytes,
        "identity": StoreReader(output).identity(),
        "seconds": round(time.monotonic() - started, 3),
    }
    if json:
        report(facts)
        return
    rows = [(key, str(value)) for key, value in facts.items() if key != "assumptions"]
    say(table(rows + [("assumed", text) for text in reader.assumptions]))
