"""Weights out of a checkpoint, whole, in one process: for evaluation, bundles and other programs.

Reads checkpoints written by any number of ranks, after verifying every byte. The run may be untrusted: torch's
metadata file is a pickle, and is read without running it (`checkpoint_metadata.py`). What is written is safetensors.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException: `except Exception` lets it through
from torch.distributed.checkpoint.state_dict_loader import load

from ups.errors import CheckpointError, IntegrityError
from ups.models.stepper import present_name
from ups.record.files import mode_by_umask
from ups.record.manifest import verify
from ups.training.checkpoint_metadata import CheckpointReader

_MODEL, _AVERAGE = "model/", "ema/"


def read_weights(checkpoint: Path, *, averaged: bool = True) -> dict[str, Tensor]:
    """Parameters by their names of today, on the CPU; the averaged ones where there is an average and unless told
    otherwise.

    Raises CheckpointError if a byte of the checkpoint is not what was committed, or it holds anything but tensors.
    """
    try:
        verify(checkpoint)
    except IntegrityError as error:
        raise CheckpointError(f"{checkpoint} cannot be trusted: {error.message}", hint=error.hint) from error
    reader = CheckpointReader(checkpoint)
    entries = reader.tensors
    chosen = {present_name(name.removeprefix(_MODEL)): name for name in entries if name.startswith(_MODEL)}
    if averaged:
        averages = [name for name in entries if name.startswith(_AVERAGE)]
        chosen |= {present_name(name.removeprefix(_AVERAGE)): name for name in averages}
    wanted = {name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype) for name in chosen.values()}
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            load(wanted, storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:
        # The hashes fit: the bytes were committed like this, by somebody who may have meant harm.
        raise CheckpointError(
            f"the tensors of {checkpoint} cannot be read ({type(error).__name__})",
            hint="do not use this checkpoint; take an older one or a copy",
        ) from error
    return {short: wanted[name] for short, name in chosen.items()}


def export_safetensors(checkpoint: Path, output: Path, *, averaged: bool = True) -> None:
    """Write the weights of a checkpoint as one safetensors file; the file appears whole or not at all."""
    from safetensors.torch import save_file

    weights = {name: tensor.contiguous() for name, tensor in read_weights(checkpoint, averaged=averaged).items()}
    temporary = output.with_name(f".{output.name}.{os.getpid()}.tmp")
    try:
        # One entry only: safetensors writes several in random order, and equal weights would give different files.
        save_file(weights, temporary, metadata={"format": "pt"})
        mode_by_umask(temporary)
        os.replace(temporary, output)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot write {output}: {error}", hint="is there space on the disk?") from error
