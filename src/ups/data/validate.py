"""Looks for what makes data unfit to train on: reads everything once, names file, trajectory and frame.

A finding is a fact about the data, not a verdict about the physics: a field may rightly be constant at the start or
come to rest at the end, and then the kind can be allowed. What a task declares (positive, free of divergence, known
values at boundaries) a model keeps exactly (`ups.models.constraints`): data that contradict it force it to be wrong.
Memory grows with the number of trajectories (three hashes of 8 bytes each), never with their size.

`trajectories_in_train` is the quick check before every score, by the first and last frame: a score on a held-out
trajectory that is also in the train split says nothing.

Shape legend: T frames of the block at hand, C state or target channels, S space, A axes.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.config.description import TaskDescription
from ups.data.open import open_paths
from ups.errors import DataError, UpsError
from ups.formats.base import Reader
from ups.formats.check_store import check_store
from ups.formats.zarr_store import is_own_store
from ups.spec.batch import Float32, Float64, Window
from ups.spec.descriptors import Moments, by_channel
from ups.spec.grid import cell_widths
from ups.spec.task import BoundaryValue, TaskSpec

KINDS = {
    "unreadable": "a file, its coordinates or a trajectory cannot be read",
    "damaged": "bytes are not those that were committed",
    "not_finite": "NaN or infinite values",
    "constant_frame": "a frame in which every field is the same everywhere",
    "repeated_frame": "a frame equal to the one before",
    "duplicate": "two trajectories of one split are equal, or equal up to rounding",
    "leakage": "a trajectory of one split is also in another one",
    "not_conserved": "the integral of a field that the task calls conserved drifts",
    "negative": "a field that the task calls positive has negative values",
    "divergence": "a vector field that the task calls free of divergence has one",
    "boundary_value": "a field has another value at a boundary than the task says",
}
BLOCK_BYTES = 64 << 20
NUM_SAMPLES = 64  # values of a frame that the rounded signature of a trajectory is made of
MIN_DISTINCT = 8  # different rounded values without which a signature says nothing
MAX_FINDINGS = 1000

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong, and where. trajectory and frame are -1 where they have no meaning."""

    kind: str
    message: str
    where: str
    split: str = ""
    trajectory: int = -1
    frame: int = -1
    field: str = ""


@dataclass(slots=True)
class Report:
    """What `validate` found. `num_findings` counts those beyond the first thousand, too.

    task, equation ('' if it is not known) and assumptions: what the data were taken for.
    """

    num_trajectories: int = 0
    num_findings: int = 0
    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    task: str = ""
    equation: str = ""
    assumptions: list[str] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        self.num_findings += 1
        self.counts[finding.kind] = self.counts.get(finding.kind, 0) + 1
        if len(self.findings) < MAX_FINDINGS:
            self.findings.append(finding)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def validate_paths(
    path: str | Path | list[str],
    *,
    allow: Iterable[str] = (),
    drift_tolerance: float = 1e-3,
    deep: bool = True,
    progress: Progress | None = None,
    problem: str | None = None,
    format: str = "auto",
    description: TaskDescription | str | Path | None = None,
) -> Report:
    """All findings about a store or files, opening errors included. The last three: see `open_paths`.

    drift_tolerance: largest change of a conserved integral, relative to the integral of the field's absolute
    value then or in the first frame, whichever is larger.
    """
    paths = [str(p) for p in path] if isinstance(path, list) else [str(path)]
    report = Report()
    allowed = set(allow)
    try:
        reader = open_paths(paths, problem=problem, format=format, description=description)
    except DataError as error:
        report.add(Finding("unreadable", error.message, paths[0]))
        return report
    report.task, report.equation = reader.task.name, reader.task.equation
    report.assumptions = list(reader.assumptions)
    if is_own_store(paths[0]) and "damaged" not in allowed:
        for problem in check_store(paths[0], deep=deep):
            report.add(Finding("damaged", problem, paths[0]))
    _validate(reader, report, allowed, drift_tolerance, progress)
    return report


