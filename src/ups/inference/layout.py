"""Names, dimensions, coordinates and attributes of a result, and what is said about each sample of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ups.inference.inputs import Start
from ups.inference.trust import KINDS, MAX_NAMED_SAMPLES, Trust
from ups.spec.labels import (
    CONVENTIONS,
    axis_attributes,
    component_dim,
    component_labels,
    field_attributes,
    time_attributes,
)
from ups.spec.task import FieldSpec, TaskSpec

Frame = npt.NDArray[np.float32]
MEMBER = "member"


class Layout:
    """Names, dimensions, coordinates and units of a result.

    members: of an ensemble, which has an axis of its own then; frames hold those of a sample one behind the other.
    reversed_axes: variables lie in the order z, y, x.
    """

    def __init__(
        self,
        task: TaskSpec,
        start: Start,
        num_frames: int,
        every: int,
        trust: Trust,
        facts: dict[str, str],
        members: int | None = None,
        *,
        reversed_axes: bool = False,
    ) -> None:
        self.task = task
        self.reversed_axes = reversed_axes
        self.fields = task.fields_of(task.predicted)
        self.space = start.domain.resampling.given
        self.num_samples = start.batch.num_samples
        self.members = members
        self.num_frames, self.every = num_frames, every
        self.start_time, self.dt = start.time, start.dt
        self.batched = start.batched
        self.attributes = {"Conventions": CONVENTIONS, **facts, **trust.attributes()}
        self.trust = trust
        self.coordinates: dict[str, npt.NDArray[Any]] = {
            axis.name: values for axis, values in zip(task.axes, start.domain.coordinates, strict=True)
        }
        self.labels: dict[str, dict[str, Any]] = {axis.name: axis_attributes(axis) for axis in task.axes}
        if not task.steady:
            self.coordinates["time"] = np.asarray(
                start.time + start.dt * every * np.arange(1, num_frames + 1), np.float64
            )
            self.labels["time"] = time_attributes(task)
        self.labels |= {field.name: field_attributes(field) for field in self.fields}
        if members is not None:
            self.coordinates[MEMBER] = np.arange(members)
            self.labels[MEMBER] = {"standard_name": "realization", "long_name": "member of the ensemble"}
        for field in self.fields:
            for dim in component_dim(task, field):
                if dim not in self.labels:
                    self.coordinates[dim] = np.array(component_labels(task, field), dtype=object)
                    self.labels[dim] = {"long_name": "component of a vector or tensor, by axis"}
        values = start.batch.parameters.numpy()
        self.parameters = {p.name: (field_attributes(p), values[:, i]) for i, p in enumerate(task.parameters)}

    @property
    def num_rows(self) -> int:
        """Trajectories in a frame: samples, or all members of all samples."""
        return self.num_samples * (self.members or 1)

    @property
    def lead(self) -> tuple[str, ...]:
        """Dimensions before time."""
        return (("sample",) if self.batched else ()) + (() if self.members is None else (MEMBER,))

    @property
    def num_bytes(self) -> int:
        channels = self.task.num_channels(self.task.predicted)
        return 4 * self.num_rows * self.num_frames * channels * int(np.prod(self.space))

    def components(self, field: FieldSpec) -> int:
        return field.num_channels(self.task.num_spatial_dims)

    def dims(self, field: FieldSpec) -> tuple[str, ...]:
        lead = self.lead
        lead += () if self.task.steady else ("time",)
        lead += component_dim(self.task, field)
        axes = tuple(a.name for a in self.task.axes)
        return (*lead, *(axes[::-1] if self.reversed_axes else axes))

    def shape(self, field: FieldSpec, num_frames: int) -> tuple[int, ...]:
        """The shape that `dims` names."""
        sizes = {"sample": self.num_samples, MEMBER: self.members or 1}
        lead = tuple(sizes[name] for name in self.lead)
        lead += () if self.task.steady else (num_frames,)
        lead += (self.components(field),) if field.tensor_rank else ()
        return (*lead, *(self.space[::-1] if self.reversed_axes else self.space))

    def squeeze(self, field: FieldSpec, values: Frame) -> Frame:
        """(row, time, component, *S) -> the shape that `dims` names."""
        if not field.tensor_rank:
            values = values[:, :, 0]
        if self.task.steady:
            values = values[:, 0]
        if self.reversed_axes:
            lead = values.ndim - len(self.space)
            values = values.transpose(*range(lead), *range(values.ndim - 1, lead - 1, -1))
        return self.by_sample(values)

    def by_sample(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(row, ...) -> with the dimensions of `lead` in front."""
        if self.members is not None:
            values = values.reshape(-1, self.members, *values.shape[1:])
        return values if self.batched else np.asarray(values[0])

    def split(self, frames: Frame) -> dict[str, Frame]:
        """(B, T, C, *S) -> field name -> (B, T, c, *S)."""
        parts, first = {}, 0
        for field in self.fields:
            last = first + self.components(field)
            parts[field.name] = frames[:, :, first:last]
            first = last
        return parts

    def per_sample(self, divergence: Divergence) -> dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]]:
        """Name -> (dimensions, values, attributes) of what is said about each sample."""
        step = divergence.first_step
        diverged = (step > 0).reshape(self.num_samples, -1).any(axis=1)  # (B,): of members any
        flags = self.trust.flags | (diverged << KINDS.index("diverged")).astype(np.int32)
        flags = flags if self.batched else np.asarray(flags[0])
        values: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]] = {
            "warnings": (("sample",) if self.batched else (), flags, self.trust.flag_attributes()),
            "blew_up": (self.lead, self.by_sample(step > 0), {}),
            "diverged_at": (self.lead, self.by_sample(step), {"long_name": "step of divergence, 0 if there is none"}),
        }
        if not self.task.steady:
            kept = self.every * np.arange(1, self.num_frames + 1)
            after = self.by_sample((step[:, None] > 0) & (kept >= step[:, None]))
            values["diverged"] = ((*self.lead, "time"), after, {"long_name": "at or after the step of divergence"})
        taken = {*self.parameters, *(f.name for f in self.fields), *self.coordinates}
        found: dict[str, tuple[tuple[str, ...], Any, dict[str, Any]]] = {}
        for name, what in values.items():
            free = name
            while free in taken:  # a field of that name keeps it
                free += "_"
            found[free] = what
        return found


