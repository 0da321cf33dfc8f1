"""Statistics of a task, from its train split only: one pass, kept next to the data, never trusted when stale.

Owns how statistics are computed and where they are stored. What they are is `ups.spec.statistics`; the models apply
them. Data itself stays in physical units.

`ensure_statistics` is what a run calls, on one rank; the others are sent the result. Files are written atomically, so
that two runs can write at once.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ups.buckets.path import BucketPath, data_path, plain_name
from ups.data.permutation import Permutation
from ups.errors import DataError, MachineError
from ups.formats.base import Array, Reader, WindowBlock
from ups.record.files import open_regular, parse_object, write_file_atomically
from ups.record.run_dir import cache_directory
from ups.spec.descriptors import Moments, RangeFinder, by_channel, ranges_fit
from ups.spec.keyed import key_of
from ups.spec.statistics import Statistics, safe
from ups.spec.task import TaskSpec

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]

# Means and deviations of a few hundred million numbers do not get better with more of them: of a larger train split
# so many bytes are read (float32, after subsampling), from trajectories drawn by a fixed key. At least _MIN_SAMPLE
# trajectories are read, whatever their size.
MAX_SAMPLE_BYTES = 4 << 30
_MIN_SAMPLE = 16
# Descriptors cost several times as much as moments, and their ranges need fewer trajectories.
MAX_DESCRIBED_BYTES = 256 << 20
# One read, and so the memory in use, stays near this size.
_READ_BYTES = 8 << 20

_FORMAT = "ups-statistics"
_VERSION = 5
_MAX_FILE_BYTES = 4 << 20
# Statistics of the same files under other strides live in the same file; the oldest leave first.
_MAX_ENTRIES = 16


def compute_statistics(
    reader: Reader, progress: Progress | None = None, *, max_bytes: int = MAX_SAMPLE_BYTES
) -> Statistics:
    """Mean and deviation of every channel over the train split, in one pass with bounded memory.

    progress(done, total) counts trajectories. Above `max_bytes` a fixed subset of the
    trajectories is read; `Statistics.num_frames` says how many frames went in (for a steady task: samples).
    """
    task, total = reader.task, reader.splits["train"]
    if total < 1:
        raise DataError(f"task '{task.name}' has no trajectories to train on", hint="check its splits")
    chosen = _sample(reader, total, max_bytes)
    described = set(_sample(reader, total, min(max_bytes, MAX_DESCRIBED_BYTES)))  # a part of the chosen ones
    state, difference = Moments(task.num_channels("state")), Moments(task.num_channels("state"))
    static, target = Moments(task.num_channels("static")), Moments(task.num_channels("target"))
    parameters = Moments(len(task.parameters))
    waves, sizes = ShortestWaves(task), FrameSizes(task.num_channels("state"))
    ranges = {role: RangeFinder(task.axes) for role in ("state", "static", "target") if task.num_channels(role)}
    logs = np.array([p.scale == "log" for p in task.parameters], bool)
    done = 0
    for trajectories, block, first_frame in _blocks(reader, chosen):
        # A read that continues a trajectory repeats its last frame, for the difference across the seam.
        fresh = block.state[:, 1:] if first_frame else block.state
        counted = functools.partial(_counted, block)
        try:
            state.add(counted(fresh))  # (C, B*T*S)
            waves.add(fresh)
            sizes.add(fresh)
            parts = {"state": fresh}
            difference.add(counted(np.diff(block.state.astype(np.float64), axis=1)))
            if first_frame == 0:
                static.add(counted(block.static[:, None]))
                target.add(counted(block.target[:, None]))
                parameters.add(_scaled(block.parameters, logs))
                parts |= {"static": block.static[:, None], "target": block.target[:, None]}
            picked = [number for number, trajectory in enumerate(trajectories) if trajectory in described]
            for role in ranges.keys() & parts.keys():
                ranges[role].add([trajectories[number] for number in picked], parts[role][picked])
        except FloatingPointError as error:
            raise _located(reader, trajectories, block, first_frame, logs) from error
        if first_frame + block.state.shape[1] >= reader.frames_in("train", trajectories[0]):
            done += len(trajectories)
            if progress is not None:
                progress(done, len(chosen))
    num_frames = len(chosen) if task.steady else sum(reader.frames_in("train", t) for t in chosen)
    moments = {"state": state, "static": static, "target": target}
    return Statistics(
        state_mean=state.mean,
        state_std=state.std(),
        difference_mean=difference.mean,
        # Below the resolution of the state, a difference is rounding.
        difference_std=difference.std(scale=state.magnitude),
        static_mean=static.mean,
        static_std=static.std(),
        target_mean=target.mean,
        target_std=target.std(),
        parameter_mean=parameters.mean,
        parameter_std=parameters.std(),
        smooth_from=waves.absent(state.std()),
        size_spread=sizes.spread(state.mean, state.std()),
        ranges={role: finder.ranges(moments[role].mean, moments[role].std()) for role, finder in ranges.items()},
        data_identity=reader.identity(),
        num_frames=num_frames,
    )


def _counted(block: WindowBlock, frames: Array) -> Array:
    """(C, n): the values of frames (B, T, C, *S) that are not in holes."""
    values, task = by_channel(frames, 2), block.task
    if not task.mask or not values.size:
        return values
    holes = block.static[:, None, task.channel_names("static").index(task.mask)]  # (B, 1, *S)
    return np.asarray(values[:, np.broadcast_to(holes, (*frames.shape[:2], *frames.shape[3:])).ravel() == 0])


def statistics_path(path: str | Path | Sequence[str | Path]) -> Path:
    """The file next to the data: NAME.zarr -> NAME.zarr.statistics.json; the first of several files names it."""
    first = path if isinstance(path, str | Path) else path[0]
    data = data_path(plain_name(first))
    return data.with_name(data.name + ".statistics.json")


def load_statistics(reader: Reader, path: str | Path | Sequence[str | Path]) -> Statistics | None:
    """What `ensure_statistics` stored for this reader; None, with a warning, if there are only others."""
    identity = reader.identity()
    for file in _files_of(path):
        if not file.exists():
            continue
        problem, entry = "they are of other data or other strides", _read_entries(file).get(identity)
        if entry is not None and (not isinstance(entry, dict) or entry.pop("sha256", None) != _checksum(entry)):
            problem = "they do not fit their checksum"
        elif entry is not None:
            try:
                statistics = Statistics.from_json(entry)
                if _fit(statistics, reader):
                    return statistics
                problem = f"they do not fit task '{reader.task.name}'"
            except DataError as error:
                problem = error.message
        # A run would take these numbers for its own: they are measured again instead.
        logger.warning("statistics in %s are ignored: %s", file, problem)
    return None


def ensure_statistics(
    reader: Reader, path: str | Path | Sequence[str | Path], progress: Progress | None = None
) -> Statistics:
    """The stored statistics if they are of exactly this data, else new ones, which are stored.

    Where the directory of the data is read-only they go to the cache directory of the person instead
    ($XDG_CACHE_HOME/ups, by default ~/.cache/ups); where that fails too, or there is no home, they are only returned.
    """
    known = load_statistics(reader, path)
    if known is not None:
        return known
    logger.info("computing statistics of task '%s'", reader.task.name)
    statistics = compute_statistics(reader, progress)
    for file in _files_of(path):
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            _store(file, statistics)
        except (MachineError, OSError) as error:
            logger.warning("cannot store statistics of task '%s': %s", reader.task.name, error)
        else:
            return statistics
    return statistics


def _sample(reader: Reader, total: int, max_bytes: int) -> Sequence[int]:
    count = max(_MIN_SAMPLE, max_bytes // max(1, _trajectory_bytes(reader)))
    if count >= total:
        return range(total)
    # Not the first ones: files are often sorted by a parameter. In ascending order, because disks like that.
    order = Permutation(total, key_of(0, "statistics sample"))
    return sorted(order.forward(np.arange(count)).tolist())


def _trajectory_bytes(reader: Reader) -> int:
    task, points = reader.task, int(np.prod(reader.space))
    num_fixed = task.num_channels("static") + task.num_channels("target")
    return 4 * points * (reader.num_frames * task.num_channels("state") + num_fixed)


def _blocks(reader: Reader, chosen: Sequence[int]) -> Iterator[tuple[Sequence[int], WindowBlock, int]]:
    """(trajectories, what was read of them, first frame): whole ones of equal length together, or a long one in
    pieces."""
    per_read = max(1, _READ_BYTES // max(1, _trajectory_bytes(reader)))
    frame_bytes = 4 * int(np.prod(reader.space)) * max(1, reader.task.num_channels("state"))
    frames = min(reader.num_frames, max(2, _READ_BYTES // frame_bytes))
    known = reader.frames_of("train")
    lengths = [reader.num_frames] if known is None else sorted({int(known[t]) for t in chosen})
    for length in lengths:
        alike = chosen if known is None else [t for t in chosen if known[t] == length]
        for i in range(0, len(alike), per_read):
            trajectories = alike[i : i + per_read]
            if frames >= length:
                yield trajectories, reader.read_block("train", trajectories, [0] * len(trajectories), length), 0
                continue
            for trajectory in trajectories:
                for first in range(0, length - 1, frames - 1):
                    count = min(frames, length - first)
                    yield (trajectory,), reader.read_block("train", (trajectory,), (first,), count), first


def _scaled(parameters: np.ndarray[Any, Any], logs: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    values = parameters.T.astype(np.float64)  # (P, B)
    if (values[logs] <= 0).any():
        raise FloatingPointError("a parameter with a log scale is 0 or less")
    values[logs] = np.log(values[logs])
    return values


def _located(
    reader: Reader, trajectories: Sequence[int], block: WindowBlock, first_frame: int, logs: np.ndarray[Any, Any]
) -> DataError:
    """What is wrong with numbers that could not be taken in, and where."""
    hint = MASK_HINT if masked(block.state).any() else "look at the whole file with `ups data validate`"
    for i, trajectory in enumerate(trajectories):
        where = reader.where("train", trajectory)
        for frame, values in enumerate(block.state[i]):
            if not np.isfinite(values).all():
                return DataError(f"{where}, frame {first_frame + frame} has a value that is not finite", hint=hint)
        for name, array in (("static", block.static[i]), ("target", block.target[i]), ("", block.parameters[i])):
            if not np.isfinite(array).all():
                return DataError(f"{where} has a {name or 'parameter'} value that is not finite", hint=hint)
        if (block.parameters[i][logs] <= 0).any():
            return DataError(f"{where} has a parameter of 0 or less, but the scale of that is log", hint=hint)
    return DataError(f"{reader.where('train', trajectories[0])}: numbers too large to measure", hint=hint)


def _fit(statistics: Statistics, reader: Reader) -> bool:
    """Whether statistics have the channels of a task and its grid."""
    task = reader.task
    expected = {role: task.num_channels(role) for role in ("state", "static", "target")}
    expected |= {"difference": expected["state"], "parameter": len(task.parameters)}
    fits = all(len(getattr(statistics, f"{role}_mean")) == count for role, count in expected.items())
    return fits and statistics.waves_fit(task) and ranges_fit(statistics.ranges, task, reader.space)


def _files_of(path: str | Path | Sequence[str | Path]) -> list[Path]:
    """Where statistics are kept: next to the data, or in the cache of the person, if that person has a home."""
    at_data = statistics_path(path)
    beside = [] if isinstance(at_data, BucketPath) else [at_data]  # data in a bucket is read, never written to
    cache = cache_directory()
    if cache is None:
        return beside
    key = hashlib.sha256(str(at_data).encode()).hexdigest()[:16]
    name = f"{at_data.name.removesuffix('.statistics.json')}.{key}.json"
    return [*beside, cache / "statistics" / name]


def _read_entries(file: Path) -> dict[str, Any]:
    """Statistics by identity of the data; a file that is not readable as such counts as empty, with a warning."""
    try:
        with open_regular(file, follow_link=True) as stream:
            document = parse_object(stream.read(_MAX_FILE_BYTES) if stream is not None else b"")
        if document.get("format") != _FORMAT or document.get("version") != _VERSION:
            raise ValueError("it is not a statistics file of this version")
        entries = document.get("entries")
        if not isinstance(entries, dict):
            raise ValueError("it has no entries")
    except (OSError, ValueError) as error:
        logger.warning("statistics in %s are ignored: %s", file, error)
        return {}
    return entries


def _store(file: Path, statistics: Statistics) -> None:
    entries = _read_entries(file) if file.exists() else {}
    entries.pop(statistics.data_identity, None)
    recent = list(entries.items())[-(_MAX_ENTRIES - 1) :]
    entry = statistics.to_json()
    document = {
        "format": _FORMAT,
        "version": _VERSION,
        "entries": {**dict(recent), statistics.data_identity: {**entry, "sha256": _checksum(entry)}},
    }
    write_file_atomically(file, (json.dumps(document, indent=1) + "\n").encode())


def _checksum(statistics: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(statistics, sort_keys=True).encode()).hexdigest()


# Largest amplitude that counts as none, in standard deviations of the field. Rounding to float32 leaves 1e-8, and no
# model is as accurate as this; data that do have the wave are at 1e-4 and above.
_NOTHING = 1e-6


class ShortestWaves:
    """The largest amplitude of the shortest wave (up, down, up, down) along each periodic axis with an even number of
    points.

    Spectral solvers cut it off, and smooth fields do not reach it. What no sample has, no loss teaches: a model may let
    such a wave grow by a few percent a step, which scores do not show and a long rollout does.
    """

    def __init__(self, task: TaskSpec) -> None:
        self._axes = [axis.boundary == "periodic" for axis in task.axes]
        self._largest = np.zeros((task.num_channels("state"), len(task.axes)))
        self._points = [0] * len(task.axes)

    def add(self, state: np.ndarray[Any, Any]) -> None:
        """Take in frames (B, T, C, *S)."""
        if not state.size:
            return
        for axis, periodic in enumerate(self._axes):
            points = state.shape[3 + axis]
            if not periodic or points % 2:
                continue
            self._points[axis] = points
            lines = np.moveaxis(state, (2, 3 + axis), (0, -1))  # (C, ..., points)
            ups, downs = (lines[..., first::2].mean(-1, dtype=np.float64) for first in (0, 1))
            flat = np.abs(ups - downs).reshape(len(lines), -1) / 2
            self._largest[:, axis] = np.maximum(self._largest[:, axis], flat.max(1))

    def absent(self, std: tuple[float, ...]) -> tuple[tuple[int, ...], ...]:
        """For each channel and axis: the points of the grid where the wave is never there, else 0."""
        return tuple(
            tuple(n if amplitude <= _NOTHING * scale else 0 for n, amplitude in zip(self._points, row, strict=True))
            for row, scale in zip(self._largest, std, strict=True)
        )


# Frames that are remembered; of more, every second, fourth, and so on.
_MOST_FRAMES = 1 << 17
# What is weaker than this, in usual deviations, is as good as nothing.
_SMALLEST = 1e-3


class FrameSizes:
    """Mean and mean square of each channel in each frame: over how many orders of magnitude the frames of a task go."""

    def __init__(self, num_channels: int) -> None:
        self._moments: list[np.ndarray[Any, Any]] = [np.zeros((0, num_channels, 2))]
        self._num_rows, self._seen, self._every = 0, 0, 1

    def add(self, state: np.ndarray[Any, Any]) -> None:
        """Take in frames (B, T, C, *S)."""
        if not state.size:
            return
        frames = state.reshape(-1, state.shape[2], int(np.prod(state.shape[3:])))
        first = -self._seen % self._every
        self._seen += len(frames)
        values = frames[first :: self._every].astype(np.float64)
        self._moments.append(np.stack([values.mean(-1), np.square(values).mean(-1)], axis=-1))
        self._num_rows += len(values)
        while self._num_rows > _MOST_FRAMES:
            self._every *= 2
            self._moments = [np.concatenate(self._moments)[::2]]
            self._num_rows = len(self._moments[0])

    def spread(self, mean: tuple[float, ...], std: tuple[float, ...]) -> float:
        """Standard deviation of the natural logarithm of sizes: root mean squares in usual deviations."""
        moments = np.concatenate(self._moments)
        if not len(moments) or not mean:
            return 0.0
        center, scale = np.asarray(mean), np.asarray(safe(std))
        squares = moments[..., 1] - 2 * center * moments[..., 0] + center**2  # (N, C)
        sizes = (squares / scale**2).mean(1)
        return float(np.log(np.maximum(sizes, _SMALLEST**2)).std() / 2)


MASK_HINT = (
    "let values in obstacles be NaN and say `mask: mask` in the task.yaml (docs/own-data.md); or save a mask (1 in the "
    "obstacle, else 0) as an array without time, and name that static field there"
)
# A number that stands for a missing value is this many times farther from the others than they are from each other.
_FAR = 10


def refuse_mask(values: Array, where: str) -> None:
    """Raise DataError if the same points of frames (N, T, C, *S) have no value in every frame of a trajectory."""
    missing, what = masked(values), "not finite"
    for channel in [] if missing.any() else np.moveaxis(values, 2, 0):
        for mark in (channel.min(), channel.max()):
            others = channel[channel != mark]
            far = others.size and np.abs(others - mark).min() > _FAR * np.ptp(others) > 0
            if far and (channel == mark).all(axis=1).any():
                missing, what = (channel == mark).all(axis=1), f"{mark:g}, far from all others,"
    if missing.any():
        first = next(one for one in missing if one.any())
        raise DataError(
            f"{where}: {np.count_nonzero(first)} of {first.size} values of a frame are {what} in every frame: an "
            "obstacle, of which the task says nothing",
            hint=MASK_HINT,
        )


def masked(values: Array) -> Array:
    """(N, C, *S) whether a value of frames (N, T, C, *S) is in no frame finite, while others of its trajectory are."""
    bad = np.asarray(~np.isfinite(values))
    everywhere = np.asarray(bad.all(axis=tuple(range(1, bad.ndim)), keepdims=True))
    return np.asarray(bad.all(axis=1) & ~everywhere[:, 0])
