"""Where the time of the multiscale network goes: a training step of all 1D and all 2D tasks, and a step of a rollout.

    python benchmarks/model/profile_step.py [--blocks 15] [--trial DIR] [--no-fno] [--compile]

Training: forward and backward of the tasks of the benchmark on random fields, as one group for each number of
dimensions: 20 windows of 128 points of each 1D task, 5 windows of 32 x 32 of each 2D task. Rollout: one step of a
stepper without gradients, one sample and eight, next to an FNO of the benchmark's size. Everything on one thread, in
CPU time; what is compared takes turns in one process, and a ratio is the median over neighboring turns, because others
may use the machine. --trial: a directory with the prototype (model.py, data.py), to compare training with. --compile:
training with compiled blocks too, as `engine.compile` compiles them.
Last line: one JSON object. Exit code 1 below the bars: a rollout step costs at most 1.5 times the FNO's, and training
sees 1.3 times the windows per second of the prototype, each in the precision that is faster on the machine, over the
whole step: all 1D and all 2D tasks.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from in_turns import in_turns
from torch.profiler import ProfilerActivity, profile

from ups.config.model import FnoConfig, MultiscaleConfig
from ups.distributed.strategies import compile_unit
from ups.models.build import build_model
from ups.models.stepper import Stepper
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
MOST_OF_FNO, LEAST_OF_TRIAL = 1.5, 1.3
ROLLOUT_TASKS = {1: "burgers1d", 2: "ns2d"}
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


def trial_step(folder: Path, dims: int) -> Callable[[bool], None]:
    """The prototype on the same windows, in its own groups (dimension and boundary kind)."""
    sys.path.insert(0, str(folder))
    data, model = __import__("data"), __import__("model")
    tasks, inputs = [], []
    for number, spec in enumerate(s for d in (1, 2) for s in SPECS[d]):
        own, n = spec.num_spatial_dims, POINTS[spec.num_spatial_dims]
        c, cin = spec.num_channels(spec.predicted), spec.num_channels("state") + spec.num_channels("static")
        periodic = spec.axes[0].boundary == "periodic"
        ones = torch.ones(cin)
        task = data.Task(spec.name, spec, own, n, spec.steady, periodic, c, cin, ones, ones, ones[:c], ones[:c])
        task.coords = torch.rand(2, n if own == 2 else 1, n)
        tasks.append(task)
        draw = torch.Generator().manual_seed(number)
        inputs.append(torch.randn(WINDOWS[own], cin, *(n,) * own, generator=draw))
    options = {"widths": [32, 64, 128], "blocks": [1, 1, 2], "k0": 5, "attn": 1, "prop": 1, "bf16": 1, "amp": 1}
    network = model.Hybrid(tasks, options)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in network.parameters():
            p += 0.01 * torch.randn(p.shape, generator=draw)
    of = {t.name: x for t, x in zip(tasks, inputs, strict=True)}

    def step(half: bool) -> None:
        network.o["bf16"] = int(half)
        network.begin()
        loss = torch.zeros(())
        with autocast(half):
            for group in network.groups():
                if group[0].dim != dims:
                    continue
                xs = [of[t.name] for t in group]
                thetas = [torch.rand(x.shape[0], model.NF) for x in xs]
                found = network(group, xs, thetas, [torch.zeros(x.shape[0]) for x in xs])
                loss = loss + torch.stack([y.square().mean() for y in found]).sum()
        torch.autograd.backward(loss)
        network.zero_grad(set_to_none=True)

    return step


def rollout_step(stepper: Stepper, task: TaskSpec, samples: int) -> Callable[[bool], None]:
    batch = batch_of(task, samples)

    def step(half: bool) -> None:
        with torch.no_grad(), autocast(half):
            stepper(batch)

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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=15)
    parser.add_argument("--trial", type=Path)
    parser.add_argument("--no-fno", action="store_true")
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    ours = build(MultiscaleConfig(), [s for d in (1, 2) for s in SPECS[d]])
    faster = compiled(ours) if options.compile else ours
    whole: dict[str, list[list[float]]] = {"trial": [], "multiscale": []}  # seconds of the blocks, of 1D and of 2D
    for dims in (1, 2):
        steps = {}
        for half, precision in PRECISIONS.items():
            steps[f"multiscale {precision}"] = functools.partial(training_step(ours, dims), half)
            if options.trial:
                steps[f"trial {precision}"] = functools.partial(trial_step(options.trial, dims), half)
        if options.compile:
            steps["compiled float32"] = functools.partial(training_step(faster, dims), False)
        seconds = in_turns(steps, options.blocks, 1)
        windows = WINDOWS[dims] * len(SPECS[dims])
        row = {name: 1e3 * statistics.median(s) / windows for name, s in seconds.items()}
        print(f"training {dims}D, CPU milliseconds a window: {listed(row)}")
        if options.compile:
            row["compiled"] = ratio(seconds["compiled float32"], seconds["multiscale float32"])
            print(f"    {row['compiled']:.2f} times the time with compiled blocks, in float32")
        if options.trial:
            for name, found in whole.items():
                found.append(fastest(seconds, name))
            row["of the trial"] = ratio(whole["trial"][-1], whole["multiscale"][-1])
            print(f"    {row['of the trial']:.2f} times the windows of the trial, each in its faster precision")
        for half, precision in PRECISIONS.items():
            row |= {f"share {precision}: {n}": v for n, v in families(steps[f"multiscale {precision}"]).items()}
            row |= {f"forward ms {precision}: {n}": v for n, v in parts(ours, dims, half).items()}
        show_parts(row)
        result[f"training {dims}D"] = row
    if options.trial:
        trial, mine = ([a + b for a, b in zip(*whole[name], strict=True)] for name in ("trial", "multiscale"))
        result["training step"] = {"windows per second of the trial": ratio(trial, mine)}
        print(f"whole training step: {ratio(trial, mine):.2f} times the windows of the trial")
    ours.eval().network.fix_weights()
    for dims in (1, 2):
        task = TASKS[ROLLOUT_TASKS[dims]].spec
        fno = None if options.no_fno else build(FNO[dims], [task]).eval()
        for samples in (1, 8):
            own = rollout_step(ours, task, samples)
            steps = {f"multiscale {p}": functools.partial(own, half) for half, p in PRECISIONS.items()}
            if fno is not None:
                steps["fno float32"] = functools.partial(rollout_step(fno, task, samples), False)
            seconds = in_turns(steps, options.blocks, 5)
            row = {name: 1e3 * statistics.median(s) for name, s in seconds.items()}
            print(f"rollout {task.name}, {samples} samples, CPU milliseconds a step: {listed(row)}")
            if fno is not None:
                row["cost of the FNO"] = ratio(fastest(seconds, "multiscale"), fastest(seconds, "fno"))
                print(f"    {row['cost of the FNO']:.2f} times the FNO")
            row |= {f"share float32: {n}": v for n, v in families(steps["multiscale float32"]).items()}
            show_parts(row)
            result[f"rollout {task.name} {samples}"] = row
    missed = [
        name
        for name, row in result.items()
        if row.get("cost of the FNO", 0) > MOST_OF_FNO or row.get("windows per second of the trial", 9) < LEAST_OF_TRIAL
    ]
    print(json.dumps({**result, "missed": missed}))
    sys.exit(1 if missed else 0)


if __name__ == "__main__":
    main()
