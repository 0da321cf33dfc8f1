"""Where the frames of a rollout go: into memory, or streamed to a file. Either way an xarray.Dataset comes out.

Variables are fields by name with dimensions (sample, member, time, [component,] *axes); `sample` only where the input
had it, `member` only in an ensemble. More, one value for each sample: `warnings` (bit flags, see
`ups.inference.trust`) and `blew_up`, which each member has of its own, with the step as `diverged_at` and a mask along
time as `diverged`. The attributes of these names say the same in words, and are empty where there is nothing to say.
Further attributes are those of the CF conventions (`ups.spec.labels`). Files: `ups.inference.streamed`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ups.errors import BundleError
from ups.inference.inputs import Start
from ups.inference.layout import Divergence, Frame, Layout
from ups.inference.streamed import open_streamed
from ups.inference.trust import Trust
from ups.spec.task import TaskSpec

MAX_MEMORY_BYTES = 8 * 2**30


class FrameSink(Protocol):
    """Takes frames (B, C, *S) in order, and gives the dataset. divergence is shown every step, also those not kept."""

    divergence: Divergence

    def add(self, frame: Frame) -> None: ...

    def finish(self) -> Any: ...

    def abandon(self) -> None: ...


def open_sink(
    task: TaskSpec,
    start: Start,
    num_frames: int,
    every: int,
    trust: Trust,
    facts: dict[str, str],
    out: str | Path | None,
    members: int | None = None,
    *,
    reversed_axes: bool = False,
) -> FrameSink:
    """A sink for `num_frames` frames, `every` steps apart. facts: further attributes of the result.

    members: how many a sample has, if the result is an ensemble.
    out: a new file; NetCDF if its name ends so (.nc, .nc4, .cdf), else a Zarr store.
    reversed_axes: variables lie in the order z, y, x.
    """
    layout = Layout(task, start, num_frames, every, trust, facts, members, reversed_axes=reversed_axes)
    if out is None:
        if layout.num_bytes > MAX_MEMORY_BYTES:
            raise BundleError(
                f"the result would take {layout.num_bytes / 2**30:.1f} GiB of memory",
                hint="stream it to a store with out='result.zarr', or keep fewer frames with every=",
                command_hint="write it to a store with -o RESULT.zarr, or keep fewer frames with --every",
            )
        return MemorySink(layout)
    return open_streamed(layout, Path(out))


class MemorySink:
    """Frames in one array that is allocated once."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        channels = sum(layout.components(f) for f in layout.fields)
        self.frames = np.empty((layout.num_rows, layout.num_frames, channels, *layout.space), np.float32)
        self.count = 0
        self.divergence = Divergence(layout)

    def add(self, frame: Frame) -> None:
        self.frames[:, self.count] = frame
        self.count += 1

    def abandon(self) -> None:
        """Nothing is left behind."""

    def finish(self) -> Any:
        import xarray

        layout = self.layout
        parts = layout.split(self.frames)
        variables: dict[str, Any] = {
            f.name: (layout.dims(f), layout.squeeze(f, parts[f.name]), layout.labels[f.name]) for f in layout.fields
        }
        for name, (labels, values) in layout.parameters.items():
            variables[name] = (("sample",), values, labels) if layout.batched else ((), values[0], labels)
        coordinates = {name: ((name,), values, layout.labels[name]) for name, values in layout.coordinates.items()}
        variables |= layout.per_sample(self.divergence)
        attributes = layout.attributes | self.divergence.attributes()
        return xarray.Dataset(variables, coords=coordinates, attrs=attributes)
