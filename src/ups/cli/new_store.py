"""What `ups data pack` and `ups data import` share: a reader becomes a store, and the facts about it are printed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ups.cli.output import report, say, table
from ups.record.text import duration_text, size_text

if TYPE_CHECKING:
    from ups.formats.base import GridReader


def check_fractions(valid_fraction: float, test_fraction: float) -> None:
    """Raise ConfigError if nothing would be left to train on."""
    from ups.errors import ConfigError

    if valid_fraction + test_fraction >= 1:
        raise ConfigError("valid_fraction + test_fraction must stay below 1: nothing would be left to train on")


def write_store(
    reader: GridReader, output: Path, names: Sequence[str], doing: str, *, compress: bool, overwrite: bool, json: bool
) -> None:
    """Write everything that the reader has. names: of its files. doing: for the line of progress."""
    from ups.data.pack import pack
    from ups.formats.zarr_store import StoreReader
    from ups.run.progress_line import ProgressLine

    started = time.monotonic()
    with ProgressLine(quiet=json) as line:
        manifest = pack(
            reader,
            output,
            compression="zstd" if compress else None,
            overwrite=overwrite,
            generator={"source": list(names)},
            progress=lambda done, total: line.count(doing, done, total, "trajectories"),
        )
    store = StoreReader(output)
    facts = {
        "path": str(output),
        "task": reader.task.name,
        "splits": dict(reader.splits),
        "assumptions": list(store.assumptions),
        "bytes": manifest.total_bytes,
        "identity": store.identity(),
        "seconds": round(time.monotonic() - started, 3),
    }
    if json:
        report(facts)
        return
    rows = [
        ("task", reader.task.name),
        ("path", str(output)),
        ("size", size_text(manifest.total_bytes)),
        ("trajectories", ", ".join(f"{count} {split}" for split, count in reader.splits.items())),
        *(("assumed", text) for text in store.assumptions),
        ("identity", str(facts["identity"])),
        ("took", duration_text(time.monotonic() - started)),
    ]
    say(table(rows))