class Divergence:
    """Which samples (or members of them) have diverged (`ups.spec.divergence`), and at which step."""

    def __init__(self, layout: Layout) -> None:
        self.layout, limits = layout, layout.trust.limits
        self._first_step = torch.zeros(layout.num_rows, dtype=torch.int32)
        self._usual = torch.finfo(torch.float64).max if limits is None else limits.usual_peak

    def look(self, frame: Tensor, step: int) -> None:
        """frame (B, C, *S): prediction of a step, counted from 1."""
        if float(torch.linalg.vector_norm(frame, torch.inf)) <= self._usual:
            return
        limits = self.layout.trust.limits
        bad = ~torch.isfinite(frame).flatten(1).all(dim=1) if limits is None else limits.exceeded(frame)
        self._first_step[bad.cpu() & (self._first_step == 0)] = step

    @property
    def first_step(self) -> npt.NDArray[np.int32]:
        """(B,): the step, 0 where a row has not diverged."""
        return self._first_step.numpy()

    def attributes(self) -> dict[str, str]:
        """What is said about the whole result in words, once it is complete."""
        words = self.words()
        warnings = [
            *self.layout.trust.warnings,
            *([f"the result is not a prediction from there on: {words}"] if words else []),
        ]
        return {"blew_up": words, "warnings": "; ".join(warnings)}

    def words(self) -> str:
        """'' if nothing diverged, else each sample with its step."""
        steps, members = self.first_step, self.layout.members
        numbers = np.flatnonzero(steps)
        lines = []
        for number in numbers[:MAX_NAMED_SAMPLES]:
            time = self.layout.start_time + self.layout.dt * int(steps[number])
            when = "" if self.layout.task.steady else f" at step {steps[number]} (time {time:g})"
            who = f"sample {number}" if members is None else f"sample {number // members}, member {number % members},"
            lines.append(f"{who} diverged{when}")
        more = len(numbers) - len(lines)
        return "; ".join([*lines, *([f"and {more} more"] if more > 0 else [])])
