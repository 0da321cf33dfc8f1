"""What the engine costs: steps per second compared with a bare torch loop, and with bare DistributedDataParallel on 2
ranks; or compared with other trainers.

    python benchmarks/engine/overhead.py [--blocks 30] [--steps 5] [--peer fabric | neuraloperator]

--peer fabric: the loop that its documentation shows, with the same model, loader and optimizer, on one rank and two.
--peer neuraloperator: that project's Trainer with its FNO, AdamW, loss and data set, against our engine with the same
FNO (model type `fno`) and our loader, on one rank. It does less: no clipping, no moving average, data in memory. Both
packages come with extras of this one (lightning, baselines).

Both loops train the same model with the same loader, clipping, moving average and optimizer in the same process, in
blocks that take turns, so that whatever else the machine does hits both alike; the ratio is the median over pairs of
neighboring blocks. The engine has everything on: black box, agreement, log rows, and the supervisor that started these
ranks and watches them; it is halted while the bare loop runs. Saves are measured by checkpoint_async.py. The ratio by
CPU time of the ranks is shown too: it hardly depends on what else the machine does. Last line: one JSON object. Exit
code 1 below the bar (0.985 of a bare loop, 1 of a peer), for steps of 50 ms and more; 77 where others had more than a
tenth of the processors (steal), so that nothing is judged.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ups.config.schema import Recipe
from ups.distributed.agreement import Agreement, Status
from ups.distributed.runtime import Runtime
from ups.formats.store_writer import StoreWriter
from ups.record import manifest
from ups.record.failure import install_from_environment
from ups.run.assemble import Assembled, assemble, open_data
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec
from ups.supervise.options import Options
from ups.supervise.run_file import read_run
from ups.supervise.supervisor import supervise
from ups.tracking.metrics_file import MetricsWriter
from ups.training.engine import Engine, Hook
from ups.training.hooks import LogHook
from ups.training.progress import Progress

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support.mixture import mixture_recipe, write_mixture

BARS = {"bare": 0.985, "fabric": 1.0, "neuraloperator": 1.0}
FLOW_BATCH = 16
FNO = {"type": "fno", "modes": 12, "width": 32, "depth": 4}
MOST_STEAL = 0.1
NOT_JUDGED = 77
MINIMUM_STEP_SECONDS = 0.05


class Turns(Hook):
    """A hook that lets the bare loop run a block after each block of the engine, and keeps both times.

    `supervisor` is the process to be halted meanwhile, 0 for none: one rank does that for all.
    """

    def __init__(self, steps: int, bare_block: Callable[[], None], supervisor: int) -> None:
        self.steps, self._bare_block, self._supervisor = steps, bare_block, supervisor
        self.ours: list[float] = []
        self.bare: list[float] = []
        self.cpu_ratios: list[float] = []
        self._since, self._cpu_since = time.perf_counter(), time.process_time()

    def after_step(self, engine: Engine, agreed: Status) -> None:
        if engine.progress.step % self.steps == 0:
            now, cpu_now = time.perf_counter(), time.process_time()
            self.ours.append((now - self._since) / self.steps)
            self._send(signal.SIGSTOP)
            try:
                self._bare_block()
            finally:
                self._send(signal.SIGCONT)
            after, cpu_after = time.perf_counter(), time.process_time()
            self.bare.append((after - now) / self.steps)
            self.cpu_ratios.append((cpu_after - cpu_now) / max(cpu_now - self._cpu_since, 1e-9))
            self._since, self._cpu_since = time.perf_counter(), time.process_time()

    def at_end(self, engine: Engine) -> None:
        return

    def _send(self, number: int) -> None:
        if self._supervisor:
            os.kill(self._supervisor, number)


class Steal:
    """The part of processor time that others have taken since this was made."""

    def __init__(self) -> None:
        self._before = self._read()

    def fraction(self) -> float:
        spent = [after - before for before, after in zip(self._before, self._read(), strict=True)]
        return spent[7] / max(1, sum(spent[:8]))

    @staticmethod
    def _read() -> list[int]:
        return [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:]]


class Stopwatch:
    """Seconds spent in named parts of the engine that a bare loop does not have."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, name: str, part: str) -> None:
        real = getattr(owner, name)

        def timed(*args: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return real(*args, **options)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - started

        setattr(owner, name, timed)


def bare_loop(engine: Engine, loader: Any, stage: torch.nn.Module, strategy: str, steps: int) -> Callable[[], None]:
    """A block of `steps` steps as one would write it by hand for this model."""
    module: torch.nn.Module = (
        DistributedDataParallel(stage, gradient_as_bucket_view=True) if strategy == "ddp" else stage
    )
    parameters: list[Tensor] = [p for p in stage.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3, fused=True)
    averages = [p.detach().clone() for p in parameters]
    world = engine.runtime.world_size
    batches, count = iter(loader), loader.batches_in_step(0)

    def block() -> None:
        for _ in range(steps):
            optimizer.zero_grad(set_to_none=True)
            for index in range(count):
                batch = next(batches)
                if strategy == "ddp" and index < count - 1:
                    with module.no_sync():  # type: ignore[operator]
                        (module(batch).total * world).backward()
                else:
                    loss = module(batch).total * world
                    loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, engine.length.optim.clip_norm, foreach=True)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(averages, parameters, 0.001)
        loss.item()

    return block


