"""What a latent cache would bring, measured before it is written: time of a step, size, and the error of its numbers.

A step of a stage on latents with `unroll_steps` u costs about 3 u O + (u + 1) E: forward and backward of the operator,
and the encoder once for each latent. From a cache the second part is gone, so the gain is 1 + (u + 1) E / (3 u O),
which for u = 1 is 1 + 2 E / 3 O. Reading and decoding are not in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ups.config.stage import StageConfig
from ups.data.latent_cache import SPLIT, TaskLatents, as_float32, as_stored
from ups.formats.base import Reader
from ups.models.normalization import one_thread
from ups.models.stepper import Stepper
from ups.spec.batch import Float32

# A cache that makes steps less than a tenth faster is not worth its place and its care.
WORTH = 1.1
_SAMPLES, _REPEATS, _WARM_UP = 16, 9, 2


@dataclass(frozen=True)
class TaskError:
    """Root mean square error of stored latents, relative to the latents and to their change over a step (NaN: none)."""

    of_latent: float
    of_change: float


@dataclass(frozen=True)
class Gain:
    """What was measured. Seconds are CPU time of one forward pass for a window, summed over the tasks."""

    encoder_seconds: float
    operator_seconds: float
    factor: float
    errors: Mapping[str, TaskError]
    latent_bytes: int
    field_bytes: int

    @property
    def pays(self) -> bool:
        return self.factor >= WORTH

    @property
    def verdict(self) -> str:
        """In a sentence."""
        size = self.latent_bytes / max(1, self.field_bytes)
        larger = f"; the latents are {size:.1f} times as large as the fields" if size >= 1 else ""
        if self.pays:
            return f"expected: {self.factor:.2f} times as many steps in the same time{larger}"
        return f"this cache does not pay: at most {self.factor:.2f} times as many steps in the same time{larger}"

    def to_json(self) -> dict[str, Any]:
        """What does not change from one measurement to the next, for the cache itself."""
        return {
            "errors": {n: {"of_latent": e.of_latent, "of_change": _plain(e.of_change)} for n, e in self.errors.items()}
        }


def measure_gain(
    stepper: Stepper,
    readers: list[Reader],
    tasks: tuple[TaskLatents, ...],
    stage: StageConfig,
    dtype: str,
    num_bytes: int,
) -> Gain:
    """Encode and step a few windows of each task, in turns, on this thread."""
    unroll = int(getattr(stage, "unroll_steps", 1))
    with_cache = without = encoder = operator = 0.0
    errors: dict[str, TaskError] = {}
    for reader, layout in zip(readers, tasks, strict=True):
        latents, encode, step = _try(stepper, reader, layout)
        seconds = _in_turns([encode, step])
        samples = latents.shape[0]
        encoder, operator = encoder + seconds[0] / samples, operator + seconds[1] / samples
        steps = 1 if reader.task.steady else unroll
        with_cache += 3 * steps * seconds[1] / samples
        without += (3 * steps * seconds[1] + (steps + 1) * seconds[0]) / samples
        errors[reader.task.name] = rounding_error(latents, dtype, changes=not reader.task.steady)
    fields = sum(field_bytes(reader) for reader in readers)
    return Gain(encoder, operator, without / with_cache, errors, num_bytes, fields)


def rounding_error(latents: Float32, dtype: str, *, changes: bool) -> TaskError:
    """latents (B, 2, *N, Z): two of each sample, which follow each other if `changes`."""
    exact = latents.astype(np.float64)
    error = as_float32(as_stored(latents, dtype), dtype) - exact
    of_change = float("nan")
    if changes:
        size = _rms(exact[:, 1] - exact[:, 0])
        of_change = _rms(error[:, 1] - error[:, 0]) / size if size > 0 else float("nan")
    return TaskError(_rms(error) / max(_rms(exact), 1e-300), of_change)


def _try(
    stepper: Stepper, reader: Reader, layout: TaskLatents
) -> tuple[Float32, Callable[[], object], Callable[[], object]]:
    """Two latents (B, 2, *N, Z) of a few windows of a task; what encodes one for each; what steps them."""
    task, context = reader.task, stepper.context_frames
    counts = np.diff(layout.before)
    chosen = np.flatnonzero(counts >= 2)
    picked = [int(t) for t in chosen[:: max(1, len(chosen) // _SAMPLES)][:_SAMPLES]] or [0]
    frames = 0 if task.steady else context + int(counts[picked].min() >= 2)
    block = reader.read_block(SPLIT, picked, [0] * len(picked), frames)
    state, static, target = (torch.from_numpy(x) for x in (block.state, block.static, block.target))
    given = stepper.inputs(state[:, :context], static, task)
    after = stepper.target_inputs(target, task) if task.steady else stepper.inputs(state[:, -context:], static, task)
    parameters = stepper.normalization.parameters_of(task, torch.from_numpy(block.parameters))
    dt = torch.from_numpy(block.dt.astype(np.float32))
    coordinates = stepper.fit.coordinates([torch.from_numpy(c) for c in block.coordinates], task)
    with torch.inference_mode():
        pair = [stepper.encode(*fields, task) for fields in (given, after)]

    def encode() -> object:
        return stepper.encode(*stepper.inputs(state[:, :context], static, task), task)

    def step() -> object:
        return stepper.latent.operator(pair[0], task, parameters, dt, coordinates)

    return torch.stack(pair, dim=1).float().numpy(), encode, step


def _in_turns(works: list[Callable[[], object]]) -> list[float]:
    """CPU seconds of each piece of work: medians over passes that take turns, so that a slow moment hits all alike."""
    found: list[list[float]] = [[] for _ in works]
    with torch.inference_mode(), one_thread():
        for _ in range(_WARM_UP + _REPEATS):
            for times, work in zip(found, works, strict=True):
                started = time.process_time()
                work()
                times.append(time.process_time() - started)
    return [max(statistics.median(times[_WARM_UP:]), 1e-9) for times in found]


def field_bytes(reader: Reader) -> int:
    """Of the train split, as float32."""
    task, count = reader.task, reader.splits[SPLIT]
    frames = 0 if task.steady else sum(reader.frames_in(SPLIT, t) for t in range(count))
    given = task.num_channels("static") + task.num_channels("target")
    return 4 * int(np.prod(reader.space)) * (frames * task.num_channels("state") + count * given)


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def _plain(value: float) -> float | None:
    return value if np.isfinite(value) else None
