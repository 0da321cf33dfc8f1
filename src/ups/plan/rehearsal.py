"""One optimizer step of a stage, rehearsed without data: what is alive when, and what is computed.

The stage, the optimizer, the average and `fully_shard` are the real ones. DistributedDataParallel reads memory that
fake tensors do not have, so what it does to memory is done in its place: gradients live in buckets that stay.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import _disable_current_modes

from ups.config.schema import EngineConfig
from ups.config.stage import StageLength
from ups.distributed.runtime import Runtime, make_mesh
from ups.distributed.strategies import Strategy, arrange, autocast, is_fsdp, locals_of, weight_dtype
from ups.plan.operations import Operation, OperationTrace
from ups.spec.batch import Batch, RankInfo
from ups.training.engine import Engine
from ups.training.stages import Stage

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Kind:
    """A kind of micro-batch that a step contains: real batches of its tasks, windows of each, and how often it comes.

    per_step: on average; the passes of a step that are like this one.
    """

    batches: tuple[Batch, ...]
    samples: tuple[int, ...]
    per_step: float

    @property
    def num_samples(self) -> int:
        return sum(self.samples)


@dataclass
class Rehearsal:
    """Bytes of one rank, and the work of one of its steps.

    peak_bytes: the most that tensors hold at one moment of a step; start_bytes: while the stage is put together.
    activations_bytes: what autograd keeps at the end of the largest forward pass. passes: operations of forward and
    backward by kind of micro-batch; update: of optimizer and average. units: modules that fsdp gathers one by one.
    """

    parameters: int = 0
    trainable: int = 0
    units: int = 0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    average_bytes: int = 0
    batch_bytes: int = 0
    activation_bytes: int = 0
    peak_bytes: int = 0
    start_bytes: int = 0
    forward: list[list[Operation]] = field(default_factory=list)
    backward: list[list[Operation]] = field(default_factory=list)
    update: list[Operation] = field(default_factory=list)

    @property
    def needed_bytes(self) -> int:
        """The most that tensors hold, while the stage is put together or in a step."""
        return max(self.peak_bytes, self.start_bytes)

    @property
    def state_bytes(self) -> int:
        """What a checkpoint holds of this rank."""
        return self.parameter_bytes + self.optimizer_bytes + self.average_bytes


def rehearse(stage: Stage, kinds: Sequence[Kind], ranks: int, config: EngineConfig, length: StageLength) -> Rehearsal:
    """Rehearse two steps of the first of `ranks` ranks; the second counts, when everything that stays is there.

    stage: fresh, built on the meta device; it is used up.
    """
    strategy = config.strategy if config.strategy != "auto" else "ddp" if ranks > 1 else "single"
    dtype = weight_dtype(config.precision)
    rehearsal = Rehearsal()
    rehearsal.parameters = sum(p.numel() for p in stage.parameters())
    rehearsal.trainable = sum(p.numel() for p in stage.parameters() if p.requires_grad)
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(pretended_world(ranks, config.shard_ranks)) if strategy == "fsdp" else None
        rank_info = RankInfo(0, ranks, 0, ranks, "cpu")
        pretended = "single" if strategy == "ddp" else strategy
        runtime = Runtime(rank_info, _CPU, pretended, 0, None, None, mesh)
        stack.enter_context(fake_tensors())
        make_fake(stage, [batch for kind in kinds for batch in kind.batches], dtype)
        watch = stack.enter_context(OperationTrace())
        for tensor in (*stage.parameters(), *stage.buffers()):
            watch.hold(tensor)
        spread = arrange(stage, runtime, config)
        buckets = _Buckets(stage) if strategy == "ddp" else None
        no_loader: Any = None  # batches come from the rehearsal itself
        engine = Engine(runtime, spread, no_loader, config=config, length=length)
        rehearsal.units = sum(is_fsdp(module) for module in stage.modules())
        rehearsal.start_bytes = watch.mark()
        rehearsal.parameter_bytes = _bytes(stage.parameters())
        rehearsal.optimizer_bytes = _bytes(t for state in engine.optimizer.state.values() for t in state.values())
        rehearsal.average_bytes = _bytes(engine.ema.tensors.values()) if engine.ema is not None else 0
        for _ in range(2):
            rehearsal.peak_bytes = _step(engine, spread, kinds, dtype, watch, buckets, rehearsal)
    return rehearsal


def _step(
    engine: Engine,
    strategy: Strategy,
    kinds: Sequence[Kind],
    dtype: torch.dtype,
    watch: OperationTrace,
    buckets: _Buckets | None,
    rehearsal: Rehearsal,
) -> int:
    """The order of `Engine._accumulate` and `_update`; each kind of micro-batch once.

    A single kind that comes more than once is passed twice: the second time gradients are there already.
    """
    rehearsal.forward, rehearsal.backward = [], []
    passes = list(kinds)
    if len(passes) == 1 and passes[0].per_step > 1:
        passes *= 2
    engine.optimizer.zero_grad(set_to_none=True)
    held: list[tuple[Batch, ...]] = []
    for number, kind in enumerate(passes):
        before = watch.live_bytes
        held[:] = [tuple(fake_batch(b, dtype, n) for b, n in zip(kind.batches, kind.samples, strict=True))]
        rehearsal.batch_bytes = max(rehearsal.batch_bytes, watch.live_bytes - before)
        watch.operations.clear()
        at_start = watch.live_bytes
        with strategy.micro_batch(is_last=number + 1 == len(passes)):
            with autocast(engine.config.precision, _CPU):
                losses = strategy.module(held[0])
            rehearsal.activation_bytes = max(rehearsal.activation_bytes, watch.live_bytes - at_start)
            rehearsal.forward.append(list(watch.operations))
            watch.operations.clear()
            losses.total.backward()
        del losses
        rehearsal.backward.append(list(watch.operations))
    del rehearsal.forward[len(kinds) :], rehearsal.backward[len(kinds) :]
    if buckets is not None:
        buckets.hand_out()
    gradients = [p.grad for p in engine.parameters.values() if p.grad is not None]
    rehearsal.gradient_bytes = _bytes(gradients)
    watch.operations.clear()
    engine._update(engine._judged(gradients), 1)
    rehearsal.update = list(watch.operations)
    del gradients
    return watch.mark()


class _Buckets:
    """What DistributedDataParallel does to memory with `gradient_as_bucket_view`."""

    def __init__(self, stage: Stage) -> None:
        self._parameters = [p for p in stage.parameters() if p.requires_grad]
        self._gradients = [torch.empty_like(p) for p in self._parameters]
        for parameter in self._parameters:
            parameter.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, parameter: Tensor) -> None:
        parameter.grad = None

    def hand_out(self) -> None:
        """Give every parameter its place in a bucket as its gradient."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in locals_of(tensors))