def _validate(
    reader: Reader, report: Report, allowed: set[str], drift_tolerance: float, progress: Progress | None
) -> None:
    """Reads every trajectory of a reader and adds what is wrong to the report."""
    total = sum(reader.splits.values())
    originals: dict[tuple[str, int], tuple[str, int]] = {}
    scales: Float64 | None = None
    for split, count in reader.splits.items():
        for trajectory in range(count):
            validator = _Validator(reader, split, trajectory, drift_tolerance, measure=scales is None)
            try:
                findings = list(validator.examine())
                if scales is None:
                    scales = validator.scales()
                findings += _compare(validator, scales, originals)
            except UpsError as error:
                findings = [validator.finding("unreadable", error.message)]
            for finding in findings:
                if finding.kind not in allowed:
                    report.add(finding)
            report.num_trajectories += 1
            if progress is not None:
                progress(report.num_trajectories, total)
            if report.counts.get("unreadable", 0) >= MAX_FINDINGS:
                return  # the rest is claimed, not there


class _Validator:
    """One trajectory, block by block."""

    def __init__(self, reader: Reader, split: str, trajectory: int, drift_tolerance: float, *, measure: bool) -> None:
        self.reader, self.split, self.trajectory = reader, split, trajectory
        self._tolerance = drift_tolerance
        self.hash = hashlib.blake2b(digest_size=8)
        self._samples: list[Float64] = []
        self._measure = measure
        self._moments = Moments(reader.task.num_channels(reader.task.predicted))

    def finding(self, kind: str, message: str, frame: int = -1, field: str = "") -> Finding:
        where = self.reader.where(self.split, self.trajectory)
        return Finding(kind, message, where, self.split, self.trajectory, frame, field)

    def examine(self) -> Iterator[Finding]:
        """Findings about this trajectory alone."""
        fixed = self.reader.read(self.split, self.trajectory, 0, 0 if self.reader.task.steady else 1)
        yield from self._examine_given(fixed)
        if self.reader.task.steady:
            return
        names, weights = self.reader.task.channel_names("state"), _weights(self.reader)
        last: Float32 | None = None
        initial: tuple[Float64, Float64] | None = None  # integral and size of the first frame
        reported: set[tuple[str, str]] = set()
        for start, block in _blocks(self.reader, self.split, self.trajectory):
            self._remember(block)
            integral = (block * weights).sum(axis=_space_axes(block), dtype=np.float64)  # (T, C)
            size = (np.abs(block) * weights).sum(axis=_space_axes(block), dtype=np.float64)
            if initial is None:
                initial = (integral[0], size[0])
            for finding in (
                *self._not_finite(block, names, start),
                *self._constant(block, start),
                *self._repeated(block, last, start),
                *self._contradictions(block, start),
                *self._drift(integral, size, initial, names, start),
            ):
                # One finding of a kind and field per trajectory: the first frame says where to look.
                if (finding.kind, finding.field) not in reported:
                    reported.add((finding.kind, finding.field))
                    yield finding
            last = block[-1]

    def scales(self) -> Float64:
        """(C,) root mean square of each channel of a trajectory that was measured: what rounding is relative to."""
        rms = np.array(self._moments.rms)
        return np.where(np.isfinite(rms) & (rms > 0), rms, 1.0)

    def rounded_hashes(self, scales: Float64) -> list[int]:
        """Two hashes of sampled values, rounded to 1 % of the scale on two grids half a step apart.

        Equal up to tiny noise gives an equal hash on at least one of them, unless a value is near the edge on each.
        None for a trajectory that is flat at this resolution: all such would look alike.
        """
        samples = np.concatenate(self._samples) if self._samples else np.zeros((0, len(scales)))
        numbers = []
        for shift in (0.0, 0.5):
            steps = np.clip(np.nan_to_num(samples, posinf=0.0, neginf=0.0) / scales, -1e9, 1e9) * 100.0
            cells = np.floor(steps + shift).astype(np.int64)
            if len(np.unique(cells)) < MIN_DISTINCT:
                return []
            numbers.append(int.from_bytes(hashlib.blake2b(cells.tobytes(), digest_size=8).digest(), "little"))
        return numbers

    def _examine_given(self, fixed: Window) -> Iterator[Finding]:
        if not np.isfinite(fixed.parameters).all():
            finite = np.isfinite(fixed.parameters)
            bad = [p.name for p, good in zip(self.reader.task.parameters, finite, strict=True) if not good]
            yield self.finding("not_finite", f"parameter {', '.join(bad)} is not finite", field=bad[0])
        for role in ("static", "target"):
            values: Float32 = getattr(fixed, role)
            for name, channel in zip(self.reader.task.channel_names(role), values, strict=True):
                if not np.isfinite(channel).all():
                    message = f"{role} field '{name}' has {_count_bad(channel)} values that are not finite"
                    yield self.finding("not_finite", message, field=name)
                elif role == "target" and (channel == channel.flat[0]).all():
                    yield self.finding("constant_frame", f"target field '{name}' is the same everywhere", field=name)
        self.hash.update(fixed.static.tobytes())
        self.hash.update(fixed.parameters.tobytes())
        if self.reader.task.steady:
            self._remember(fixed.target[None])
            yield from self._contradictions(fixed.target[None], -1)

    def _remember(self, block: Float32) -> None:
        """Feeds the hashes. block (T, C, *S)."""
        self.hash.update(np.ascontiguousarray(block).data)
        values = block.reshape(*block.shape[:2], -1)  # (T, C, points)
        if self._measure:
            self._moments.add(by_channel(np.nan_to_num(values, nan=0.0, posinf=0.0, neginf=0.0), 1))
        if len(self._samples) < NUM_SAMPLES:
            points = np.linspace(0, values.shape[2] - 1, min(NUM_SAMPLES, values.shape[2])).astype(int)
            self._samples.append(values[0][:, points].T.astype(np.float64))  # (samples, C)
            self._samples.append(values[-1][:, points].T.astype(np.float64))

    def _not_finite(self, block: Float32, names: tuple[str, ...], start: int) -> Iterator[Finding]:
        if np.isfinite(block.sum(dtype=np.float64)):
            return  # a sum is finite only if every value is
        bad = ~np.isfinite(block).all(axis=_space_axes(block))  # (T, C)
        for frame, channel in zip(*np.nonzero(bad), strict=True):
            number = _count_bad(block[frame, channel])
            message = f"field '{names[channel]}' has {number} values that are not finite"
            yield self.finding("not_finite", message, start + int(frame), names[channel])

    def _constant(self, block: Float32, start: int) -> Iterator[Finding]:
        axes = _space_axes(block)
        with np.errstate(invalid="ignore"):
            constant = (block.max(axis=axes) == block.min(axis=axes)).all(axis=1)  # (T,)
        for frame in np.flatnonzero(constant):
            yield self.finding("constant_frame", "every field is the same everywhere", start + int(frame))

    def _repeated(self, block: Float32, last: Float32 | None, start: int) -> Iterator[Finding]:
        previous = block[:-1] if last is None else np.concatenate([last[None], block[:-1]])
        offset = 1 if last is None else 0
        equal = (block[offset:] == previous).all(axis=tuple(range(1, block.ndim)))
        for frame in np.flatnonzero(equal):
            yield self.finding("repeated_frame", "equal to the frame before", start + offset + int(frame))

    def _contradictions(self, block: Float32, start: int) -> Iterator[Finding]:
        for kind, frame, name, message in contradictions(block, self.reader.task):
            yield self.finding(kind, message, start + frame, name)

    def _drift(
        self, integral: Float64, size: Float64, initial: tuple[Float64, Float64], names: tuple[str, ...], start: int
    ) -> Iterator[Finding]:
        for channel, name in enumerate(names):
            owner = next((f for f in self.reader.task.conserved if name == f or name.startswith(f"{f}_")), None)
            if owner is None:
                continue
            # Relative to the larger of then and now: a field that decays to nothing keeps its rounding errors.
            with np.errstate(invalid="ignore"):
                scale = np.maximum(size[:, channel], max(initial[1][channel], 1e-30))
                change = np.abs(integral[:, channel] - initial[0][channel]) / scale
            change = np.nan_to_num(change)  # what is not finite is another finding
            worst = int(np.argmax(change))
            if change[worst] > self._tolerance:
                message = f"the integral of '{name}' changed by {change[worst]:.2g} of its size since the first frame"
                yield self.finding("not_conserved", message, start + worst, name)