class Total(torch.nn.Module):
    """The loss of a stage as one tensor: Fabric takes no frozen dataclass as a result."""

    def __init__(self, stage: torch.nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, batch: Any) -> Tensor:
        total: Tensor = self.stage(batch).total
        return total


def fabric_loop(engine: Engine, loader: Any, stage: torch.nn.Module, strategy: str, steps: int) -> Callable[[], None]:
    """The same block by Lightning Fabric."""
    from lightning.fabric import Fabric

    world = engine.runtime.world_size
    # Fabric finds the process group that this rank has, as it does under torchrun.
    os.environ |= {"TORCHELASTIC_RUN_ID": "peer", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": str(world)}
    fabric = Fabric(accelerator="cpu", devices=world, strategy="ddp" if strategy == "ddp" else "auto")
    fabric.launch()
    parameters: list[Tensor] = [p for p in stage.parameters() if p.requires_grad]
    averages = [p.detach().clone() for p in parameters]
    module, optimizer = fabric.setup(Total(stage), torch.optim.AdamW(parameters, lr=1e-3, fused=True))
    batches, count = iter(loader), loader.batches_in_step(0)

    def block() -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            for index in range(count):
                batch = next(batches)
                with fabric.no_backward_sync(module, enabled=strategy == "ddp" and index < count - 1):
                    loss = module(batch) * world
                    fabric.backward(loss)
            fabric.clip_gradients(module, optimizer, max_norm=engine.length.optim.clip_norm)
            optimizer.step()
            with torch.no_grad():
                torch._foreach_lerp_(averages, parameters, 0.001)
        loss.item()

    return block


def trainer_loop(engine: Engine, loader: Any, stage: torch.nn.Module, strategy: str, steps: int) -> Callable[[], None]:
    """A block of as many steps by neuraloperator's Trainer: an epoch of its own data set and loader."""
    from neuralop.data.datasets.tensor_dataset import TensorDataset
    from neuralop.losses import LpLoss
    from neuralop.models import FNO as TheirFno
    from neuralop.training import AdamW, Trainer

    samples = torch.from_numpy(flow()).float().flatten(0, 1)[: FLOW_BATCH * steps + 1]
    data = TensorDataset(samples[:-1], samples[1:])
    network = TheirFno(
        n_modes=(FNO["modes"],) * 2, in_channels=2, out_channels=2, hidden_channels=FNO["width"], n_layers=FNO["depth"]
    )
    trainer = Trainer(model=network, n_epochs=1, device="cpu")
    trainer.optimizer = AdamW(network.parameters(), lr=1e-3, weight_decay=1e-4)
    trainer.scheduler, trainer.regularizer = torch.optim.lr_scheduler.StepLR(trainer.optimizer, 1000), None
    batches = torch.utils.data.DataLoader(data, batch_size=FLOW_BATCH, shuffle=True)
    return lambda: trainer.train_one_epoch(0, batches, LpLoss(d=2, p=2))


LOOPS = {"bare": bare_loop, "fabric": fabric_loop, "neuraloperator": trainer_loop}


def flow() -> np.ndarray[Any, Any]:
    """Trajectories of waves that move, (N, T, 2, 32, 32)."""
    draw, places, times = np.random.default_rng(0), np.arange(32) / 32, np.arange(9)
    moving = places[:, None] + places - 0.1 * times[:, None, None]
    phases = draw.uniform(size=(32, 1, 2, 1, 1))
    return np.asarray(np.sin(2 * np.pi * (moving[None, :, None] + phases)), np.float32)


def write_flow(folder: Path) -> list[dict[str, Any]]:
    """The store of `flow`; returns the `data.tasks` of a recipe."""
    axes = tuple(AxisSpec(name) for name in "xy")
    task = TaskSpec("flow2d", (FieldSpec("p"), FieldSpec("q")), axes, dt=0.1)
    path, places = folder / "flow2d.zarr", np.arange(32) / 32
    with StoreWriter(path, task, [places, places], 9) as writer:
        for split in ("train", "valid", "test"):
            for trajectory in flow():
                writer.append(split, state=trajectory)
    return [{"name": task.name, "path": str(path)}]


def measure(run_dir: Path) -> None:
    """On each rank: the engine and the bare loop in turns; then the engine alone with a stopwatch on its parts."""
    box = install_from_environment(run_dir).box
    assert box is not None
    arguments = json.loads((run_dir / "arguments.json").read_text())
    folder, strategy = Path(arguments["folder"]), arguments["strategy"]
    steps, blocks = arguments["steps"], arguments["blocks"]
    recipe = Recipe.model_validate(
        mixture_recipe(
            folder,
            arguments["tasks"],
            data={"tasks": arguments["tasks"], "batch_size": arguments["batch_size"]},
            model=arguments["model"],
            stages=[{"type": "operator", "steps": steps * blocks, "augment": False}],
            engine={"device": "cpu", "threads": 1, "strategy": strategy},
        )
    )
    with contextlib.ExitStack() as stack:
        runtime = stack.enter_context(Runtime.start(recipe.engine))
        opened = stack.enter_context(open_data(recipe))

        def build() -> Assembled:
            return stack.enter_context(assemble(recipe, opened, runtime, Progress()))

        engine, other = build().engine, build()
        bare = LOOPS[arguments["loop"]](other.engine, other.loader, other.stage, strategy, steps)
        engine.box = box
        tracker = MetricsWriter(folder / "metrics.jsonl") if runtime.is_first else None
        turns = Turns(steps, bare, int(read_run(run_dir)["supervisor_pid"]) if runtime.is_first else 0)
        engine.hooks += [LogHook(10, "operator", tracker), turns]
        engine.run()
        ratios = [b / o for o, b in zip(turns.ours[1:], turns.bare[1:], strict=True)]

        again = build().engine
        again.box, watch = box, Stopwatch()
        log = LogHook(10, "operator", tracker)
        again.hooks.append(log)
        watch.watch(box, "record", "black box")
        watch.watch(box, "issue", "black box")
        watch.watch(again.meters, "add", "meters")
        watch.watch(log, "after_step", "log rows (and reduction of metrics)")
        real_issue, real_read = Agreement.issue, Agreement.read
        try:
            watch.watch(Agreement, "issue", "agreement, issued")
            watch.watch(Agreement, "read", "agreement, read")
            started = time.perf_counter()
            again.run()
            total = time.perf_counter() - started
        finally:
            Agreement.issue, Agreement.read = real_issue, real_read  # type: ignore[method-assign]
        parts = {name: seconds / total for name, seconds in sorted(watch.seconds.items(), key=lambda x: -x[1])}
        if runtime.is_first:
            found = {
                "ratio": statistics.median(ratios),
                "quartiles": statistics.quantiles(ratios, n=4),
                "cpu_ratio": statistics.median(turns.cpu_ratios[1:]),
                "bare_step_seconds": statistics.median(turns.bare),
                "parts": parts,
            }
            # A result that the supervisor can prove: committed, with its hashes.
            final = run_dir / "checkpoints" / f"step_{again.progress.step:08d}"
            temporary = manifest.make_temporary(final)
            (temporary / "found.json").write_text(json.dumps(found))
            manifest.commit_directory(temporary, final)
        box.finish(again.progress.step)


def supervised(folder: Path, ranks: int, arguments: dict[str, Any]) -> dict[str, Any]:
    """What the first rank of a supervised run of `measure` found."""
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "arguments.json").write_text(json.dumps(arguments))
    command = (sys.executable, str(Path(__file__).resolve()), "--rank-of", str(run_dir))
    code = supervise(Options(run_dir=run_dir, ranks=ranks, command=command, max_restarts=0))
    if code:
        raise SystemExit(code)
    (path,) = run_dir.glob("checkpoints/step_*/found.json")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=30)
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    parser.add_argument("--batch-size", type=int, default=16, help="windows of a task in a step; sets the step time")
    parser.add_argument("--peer", choices=["fabric", "neuraloperator"], help="compare with another trainer")
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        measure(options.rank_of)
        return 0
    results: dict[str, Any] = {}
    passed, steal = True, Steal()
    loop = options.peer or "bare"
    theirs = loop == "neuraloperator"
    latent = {"type": "latent_operator", "width": 64, "depth": 4, "num_heads": 4, "patch_size": 2}
    for strategy, ranks in (("single", 1), ("ddp", 2))[: 1 if theirs else 2]:
        with tempfile.TemporaryDirectory(prefix="ups-overhead-") as name:
            arguments = {
                "folder": name,
                "tasks": write_flow(Path(name)) if theirs else write_mixture(Path(name)),
                "model": FNO if theirs else latent,
                "loop": loop,
                "strategy": strategy,
                "steps": options.steps,
                "blocks": options.blocks,
                "batch_size": FLOW_BATCH if theirs else options.batch_size,
            }
            found = supervised(Path(name), ranks, arguments)
        long_enough = found["bare_step_seconds"] >= MINIMUM_STEP_SECONDS
        bar = BARS[loop]
        good = found["ratio"] >= bar and long_enough
        passed &= good
        print(
            f"{strategy} on {ranks}: {found['ratio']:.3f} of {loop} (bar {bar}), "
            f"step {1e3 * found['bare_step_seconds']:.0f} ms; by CPU time {found['cpu_ratio']:.3f}"
        )
        for part, share in found["parts"].items():
            print(f"    {part:40} {100 * share:5.2f} %" + ("   above 0.5 %" if share > 0.005 else ""))
        results[strategy] = {"ranks": ranks, "bar": bar, "passed": good, **found}
    judged = steal.fraction() <= MOST_STEAL
    if not judged:
        print(
            f"not judged: others had {100 * steal.fraction():.0f} % of the processors (most: {100 * MOST_STEAL:.0f} %)"
        )
    print(
        json.dumps(
            {
                "benchmark": "engine_overhead",
                "loop": loop,
                **results,
                "steal": steal.fraction(),
                "passed": judged and passed,
            }
        )
    )
    return NOT_JUDGED if not judged else 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
