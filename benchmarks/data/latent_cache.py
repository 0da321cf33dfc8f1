"""Training the operator from kept latents compared with encoding in every step, on the same frozen deep encoder.

    python benchmarks/data/latent_cache.py                      a small trial: minutes
    python benchmarks/data/latent_cache.py --full               the published figures, with a cache of 2 GB for memory

Makes smooth 2D fields that move, trains a deep autoencoder on them, writes its latents as `ups data cache` does, and
then trains two operators from equal weights in interleaved blocks of steps of one process: one from the cache, one that
encodes. Bars: steps per CPU-second at least 0.9 of 1 + 2E/3O times those of encoding, with the costs E and O of the
forward passes measured between the blocks; final one-step error within 5 %; memory (PSS) of two processes that have
read all of a cache of 2 GB at most 1.1 times that of one. The bars are for --full: in a small trial the update of the
weights and the memory of torch itself weigh too much. The last line is one JSON object; exit code 1 below a bar.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ups.config.schema import Recipe
from ups.data.latent_cache import FILE_BYTES
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.formats.shards import map_file
from ups.formats.store_writer import StoreWriter
from ups.models.transfer import transfer
from ups.run.assemble import Assembled, OpenData, assemble, cache_key, open_data
from ups.run.latent_caching import encoder_hash, measure_gain, write_cache, writer_for
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec
from ups.training.progress import Progress

BARS = {"of_expected": 0.9, "error": 1.05, "memory": 1.1}
TASK = TaskSpec("waves2d", (FieldSpec("u"),), (AxisSpec("x"), AxisSpec("y")), dt=0.1, symmetries=("translation",))
FRAMES = 21
VELOCITY = (0.3, -0.2)


def write_data(path: Path, points: int, trajectories: int) -> None:
    """Sums of waves that move alike: the next frame follows from the last one."""
    draw = np.random.default_rng(0)
    x = np.arange(points) / points
    with StoreWriter(path, TASK, [x, x], FRAMES) as writer:
        for split, count in (("train", trajectories), ("valid", 8), ("test", 8)):
            for _ in range(count):
                state = np.zeros((FRAMES, 1, points, points))
                for _ in range(6):
                    k, phase = draw.integers(1, 5, 2), draw.uniform(0, 2 * np.pi)
                    along = 2 * np.pi * (k[0] * x[:, None] + k[1] * x[None, :]) + phase
                    moves = 2 * np.pi * (k @ VELOCITY) * TASK.dt * np.arange(FRAMES)
                    state[:, 0] += draw.normal() * np.sin(along[None] - moves[:, None, None])
                writer.append(split, state=state)


def recipe_of(folder: Path, options: argparse.Namespace, stage: dict[str, Any]) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "latent_cache", "dir": str(folder / "run")},
            "data": {"tasks": [{"name": TASK.name, "path": str(folder / "waves2d.zarr")}], "batch_size": options.block},
            "model": {
                "type": "latent_operator",
                "width": options.width,
                "depth": options.depth,
                "num_heads": 4,
                "patch_size": options.patch,
                "encoder_blocks": options.encoder_blocks,
                "latent_channels": options.latent_channels,
            },
            "stages": [{"augment": False, "steps": options.steps} | stage],
            "engine": {"device": "cpu", "threads": 1, "strategy": "single", "ema": {"enabled": False}},
        }
    )


def train_encoder(recipe: Recipe, opened: OpenData, runtime: Runtime) -> tuple[Any, float]:
    """The autoencoder, and the error of its fields."""
    with assemble(recipe, opened, runtime, Progress()) as parts:
        parts.engine.run()
        batch = next(parts.loader)[0]
        with torch.no_grad():
            losses = parts.stage.sample_losses([batch])[0]
        return parts.stepper, float(losses["reconstruction"].mean())


def validation_error(parts: Assembled, opened: OpenData) -> float:
    """Root mean square error of one step on the valid split, relative to the size of the change."""
    reader, stepper = opened.readers[0], parts.stepper
    error = size = 0.0
    with torch.no_grad():
        for trajectory in range(reader.splits["valid"]):
            block = reader.read_block("valid", [trajectory] * (FRAMES - 1), list(range(FRAMES - 1)), 2)
            state = torch.from_numpy(block.state)
            batch = _batch(block, state[:, :1])
            wanted = stepper.scaled_change(state[:, 0], state[:, 1], TASK)
            error += float((stepper.predict(batch) - wanted).square().mean())
            size += float(wanted.square().mean())
    return math.sqrt(error / size)


def _batch(block: Any, state: torch.Tensor) -> Any:
    from ups.spec.batch import Batch

    return Batch(
        task=block.task,
        state=state,
        static=torch.from_numpy(block.static),
        target=torch.from_numpy(block.target),
        parameters=torch.from_numpy(block.parameters),
        dt=torch.from_numpy(block.dt.astype(np.float32)),
        coordinates=tuple(torch.from_numpy(c) for c in block.coordinates),
        numbers=torch.arange(len(state)),
    )


class Turns(contextlib.AbstractContextManager["Turns"]):
    """A stage as a run assembles it, whose steps are taken block by block, in turns with another."""

    def __init__(self, recipe: Recipe, opened: OpenData, runtime: Runtime, encoder: Any) -> None:
        self._stack = contextlib.ExitStack()
        self.parts: Assembled = self._stack.enter_context(
            assemble(recipe, opened, runtime, Progress(), change=lambda stage: _take(encoder, stage.stepper))
        )
        self.seconds: list[float] = []  # CPU time of a step, for each block
        self._steps = self._each_step()

    def _each_step(self) -> Iterator[float]:
        """CPU seconds of each step: loader, forward, backward, update."""
        engine, optimizer = self.parts.engine, torch.optim.AdamW(self.parts.stage.trainable_parameters(), lr=1e-3)
        batches = iter(self.parts.loader)
        while True:
            started = time.process_time()
            loss = engine.strategy.module(next(batches)).total
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield time.process_time() - started

    def block(self, steps: int) -> None:
        self.seconds.append(statistics.median([next(self._steps) for _ in range(steps)]))

    def __exit__(self, *error: object) -> None:
        self._stack.close()


def _take(source: Any, target: Any) -> None:
    transfer(source, target)


def compare(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Speed and error of both ways."""
    write_data(folder / "waves2d.zarr", options.points, options.trajectories)
    learn = recipe_of(folder, options, {"type": "autoencode", "steps": options.encoder_steps})
    operator = {"type": "operator", "space": "latent", "decode_weight": options.decode_weight, "start_from": "encoder"}
    kept = recipe_of(folder, options, operator | {"cache": str(folder / "latents"), "cache_dtype": options.dtype})
    fresh = recipe_of(folder, options, operator)
    with Runtime.start(learn.engine, RankEnvironment()) as runtime, open_data(learn) as opened:
        encoder, reconstruction = train_encoder(learn, opened, runtime)
        encoder = encoder.requires_grad_(False).eval()
        key = cache_key(kept, opened, 0, encoder=encoder_hash(encoder))
        writer = writer_for(folder / "latents", key, encoder, opened)
        write_cache(writer, encoder, opened)
        measured = [_gain(encoder, opened, writer, kept)]
        with Turns(kept, opened, runtime, encoder) as fast, Turns(fresh, opened, runtime, encoder) as slow:
            for number in range(options.blocks):
                for turn in (fast, slow) if number % 2 else (slow, fast):
                    turn.block(options.steps // options.blocks)
                measured.append(_gain(encoder, opened, writer, kept))
            errors = [validation_error(turn.parts, opened) for turn in (fast, slow)]
    # The first blocks warm up.
    ratios = [b / a for a, b in zip(fast.seconds[1:], slow.seconds[1:], strict=True)]
    expected = statistics.median(gain.factor for gain in measured)
    speedup = statistics.median(ratios)
    return {
        "steps_per_cpu_second": {
            "cache": 1 / statistics.median(fast.seconds[1:]),
            "encoding": 1 / statistics.median(slow.seconds[1:]),
        },
        "speedup": speedup,
        "expected": expected,
        "of_expected": speedup / expected,
        "encoder_ms": 1e3 * statistics.median(gain.encoder_seconds for gain in measured),
        "operator_ms": 1e3 * statistics.median(gain.operator_seconds for gain in measured),
        "error_cache": errors[0],
        "error_encoding": errors[1],
        "error_ratio": errors[0] / errors[1],
        "reconstruction": reconstruction,
        "latent_bytes": writer.num_bytes,
        "of_field_bytes": writer.num_bytes / measured[0].field_bytes,
    }


def _gain(encoder: Any, opened: OpenData, writer: Any, recipe: Recipe) -> Any:
    return measure_gain(
        encoder, list(opened.readers), writer.tasks, recipe.stages[0], writer.key.dtype, writer.num_bytes
    )


def hold(folder: str, ready: Any, done: Any) -> None:
    """A process that has every page of the cache mapped and read, as a rank after its first epoch has."""
    maps = [map_file(str(path)) for path in sorted(Path(folder).glob("*.bin"))]
    total = sum(int(values[::4096].sum()) for values in maps)
    ready.put(total)
    done.wait()


def memory(folder: Path, num_bytes: int) -> dict[str, float]:
    """PSS in bytes of one and of two processes that share files of `num_bytes`."""
    folder.mkdir()
    block = np.random.default_rng(0).bytes(FILE_BYTES)
    for number in range(-(-num_bytes // FILE_BYTES)):
        (folder / f"{number}.bin").write_bytes(block)
    context = multiprocessing.get_context("spawn")
    found = []
    for count in (1, 2):
        ready, done = context.Queue(), context.Event()
        processes = [context.Process(target=hold, args=(str(folder), ready, done)) for _ in range(count)]
        for process in processes:
            process.start()
        for _ in processes:
            ready.get(timeout=600)
        found.append(sum(pss_of(process.pid or 0) for process in processes))
        done.set()
        for process in processes:
            process.join()
    return {"one_bytes": found[0], "two_bytes": found[1], "two_of_one": found[1] / found[0]}


def pss_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="the sizes of the published figures")
    for name, small in (("points", 32), ("trajectories", 24), ("width", 32), ("depth", 2), ("patch", 4), ("block", 16)):
        parser.add_argument(f"--{name}", type=int, default=small)
    parser.add_argument("--encoder-blocks", type=int, default=6)
    parser.add_argument("--latent-channels", type=int, default=4)
    parser.add_argument("--encoder-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--decode-weight", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--memory-mb", type=int, default=128)
    parser.add_argument("--folder", type=Path, help="default: a temporary directory")
    options = parser.parse_args()
    if options.full:
        vars(options).update(points=64, trajectories=256, width=96, depth=4, patch=8, block=32, latent_channels=8)
        vars(options).update(encoder_steps=600, steps=600, blocks=20, memory_mb=2048)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="ups-latents-", dir=options.folder) as name:
        result = compare(Path(name), options)
        result["memory"] = memory(Path(name) / "shared", options.memory_mb << 20)
    for key, value in result.items():
        print(f"{key:22} {value}")
    good = not options.full or (
        result["of_expected"] >= BARS["of_expected"]
        and 1 / BARS["error"] <= result["error_ratio"] <= BARS["error"]
        and result["memory"]["two_of_one"] <= BARS["memory"]
    )
    print(json.dumps({**result, "bars": BARS, "good": good}))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
