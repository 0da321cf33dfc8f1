"""The latent cache of a stage: which encoder, what it would bring, and writing it with several processes.

Every process builds the encoder itself from where `start_from` leads, and compares its weights with those that the
cache is to be of. Which files, and their commit: `ups.data.latent_cache`.

The gain is measured before a cache is written. A step of a stage on latents with `unroll_steps` u costs about
3 u O + (u + 1) E: forward and backward of the operator, and the encoder once for each latent. From a cache the second
part is gone, so the gain is 1 + (u + 1) E / (3 u O), which for u = 1 is 1 + 2 E / 3 O. Reading and decoding are not in
it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ups.config.recipe import plain_data
from ups.config.schema import Recipe
from ups.config.stage import StageConfig
from ups.data.latent_cache import (
    SPLIT,
    CacheKey,
    CacheWriter,
    Job,
    LatentCache,
    TaskLatents,
    as_float32,
    as_stored,
    latents_in,
    open_cache,
    store_file,
)
from ups.errors import ConfigError, DataError
from ups.formats.base import Reader
from ups.models.normalization import one_thread
from ups.models.stepper import Stepper
from ups.models.transfer import transfer
from ups.record.processes import run_in_processes
from ups.record.run_dir import RunDir
from ups.run.assemble import OpenData, bare_stage, cache_key, open_data
from ups.run.directory import from_outside
from ups.run.warm_start import source_of, stepper_at
from ups.spec.batch import Float32

# Fields that are encoded at once; the bytes of a latent must not depend on who encodes it.
_BATCH_BYTES, _MAX_BATCH = 8 << 20, 256

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Written:
    """A finished cache. kept: it was there already."""

    cache: LatentCache
    num_bytes: int
    kept: bool


def stage_to_cache(recipe: Recipe) -> int:
    """The stage whose latents are to be kept. Raises ConfigError if there is none."""
    able = [n for n in from_outside(recipe) if getattr(recipe.stages[n], "space", "") == "latent"]
    named = [n for n in able if recipe.stages[n].cache_place]
    if not able:
        raise ConfigError(
            "no stage of the recipe learns from latents of an encoder that is there already",
            hint="give an operator stage space: latent and start_from: a run, bundle or checkpoint with the encoder",
        )
    return (named or able)[0]


def frozen_stepper(recipe: Recipe, opened: OpenData, index: int) -> Stepper:
    """The model as stage `index` starts with it, from where its `start_from` leads now."""
    stepper, _ = bare_stage(recipe, opened, index)
    transfer(stepper_at(recipe.stages[index].start_from or ""), stepper)
    return stepper.requires_grad_(False).eval()


def encoder_hash(stepper: Stepper) -> str:
    """Hash of the encoder's weights, and of the names that their rows belong to."""
    digest = hashlib.sha256()
    for name, tensor in sorted(stepper.latent.encoder.state_dict().items()):
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
        digest.update(values.flatten().view(torch.uint8).numpy().tobytes())
    rows = {name: (r.dim, r.names) for name, r in stepper.latent.named_rows().items() if name.startswith("encoder.")}
    digest.update(repr(sorted(rows.items())).encode())
    return digest.hexdigest()


def check_encoders(run_dir: Path, recipe: Recipe, opened: OpenData) -> None:
    """Raises DataError if a stage's cache is not of the encoder that the run keeps for it; nothing is trained on it."""
    for index in from_outside(recipe):
        path = recipe.stages[index].cache_place
        if path and RunDir(run_dir).start(index).exists():
            stepper, _ = bare_stage(recipe, opened, index)
            transfer(source_of(run_dir, index), stepper)
            open_cache(path, opened.readers, cache_key(recipe, opened, index, encoder=encoder_hash(stepper)))