class HostNumbers(Tensor):
    """Window numbers inside `fake_tensors()`: the one tensor of a batch whose values are asked for."""

    on_host: npt.NDArray[np.int64]

    @classmethod
    def of(cls, values: npt.NDArray[np.int64]) -> HostNumbers:
        with _disable_current_modes():
            numbers: HostNumbers = Tensor._make_subclass(cls, torch.from_numpy(values))
        numbers.on_host = values
        return numbers

    def numpy(self, *, force: bool = False) -> npt.NDArray[np.int64]:
        """The real numbers."""
        return self.on_host


def fake_tensors() -> contextlib.AbstractContextManager[Any]:
    """Inside, tensors have no data."""
    mode: contextlib.AbstractContextManager[Any] = FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def make_fake(stage: Stage, batches: Sequence[Batch], dtype: torch.dtype, device: torch.device = _CPU) -> None:
    """Replace parameters and buffers of a stage, built on the meta device, by fake tensors on a device.

    To be called inside `fake_tensors()`.

    batches: real ones, of every task and grid that the stage will see.
    """
    with _disable_current_modes():
        for batch in batches:
            stage._augmentation.moves_of(batch)  # looks at coordinates: kept by the stage, by task and grid
    # From averages of losses, which a fake stage has none of; a number changes neither bytes nor arithmetic.
    stage.task_factor = lambda task: None  # type: ignore[method-assign]
    to_fake(stage, dtype, device)


def to_fake(module: nn.Module, dtype: torch.dtype | None, device: torch.device) -> None:
    """Fake tensors in the place of parameters and buffers; dtype: of numbers with a fraction, None: as they are."""
    made: dict[int, Any] = {}

    def fake(tensor: Tensor) -> Tensor:
        kind = dtype if dtype is not None and tensor.dtype.is_floating_point else tensor.dtype
        return torch.empty(tensor.shape, dtype=kind, device=device)

    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(fake(parameter), requires_grad=parameter.requires_grad)
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fake(buffer)


def fake_batch(batch: Batch, dtype: torch.dtype, samples: int) -> Batch:
    """The shapes of `samples` windows of a real batch, as the engine hands them to a stage; inside `fake_tensors()`."""

    def fake(value: Tensor, cut: bool) -> Tensor:
        return torch.empty((samples if cut else value.shape[0], *value.shape[1:]), dtype=dtype)

    tensors: dict[str, Any] = {
        f.name: fake(value, cut=True)
        for f in fields(batch)
        if isinstance(value := getattr(batch, f.name), Tensor) and f.name != "numbers"
    }
    with _disable_current_modes():
        known = np.resize(batch.numbers.numpy(), samples)
    return replace(
        batch,
        **tensors,
        coordinates=tuple(fake(c, cut=False) for c in batch.coordinates),
        numbers=HostNumbers.of(known),
    )


@contextlib.contextmanager
def pretended_world(size: int, shard_ranks: int | None = None) -> Iterator[DeviceMesh]:
    """A process group of `size` ranks of which this process is the first and the others do not exist."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield make_mesh("cpu", size, shard_ranks)
    finally:
        dist.destroy_process_group()
