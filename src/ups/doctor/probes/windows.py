"""Which windows of a batch are bad: those that came with values that are not finite, and those that got such a loss.

Also the checksum of what was read, so that two environments can be compared batch by batch. Imports torch.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ups.spec.batch import Batch

if TYPE_CHECKING:
    from ups.run.assemble import Assembled

_FIELDS = ("state", "static", "target", "parameters", "dt")
_SHOWN = 8


def looked_at(parts: Assembled, found: dict[str, Any], losses: list[float]) -> None:
    """From now on every pass of the stage leaves its loss in `losses`, and in `found` a checksum of what was read
    (`crc`) and the first bad windows (`bad`).
    """
    stage, compute = parts.stage, parts.stage.sample_losses

    def sample_losses(batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        for batch in batches:
            found["crc"] = checksum(batch, found.get("crc", 0))
        given = {id(batch): _bad_rows([getattr(batch, name) for name in _FIELDS]) for batch in batches}
        for batch in batches:
            if given[id(batch)]:
                found.setdefault("bad", described(parts, batch, given[id(batch)], "values that are not finite"))
        results = compute(batches)
        for batch, result in zip(batches, results, strict=True):
            rows = _bad_rows([result["loss"].detach()])
            # All of them: the windows are not to blame.
            if 0 < len(rows) < batch.num_samples:
                found.setdefault("bad", described(parts, batch, rows, "a loss that is not finite"))
        return results

    stage.sample_losses = sample_losses  # type: ignore[method-assign]
    stage.register_forward_hook(lambda module, args, output: losses.append(float(output.total.detach())))


def described(parts: Assembled, batch: Batch, rows: Sequence[int], what: str) -> dict[str, Any]:
    """Task and places of some windows of a batch."""
    source = parts.loader.source
    task = next(n for n, reader in enumerate(source.readers) if reader.task.name == batch.task.name)
    trajectories, starts = source.indexes[task].locate_all(batch.numbers[list(rows)].numpy())
    where = [
        source.readers[task].where(source.split, trajectory) + ("" if batch.task.steady else f", frame {start}")
        for trajectory, start in zip(trajectories, starts, strict=True)
    ]
    return {
        "task": batch.task.name,
        "what": what,
        "of": batch.num_samples,
        "trajectories": sorted(set(trajectories)),
        "where": list(dict.fromkeys(where))[:_SHOWN],
    }


def checksum(batch: Batch, before: int) -> int:
    """CRC of what was read, in float32 and on the host, on from `before`."""
    for name in _FIELDS:
        values = getattr(batch, name).detach().to("cpu", torch.float32).contiguous()
        before = zlib.crc32(values.numpy().tobytes(), before)
    return before


def _bad_rows(tensors: Sequence[Tensor]) -> list[int]:
    bad: set[int] = set()
    for tensor in tensors:
        if tensor.numel():
            finite = torch.isfinite(tensor).flatten(1).all(1) if tensor.ndim > 1 else torch.isfinite(tensor)
            bad |= set(torch.nonzero(~finite).flatten().tolist())
    return sorted(bad)
