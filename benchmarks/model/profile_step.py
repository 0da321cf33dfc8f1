"""Where the time of the multiscale network goes: a training step of all 1D and all 2D tasks, and a step of a rollout.

    python benchmarks/model/profile_step.py [--blocks 15] [--before CHECKOUT] [--no-fno] [--onnx] [--compile]

Training: forward and backward of the tasks of the benchmark on random fields, as one group for each number of
dimensions: 20 windows of 128 points of each 1D task, 5 windows of 32 x 32 of each 2D task. Rollout: steps without
gradients of 1 and of 32 samples, next to an FNO of the benchmark's size. Everything on one thread, in CPU time; what is
compared takes turns, and a ratio is the median over neighboring turns, because others may use the machine. --before:
the same steps with the package of another checkout, in a process that takes its turns too. --onnx: a step of a rollout
in onnxruntime too. --compile: training with compiled blocks too, as `engine.compile` compiles them. Last line: one JSON
object. Exit code 1 below the bars: a rollout step costs at most 1.2 times the FNO's; next to --before it takes half of
the time for one sample and 1 / 1.4 for 32, and a training step 1 / 1.2, each in the precision that is faster.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from in_turns import in_turns
from torch.profiler import ProfilerActivity, profile

from ups.config.model import FnoConfig, MultiscaleConfig
from ups.distributed.strategies import compile_unit
from ups.models.build import build_model
from ups.models.stepper import Stepper, rollout
from ups.solvers.tasks import BENCH_TASKS, TASKS
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout, for tests.support

from tests.support.small_bundle import statistics_of

WINDOWS = {1: 20, 2: 5}
POINTS = {1: 128, 2: 32}
SPECS = {dims: [s for s in (TASKS[n].spec for n in BENCH_TASKS) if s.num_spatial_dims == dims] for dims in (1, 2)}
FNO = {1: FnoConfig(width=32, modes=64, depth=4), 2: FnoConfig(width=32, modes=16, depth=4)}
PRECISIONS = {True: "bfloat16", False: "float32"}
MOST_OF_FNO = 1.2
# Times as fast as the checkout before: of a training step, and of rollout steps by samples.
GAINS = {"training": 1.2, 1: 2.0, 32: 1.4}
ROLLOUT_STEPS = 4
ROLLOUT_TASKS = {1: "burgers1d", 2: "ns2d"}
Steps = Mapping[str, Callable[[bool], None]]
# Name of an operation contains -> what it is, in this order.
FAMILIES = (
    ("convolution (forward)", ("mkldnn_convolution", "conv_transpose", "slow_conv", "aten::convolution_overrideable")),
    ("convolution (backward)", ("convolution_backward",)),
    ("attention", ("scaled_dot_product", "flash_attention")),
    ("matrix products", ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear", "aten::matmul", "mkldnn_linear")),
    ("gelu", ("gelu",)),
    ("layer norm, silu, addcmul", ("layer_norm", "silu", "addcmul")),
    (
        "copies: layout, type, halo, cat",
        ("copy_", "index_select", "clone", "aten::cat", "contiguous", "_to_copy", "fill_", "zero_"),
    ),
    ("sums and products", ("aten::add", "aten::mul", "aten::sum", "aten::sub", "aten::div", "aten::neg")),
    ("rows of tables", ("aten::index", "index_put", "aten::embedding")),
)


def batch_of(task: TaskSpec, samples: int, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    points = POINTS[task.num_spatial_dims]
    space = (points,) * task.num_spatial_dims

    def fields(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, *space, generator=draw)

    ranges = [(p.minimum, p.maximum) for p in task.parameters]
    drawn = torch.rand(samples, len(ranges), generator=draw)
    low, high = (torch.tensor([r[side] for r in ranges]) for side in (0, 1))
    return Batch(
        task=task,
        state=fields(samples, 0 if task.steady else 1, task.num_channels("state")),
        static=fields(samples, task.num_channels("static")),
        target=fields(samples, 0),
        parameters=low + drawn * (high - low),
        dt=torch.full((samples,), task.dt),
        coordinates=tuple((torch.arange(points, dtype=torch.float64) + 0.5) / points * a.extent for a in task.axes),
        numbers=torch.arange(samples),
    )


def build(config: Any, tasks: Sequence[TaskSpec]) -> Stepper:
    stepper = build_model(config, tasks, {t.name: statistics_of(t) for t in tasks}, 1)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in stepper.parameters():  # a new model has zeros that a trained one has not
            p.data += 0.01 * torch.randn(p.shape, generator=draw)
    return stepper


def autocast(half: bool) -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16, enabled=half)


def training_step(stepper: Stepper, dims: int) -> Callable[[bool], None]:
    batches = [batch_of(task, WINDOWS[dims]) for task in SPECS[dims]]

    def step(half: bool) -> None:
        with autocast(half):
            loss = sum(x.square().mean() for x in stepper.predict_group(batches))
        loss.backward()  # type: ignore[union-attr]
        stepper.zero_grad(set_to_none=True)

    return step


def compiled(stepper: Stepper) -> Stepper:
    """The same network with compiled blocks, as the engine compiles them."""
    other = copy.deepcopy(stepper)
    for unit in other.network.shard_units():
        compile_unit(unit)
    return other


def rollout_step(stepper: Stepper, task: TaskSpec, samples: int) -> Callable[[bool], None]:
    """ROLLOUT_STEPS steps: what is prepared once for a rollout is part of their cost."""
    batch = batch_of(task, samples)

    def step(half: bool) -> None:
        with torch.no_grad(), autocast(half):
            for _ in rollout(stepper, batch, ROLLOUT_STEPS):
                pass

    return step


def own_steps(stepper: Stepper) -> dict[str, Callable[[bool], None]]:
    """What is timed of the multiscale network, by name. Training comes first: then the weights are fixed."""
    steps: dict[str, Callable[[bool], None]] = {}
    for dims in (1, 2):
        steps[f"training {dims}D"] = training_step(stepper, dims)
    used = copy.deepcopy(stepper).eval()
    used.network.fix_weights()
    for dims in (1, 2):
        for samples in (1, 32):
            task = TASKS[ROLLOUT_TASKS[dims]].spec
            steps[f"rollout {task.name} {samples}"] = rollout_step(used, task, samples)
    return steps


class Before:
    """The steps of another checkout's package, in a process of its own."""

    def __init__(self, checkout: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{checkout.resolve() / 'src'}:{Path(__file__).parents[2]}"}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve"],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def seconds(self, name: str, half: bool) -> float:
        """CPU-seconds of one call of the step of that name."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([name, half]), file=self._process.stdin, flush=True)
        return float(self._process.stdout.readline())


def serve() -> None:
    """Time the steps that are asked for on standard input."""
    steps = own_steps(build(MultiscaleConfig(), [s for d in (1, 2) for s in SPECS[d]]))
    for line in sys.stdin:
        name, half = json.loads(line)
        start = time.process_time()
        steps[name](half)
        print(time.process_time() - start, flush=True)


def exported_step(stepper: Stepper, task: TaskSpec, samples: int) -> Callable[[], None]:
    """ROLLOUT_STEPS steps of a task without static fields in onnxruntime, from physical state to physical state."""
    import onnxruntime

    batch = batch_of(task, samples)

    class OneStep(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stepper = stepper

        def forward(self, state: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
            following: torch.Tensor = self.stepper(replace(batch, state=state, parameters=parameters))
            return following[:, None]

    with tempfile.TemporaryDirectory() as temporary, torch.no_grad():
        path = Path(temporary) / "step.onnx"
        torch.onnx.export(OneStep().eval(), (batch.state, batch.parameters), path, dynamo=True, verbose=False)
        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = 1
        session = onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
    names = [given.name for given in session.get_inputs()]

    def step() -> None:
        state = batch.state.numpy()
        for _ in range(ROLLOUT_STEPS):
            given = dict(zip(names, (state, batch.parameters.numpy()), strict=False))
            (state,) = session.run(None, given)

    return step


def fastest(seconds: dict[str, list[float]], name: str) -> list[float]:
    """The candidate of that name in the precision in which it is faster."""
    return min((s for key, s in seconds.items() if key.startswith(name)), key=statistics.median)


def ratio(of: list[float], to: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def listed(row: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in row.items())


def show_parts(row: dict[str, float]) -> None:
    for name, value in row.items():
        if name.startswith("share"):
            print(f"    {100 * value:7.1f} %  {name}")
        elif name.startswith("forward"):
            print(f"    {value:7.2f}    {name}")


def families(step: Callable[[], None]) -> dict[str, float]:
    """Share of CPU time by kind of operation, forward and backward; the rest is Python and dispatch."""
    for _ in range(3):
        step()
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(5):
            step()
    shares: dict[str, float] = {}
    for event in found.key_averages():
        name = next((f for f, parts in FAMILIES if any(p in event.key for p in parts)), "other operations")
        shares[name] = shares.get(name, 0.0) + event.self_cpu_time_total
    total = sum(shares.values())
    return {name: value / total for name, value in sorted(shares.items(), key=lambda item: -item[1])}


def parts(stepper: Stepper, dims: int, half: bool) -> dict[str, float]:
    """Milliseconds of the forward pass spent in each named part, with gradients on."""
    network: Any = stepper.network
    named: dict[str, list[Any]] = {
        "lift": [network.lift],
        "level 0 blocks": [*network.down[0], *network.up[0]],
        "level 1 blocks": [*network.down[1], *network.up[1]],
        "middle blocks": list(network.middle),
        "attention": list(network.attention.values()),
        "shrink, grow": [*network.shrink, *network.grow],
        "condition": [network.condition],
        "propagator": [network.propagator],
        "lower": [network.lower],
    }
    spent = dict.fromkeys(named, 0.0)
    hooks = []
    for name, modules in named.items():
        for module in modules:
            began: list[float] = []
            hooks.append(module.register_forward_pre_hook(lambda *_, b=began: b.append(time.process_time())))

            def ended(*_: Any, b: list[float] = began, n: str = name) -> None:
                spent[n] += time.process_time() - b.pop()

            hooks.append(module.register_forward_hook(ended))
    batches = [batch_of(task, WINDOWS[dims]) for task in SPECS[dims]]
    repeats = 10
    start = time.process_time()
    for _ in range(repeats):
        with autocast(half):
            stepper.predict_group(batches)
    whole = time.process_time() - start
    for hook in hooks:
        hook.remove()
    spent["everything else"] = whole - sum(spent.values())
    return {name: 1e3 * value / repeats for name, value in spent.items()}


def training_row(ours: Stepper, dims: int, steps: Steps, options: argparse.Namespace) -> dict[str, float]:
    """What a training step of the tasks of so many dimensions costs, and where."""
    name = f"training {dims}D"
    timed_steps: dict[str, Callable[[], None]] = {
        f"multiscale {p}": functools.partial(steps[name], half) for half, p in PRECISIONS.items()
    }
    if options.compile:
        timed_steps["compiled float32"] = functools.partial(training_step(compiled(ours), dims), False)
    row = measured(name, timed_steps, options, WINDOWS[dims] * len(SPECS[dims]))
    for half, precision in PRECISIONS.items():
        row |= {f"share {precision}: {n}": v for n, v in families(timed_steps[f"multiscale {precision}"]).items()}
        row |= {f"forward ms {precision}: {n}": v for n, v in parts(ours, dims, half).items()}
    return row


def rollout_row(ours: Stepper, name: str, steps: Steps, options: argparse.Namespace) -> dict[str, float]:
    """What a step of a rollout costs, and where."""
    _, task_name, samples = name.split()
    task = TASKS[task_name].spec
    timed_steps: dict[str, Callable[[], None]] = {
        f"multiscale {p}": functools.partial(steps[name], half) for half, p in PRECISIONS.items()
    }
    if not options.no_fno:
        fno = build(FNO[task.num_spatial_dims], [task]).eval()
        timed_steps["fno float32"] = functools.partial(rollout_step(fno, task, int(samples)), False)
    if options.onnx:
        timed_steps["onnxruntime float32"] = exported_step(ours, task, int(samples))
    row = measured(name, timed_steps, options, ROLLOUT_STEPS)
    return row | {f"share float32: {n}": v for n, v in families(timed_steps["multiscale float32"]).items()}


def measured(
    name: str, steps: Mapping[str, Callable[[], object]], options: argparse.Namespace, parts_of_a_call: int
) -> dict[str, float]:
    """Milliseconds of each candidate in turns, and how they compare."""
    if options.before:
        for half, precision in PRECISIONS.items():
            steps = {**steps, f"before {precision}": functools.partial(options.before.seconds, name, half)}
    seconds = in_turns(steps, options.blocks, 1 if name.startswith("training") else 3)
    row = {candidate: 1e3 * statistics.median(s) / parts_of_a_call for candidate, s in seconds.items()}
    unit = "window" if name.startswith("training") else "step"
    print(f"{name}, CPU milliseconds a {unit}: {listed(row)}")
    mine = fastest(seconds, "multiscale")
    for other, ratio_name in (("fno", "cost of the FNO"), ("compiled", "cost of compiled blocks")):
        if any(candidate.startswith(other) for candidate in seconds):
            row[ratio_name] = ratio(mine, fastest(seconds, other))
            print(f"    {row[ratio_name]:.2f} times the {ratio_name}")
    for other, ratio_name in (("before", "times as fast as before"), ("onnxruntime", "eager / onnxruntime")):
        if any(candidate.startswith(other) for candidate in seconds):
            pair = (fastest(seconds, other), mine) if other == "before" else (mine, fastest(seconds, other))
            row[ratio_name] = ratio(*pair)
            print(f"    {row[ratio_name]:.2f} {ratio_name}")
    return row


def missed(name: str, row: dict[str, float]) -> bool:
    least = GAINS["training"] if name.startswith("training") else GAINS[int(name.split()[-1])]
    return row.get("cost of the FNO", 0) > MOST_OF_FNO or row.get("times as fast as before", 9) < least


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--before", type=lambda checkout: Before(Path(checkout)))
    parser.add_argument("--no-fno", action="store_true")
    parser.add_argument("--onnx", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        serve()
        return
    ours = build(MultiscaleConfig(), [s for d in (1, 2) for s in SPECS[d]])
    steps = own_steps(ours)
    result: dict[str, dict[str, float]] = {}
    for name in steps:
        if name.startswith("training"):
            result[name] = training_row(ours, int(name[-2]), steps, options)
        else:
            result[name] = rollout_row(ours, name, steps, options)
        show_parts(result[name])
    below = [name for name, row in result.items() if missed(name, row)]
    print(json.dumps({**result, "missed": below}))
    sys.exit(1 if below else 0)


if __name__ == "__main__":
    main()
