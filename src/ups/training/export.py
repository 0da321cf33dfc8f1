"""Weights out of a checkpoint, whole, in one process: for evaluation, bundles and other programs.

Reads checkpoints written by any number of ranks, after verifying every byte. torch's metadata file is a pickle, so only
checkpoints of one's own runs are read; what is written is safetensors.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from ups.errors import CheckpointError, IntegrityError
from ups.record.manifest import verify

_MODEL, _AVERAGE = "model/", "ema/"


def read_weights(checkpoint: Path, *, averaged: bool = True) -> dict[str, Tensor]:
    """Parameters by name, on the CPU; the averaged ones where there is an average, unless told otherwise.

    Raises CheckpointError if a byte of the checkpoint is not what was committed.
    """
    try:
        verify(checkpoint)
    except IntegrityError as error:
        raise CheckpointError(f"{checkpoint} cannot be trusted: {error.message}", hint=error.hint) from error
    reader = FileSystemReader(checkpoint)
    entries = {
        name: entry
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    chosen = {name.removeprefix(_MODEL): name for name in entries if name.startswith(_MODEL)}
    if averaged:
        chosen |= {name.removeprefix(_AVERAGE): name for name in entries if name.startswith(_AVERAGE)}
    wanted = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in chosen.values()}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        load(wanted, storage_reader=reader, no_dist=True)
    return {short: wanted[name] for short, name in chosen.items()}


def export_safetensors(checkpoint: Path, output: Path, *, averaged: bool = True) -> None:
    """Write the weights of a checkpoint as one safetensors file; the file appears whole or not at all."""
    from safetensors.torch import save_file

    weights = {name: tensor.contiguous() for name, tensor in read_weights(checkpoint, averaged=averaged).items()}
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        # One entry only: safetensors writes several in random order, and equal weights would give different files.
        save_file(weights, temporary, metadata={"format": "pt"})
        os.replace(temporary, output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {output}: {error}", hint="is there room on the disk?") from error
