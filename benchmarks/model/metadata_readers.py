"""Which readers take the metadata of a checkpoint, a pickle of torch's, and which end with a hostile one.

    python benchmarks/model/metadata_readers.py

Each trial runs in a process of its own. One line for each, then `ok` or what was read (decision 0025).
"""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import pathlib
import pickle
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import _weights_only_unpickler
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.state_dict_saver import save

from ups.training.checkpoint_metadata import read_metadata, read_pickle

# Everything that the file names; `getattr` only where Python before 3.11.4 wrote it.
ALLOWED: list[Any] = [
    *(metadata.Metadata, metadata.MetadataIndex, metadata.StorageMeta, metadata.TensorProperties),
    *(metadata.TensorStorageMetadata, metadata.ChunkStorageMetadata, metadata._MEM_FORMAT_ENCODING),
    *(_StorageInfo, torch.Size, torch.serialization._get_layout, pathlib.PosixPath),
]
HOSTILE = b"\x80\x04})" + b"\x85" * 400_000 + b"Ns."


class Listed(pickle.Unpickler):
    """The unpickler of the standard library, for a list of allowed names."""

    def find_class(self, module: str, name: str) -> Any:
        for one in ALLOWED:
            if (one.__module__, one.__qualname__) == (module, name):
                return one
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed")


def framed(content: bytes) -> bytes:
    """What `torch.save` of old versions put around a pickle."""
    kind = torch.serialization
    before = (kind.MAGIC_NUMBER, kind.PROTOCOL_VERSION, {"little_endian": True})
    return b"".join(pickle.dumps(value, 2) for value in before) + content + pickle.dumps([], 2)


def trials(folder: Path) -> dict[str, Callable[[], Any]]:
    """Name -> a call that reads, or raises."""
    written = (folder / ".metadata").read_bytes()
    second = pickle.dumps(pickle.loads(written), 2)
    return {
        "as written, torch.load": lambda: torch.load(folder / ".metadata", weights_only=True),
        "as written, in the frame of torch.save": lambda: torch.load(io.BytesIO(framed(written)), weights_only=True),
        "as written, torch's restricted unpickler": lambda: _weights_only_unpickler.load(io.BytesIO(written)),
        "protocol 2, torch's restricted unpickler": lambda: _weights_only_unpickler.load(io.BytesIO(second)),
        "as written, ours": lambda: read_metadata(folder),
        "hostile, list of allowed names": lambda: Listed(io.BytesIO(HOSTILE)).load(),
        "hostile, ours": lambda: read_pickle(HOSTILE, frozenset()),
    }


def attempt(folder: str, name: str) -> None:
    """Try one, and say how it went."""
    warnings.simplefilter("ignore")
    try:
        with torch.serialization.safe_globals(ALLOWED):
            value = trials(Path(folder))[name]()
    except Exception as error:  # noqa: BLE001 - a trial
        lines = str(error).splitlines()
        reason = next((line.strip() for line in lines if "operand" in line), lines[0])
        print(f"{name}: {type(error).__name__}: {reason[:100]}", flush=True)
    else:
        print(f"{name}: read a {type(value).__name__}", flush=True)


def main() -> None:
    """Write a checkpoint, and read it in each way."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        writer = FileSystemWriter(folder, sync_files=False, thread_count=1)
        save({"weight": torch.ones(3, 2)}, storage_writer=writer, no_dist=True)
        for name in trials(Path(folder)):
            process = context.Process(target=attempt, args=(folder, name))
            process.start()
            process.join()
            if process.exitcode:
                print(f"{name}: the process ended with {process.exitcode}", flush=True)


if __name__ == "__main__":
    main()