def _compare(
    validator: _Validator, scales: Float64, originals: dict[tuple[str, int], tuple[str, int]]
) -> Iterator[Finding]:
    """Findings about this trajectory and those before it."""
    here = (validator.split, validator.trajectory)
    keys = [("equal", int.from_bytes(validator.hash.digest(), "little"))]
    keys += [("nearly equal", number) for number in validator.rounded_hashes(scales)]
    for how, number in keys:
        earlier = originals.get((how, number))
        if earlier is not None and earlier != here:
            other = validator.reader.where(*earlier)
            kind = "duplicate" if earlier[0] == here[0] else "leakage"
            yield validator.finding(kind, f"{how} to {other}")
            break
    for how, number in keys:
        originals.setdefault((how, number), here)


def _blocks(reader: Reader, split: str, trajectory: int) -> Iterator[tuple[int, Float32]]:
    frame_bytes = 4 * reader.task.num_channels("state") * math.prod(reader.space)
    step = max(1, BLOCK_BYTES // frame_bytes)
    num_frames = reader.frames_in(split, trajectory)
    for start in range(0, num_frames, step):
        yield start, reader.read(split, trajectory, start, min(step, num_frames - start)).state


def _weights(reader: Reader) -> npt.NDArray[np.float32]:
    """(*S) part of the domain that each point stands for; the sum is 1."""
    out = np.ones(())
    for axis, values in zip(reader.task.axes, reader.coordinates, strict=True):
        out = np.multiply.outer(out, cell_widths(values, axis))
    return np.asarray(out, np.float32)


def _space_axes(block: Float32) -> tuple[int, ...]:
    return tuple(range(2, block.ndim))


def _count_bad(values: Float32) -> int:
    return int((~np.isfinite(values)).sum())


# Relative to the size of a field in the same frame: what rounding to float32, or a solver's own error, may leave.
_TOLERANCE = 1e-3


def contradictions(block: Float32, task: TaskSpec) -> Iterator[tuple[str, int, str, str]]:
    """(kind, frame, channel, message) of each frame of a block (T, C, *S) that is not as the task says.

    Values that are not finite are another finding and count as nothing here.
    """
    names = task.channel_names(task.predicted)
    fields = task.fields_of(task.predicted)
    owners = [field.name for field in fields for _ in range(field.num_channels(len(task.axes)))]
    values = np.nan_to_num(block.astype(np.float64), nan=0.0, posinf=0.0, neginf=0.0)
    space = tuple(range(2, values.ndim))
    size = np.abs(values).max(axis=space)  # (T, C)
    for channel, (name, owner) in enumerate(zip(names, owners, strict=True)):
        if owner in task.positive:
            yield from _negative(values[:, channel], size[:, channel], name)
    for known in task.boundary_values:
        channel = names.index(known.channel)
        yield from _at_boundary(values[:, channel], size[:, channel], known, task)
    for vector in task.divergence_free:
        first = owners.index(vector)
        yield from _divergence(values[:, first : first + len(task.axes)], vector, names[first], task)


def _negative(values: Float64, size: Float64, name: str) -> Iterator[tuple[str, int, str, str]]:
    """values (T, *S), size (T,)."""
    lowest = values.reshape(len(values), -1).min(axis=1)
    for frame in np.flatnonzero(lowest < -_TOLERANCE * size):
        yield "negative", int(frame), name, f"'{name}' is as low as {lowest[frame]:.3g}, and the task calls it positive"


def _at_boundary(
    values: Float64, size: Float64, known: BoundaryValue, task: TaskSpec
) -> Iterator[tuple[str, int, str, str]]:
    """values (T, *S), size (T,)."""
    axis = [axis.name for axis in task.axes].index(known.axis)
    end = np.take(values, 0 if known.end == "first" else -1, axis=axis + 1)
    off = np.abs(end - known.value).reshape(len(values), -1).max(axis=1)
    for frame in np.flatnonzero(off > _TOLERANCE * np.maximum(size, abs(known.value))):
        message = (
            f"'{known.channel}' is off by {off[frame]:.3g} from {known.value:g}, which the task says it is at the "
            f"{known.end} point of {known.axis}"
        )
        yield "boundary_value", int(frame), known.channel, message


def _divergence(vectors: Float64, field: str, channel: str, task: TaskSpec) -> Iterator[tuple[str, int, str, str]]:
    """vectors (T, A, *S). By Fourier derivatives, for the axes of such a task are periodic; relative to the derivatives
    that a divergence is the sum of."""
    total, squares = np.zeros_like(vectors[:, 0]), np.zeros(len(vectors))
    for axis, spec in enumerate(task.axes):
        points = vectors.shape[2 + axis]
        k = np.fft.fftfreq(points, spec.extent / points) * 2 * math.pi
        if points % 2 == 0:
            k[points // 2] = 0.0  # the wave of two points has no derivative on the grid
        shape = [-1 if other == axis else 1 for other in range(len(task.axes))]
        slope = np.fft.ifft(np.fft.fft(vectors[:, axis], axis=1 + axis) * (1j * k.reshape(shape)), axis=1 + axis).real
        total += slope
        squares += np.square(slope).reshape(len(vectors), -1).mean(axis=1)
    size, usual = np.sqrt(np.square(total).reshape(len(vectors), -1).mean(axis=1)), np.sqrt(squares)
    for frame in np.flatnonzero(size > _TOLERANCE * usual):
        share = size[frame] / usual[frame]
        message = f"the divergence of '{field}' is {share:.2g} of its derivatives, and the task says that it has none"
        yield "divergence", int(frame), channel, message


def trajectories_in_train(reader: Reader, split: str) -> dict[int, int]:
    """Trajectories of a held-out split that are also in train: number in `split` -> number in train."""
    held_out: dict[bytes, list[int]] = {}
    for trajectory in range(reader.splits.get(split, 0)):
        held_out.setdefault(fingerprint(reader, split, trajectory), []).append(trajectory)
    twins: dict[int, int] = {}
    for trajectory in range(reader.splits.get("train", 0) if held_out else 0):
        for twin in held_out.get(fingerprint(reader, "train", trajectory), ()):
            twins.setdefault(twin, trajectory)
    return dict(sorted(twins.items()))


def fingerprint(reader: Reader, split: str, trajectory: int) -> bytes:
    """Hash of the first and last frame, the static and target fields and the parameters of a trajectory."""
    if reader.task.steady:
        return _digest([reader.read(split, trajectory, 0, 0)])
    ends = (0, reader.frames_in(split, trajectory) - 1)
    return _digest([reader.read(split, trajectory, frame, 1) for frame in ends])


def _digest(windows: list[Window]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for window in windows:
        for values in (window.state, window.static, window.target, window.parameters):
            # adding 0 makes one zero of the two
            digest.update(np.ascontiguousarray(values + np.float32(0.0)).tobytes())
    return digest.digest()