def writer_for(
    root: Path, key: CacheKey, stepper: Stepper, opened: OpenData, *, overwrite: bool = False
) -> CacheWriter:
    """The writer of this cache. Raises ConfigError if something else has its name."""
    tasks = [
        TaskLatents.of(r, key.context_frames, latent_shape(stepper, r, key.context_frames), key.dtype)
        for r in opened.readers
    ]
    return CacheWriter(root, key, tasks, overwrite=overwrite)


def write_cache(
    writer: CacheWriter,
    stepper: Stepper,
    opened: OpenData,
    *,
    elsewhere: tuple[Recipe, int] | None = None,
    num_processes: int = 1,
    facts: dict[str, Any] | None = None,
    progress: Progress | None = None,
) -> Written:
    """Write what is missing and commit it. elsewhere: recipe and stage from which other processes build the encoder;
    without them, and with one process, it is done here.

    Raises DiskFullError before anything is written if it does not fit.
    """
    if writer.kept:
        writer.clean_up()
    else:
        with writer.held():
            writer.check_space()
            jobs = writer.open_jobs()
            total = sum(task.num_files for task in writer.tasks)
            done = itertools.count(total - len(jobs))

            def say() -> None:
                if progress is not None:
                    progress(next(done), total)

            def on_done(job: Job, result: tuple[str, int]) -> None:
                writer.done(job, *result)
                say()

            say()
            if elsewhere is None or num_processes == 1 or len(jobs) < 2:
                with one_thread():
                    for job in jobs:
                        on_done(job, _write(job, writer.content, writer.tasks, stepper, opened.readers, writer.key))
            else:
                recipe, index = elsewhere
                arguments = (plain_data(recipe), index, writer.content, writer.tasks, writer.key)
                who = "an encoding process"
                run_in_processes(_write_elsewhere, jobs, num_processes, on_done, start=(_start, arguments), who=who)
            writer.commit(opened.readers, facts or {})
    cache = open_cache(writer.root, opened.readers, writer.key)
    return Written(cache, writer.num_bytes, writer.kept)


def latent_shape(stepper: Stepper, reader: Reader, context_frames: int) -> tuple[int, ...]:
    """(*N, Z) of one latent of a task."""
    if not latents_in(reader, 0, context_frames):
        raise DataError(
            f"the first trajectory of task '{reader.task.name}' is shorter than {context_frames} context frames"
        )
    return tuple(next(iter(trajectory_latents(stepper, reader, 0, at_most=1))).shape[1:])


@torch.inference_mode()
def trajectory_latents(
    stepper: Stepper, reader: Reader, trajectory: int, at_most: int | None = None
) -> Iterator[Float32]:
    """(b, *N, Z) pieces of the latents of one trajectory of the train split, in their order."""
    task, context = reader.task, stepper.context_frames
    if task.steady:
        block = reader.read_block(SPLIT, (trajectory,), (0,), 0)
        state, static, target = (torch.from_numpy(x) for x in (block.state, block.static, block.target))
        inputs = stepper.encode(*stepper.inputs(state, static, task), task)
        yield torch.cat([inputs, stepper.encode(*stepper.target_inputs(target, task), task)]).float().numpy()
        return
    count = latents_in(reader, trajectory, context) if at_most is None else at_most
    frame_bytes = 4 * int(np.prod(reader.space)) * (task.num_channels("state") * context + task.num_channels("static"))
    size = max(1, min(_MAX_BATCH, _BATCH_BYTES // frame_bytes))
    for first in range(0, count, size):
        number = min(size, count - first)
        block = reader.read_block(SPLIT, (trajectory,), (first,), number + context - 1)
        frames = torch.from_numpy(block.state[0])  # (T, C, *S)
        windows = torch.stack([frames[f : f + number] for f in range(context)], dim=1)  # (b, context, C, *S)
        static = torch.from_numpy(block.static).expand(number, *block.static.shape[1:])
        yield stepper.encode(*stepper.inputs(windows, static, task), task).float().numpy()


def _write(
    job: Job, content: Path, tasks: tuple[TaskLatents, ...], stepper: Stepper, readers: Any, key: CacheKey
) -> tuple[str, int]:
    number, file = job
    layout = tasks[number]
    values = np.empty((layout.rows_of(file), *layout.shape), np.float32)
    at = 0
    for trajectory in layout.trajectories_of(file):
        if layout.before[trajectory + 1] == layout.before[trajectory]:
            continue
        for piece in trajectory_latents(stepper, readers[number], trajectory):
            values[at : at + len(piece)] = piece
            at += len(piece)
    return store_file(content, layout, file, values, key.dtype)


# What an encoding process is told: recipe, stage, and three arguments of `_write`.
_setup: list[Any] = []


def _start(*setup: Any) -> None:
    _setup.extend(setup)


@functools.cache
def _built() -> tuple[Stepper, OpenData]:
    """The encoder and the data of an encoding process: built with its first job, where an error can be reported."""
    plain, index, _, _, key = _setup
    torch.set_num_threads(1)
    recipe = Recipe.model_validate(plain)
    opened = contextlib.ExitStack().enter_context(open_data(recipe))
    stepper = frozen_stepper(recipe, opened, index)
    if encoder_hash(stepper) != key.encoder:
        raise DataError(
            "the encoder of start_from has changed since the command started", hint="run the same command again"
        )
    return stepper, opened


def _write_elsewhere(job: Job) -> tuple[str, int]:
    stepper, opened = _built()
    _, _, content, tasks, key = _setup
    return _write(job, content, tasks, stepper, opened.readers, key)


# A cache that makes steps less than a tenth faster is not worth its place and its care.
WORTH = 1.1
_SAMPLES, _REPEATS, _WARM_UP = 16, 9, 2


@dataclass(frozen=True)
class TaskError:
    """Root mean square error of stored latents, relative to latents and to their change over a step (None: none)."""

    of_latent: float
    of_change: float | None


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
        return {"errors": {name: asdict(error) for name, error in self.errors.items()}}


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
    size = _rms(exact[:, 1] - exact[:, 0]) if changes else 0.0
    of_change = _rms(error[:, 1] - error[:, 0]) / size if size > 0 else None
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

    def encode() -> Any:
        return stepper.encode(*stepper.inputs(state[:, :context], static, task), task)

    after = stepper.target_inputs(target, task) if task.steady else stepper.inputs(state[:, -context:], static, task)
    parameters = stepper.normalization.parameters_of(task, torch.from_numpy(block.parameters))
    dt = torch.from_numpy(block.dt.astype(np.float32))
    coordinates = stepper.fit.coordinates([torch.from_numpy(c) for c in block.coordinates], task)
    with torch.inference_mode():
        pair = [encode(), stepper.encode(*after, task)]

    def step() -> object:
        return stepper.latent.operator(pair[0], task, parameters, dt, coordinates)

    return torch.stack(pair, dim=1).float().numpy(), encode, step


def _in_turns(works: list[Callable[[], object]]) -> list[float]:
    """CPU seconds of each piece of work: medians over passes that take turns, so that a slow moment hits all alike."""
    seconds: list[list[float]] = [[] for _ in works]
    with torch.inference_mode(), one_thread():
        for _ in range(_WARM_UP + _REPEATS):
            for times, work in zip(seconds, works, strict=True):
                started = time.process_time()
                work()
                times.append(time.process_time() - started)
    return [max(statistics.median(times[_WARM_UP:]), 1e-9) for times in seconds]


def field_bytes(reader: Reader) -> int:
    """Of the train split, as float32."""
    task, count = reader.task, reader.splits[SPLIT]
    frames = 0 if task.steady else sum(reader.frames_in(SPLIT, t) for t in range(count))
    num_fixed = task.num_channels("static") + task.num_channels("target")
    return 4 * int(np.prod(reader.space)) * (frames * task.num_channels("state") + count * num_fixed)


def _rms(x: Any) -> float:
    return float(np.sqrt(np.mean(np.square(x))))
