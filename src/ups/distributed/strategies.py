"""How a stage is spread over ranks: `single`, `ddp` (a copy on every rank) or `fsdp` (a shard on every rank).

A model is single-device code; parallelism comes from outside, in a fixed order: activation checkpointing, then compile,
then DDP or `fully_shard`. The first two replace `forward` of each shard unit in place, so that the names of parameters
are the same under every strategy, and a checkpoint of one loads into another. Arithmetic by name: type of the weights,
and the autocast region of a forward pass. Order of the loop: `ups.training.engine`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from ups.config.schema import EngineConfig
from ups.distributed.runtime import SHARD, Runtime
from ups.errors import ConfigError, TrainingError

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

# Normalization buffers are constant: sending them along with each forward pass would be a collective for nothing. The
# argument got a new name in torch 2.13.
_NEW_NAME = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW_NAME else "broadcast_buffers": False}


class Spreadable(nn.Module):
    """A module that a strategy can spread over ranks."""

    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one; by default none."""
        return []


class Single:
    """One rank, nothing to reduce; also the interface of the other strategies.

    `stage` is the module as it was built, with its own parameter names; `module` is what a step calls.
    """

    # Whether the first reduction of a process is laid out otherwise than the later ones (see `Ddp`).
    needs_warm_up = False

    def __init__(self, stage: Spreadable, runtime: Runtime) -> None:
        self.stage = stage
        self.module: nn.Module = stage
        self._runtime = runtime

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch: gradients are reduced only in the last one of a step."""
        return contextlib.nullcontext()

    def gradient_norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """Global L2 norm of the reduced gradients, float64, equal on all ranks. Collective: all ranks, for fsdp."""
        if not gradients:
            raise TrainingError("no parameter has a gradient", hint="the loss of this stage does not reach the model")
        norms = torch.stack(torch._foreach_norm([local(g) for g in gradients])).double()
        return self._sum_over_shards((norms * norms).sum()).sqrt()

    def weights_changed(self) -> None:
        """To be called after the weights were written from outside, so that no stale gathered copy is used."""

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """Inside, every weight is whole on this rank and modules run without communication, each rank at its own pace.

        For evaluation, where ranks have unequal numbers of batches. Collective: all ranks enter and leave together.
        """
        return contextlib.nullcontext()

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        return value


class _Ddp(DistributedDataParallel):
    """Without torch's compiler where nothing is compiled: DDP imports it for two questions, half of a rank's start."""

    @contextlib.contextmanager
    def _inside_ddp_forward(self) -> Iterator[None]:
        with super()._inside_ddp_forward() if "torch._dynamo" in sys.modules else contextlib.nullcontext():
            yield


@contextlib.contextmanager
def _compiler_unless_loaded() -> Iterator[None]:
    """The one answer of torch's compiler that DDP asks for while it is made."""
    if "torch._dynamo" in sys.modules:
        yield
        return
    stand_in = SimpleNamespace(utils=SimpleNamespace(get_optimize_ddp_mode=lambda: "ddp_optimizer"))
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        vars(torch).pop("_dynamo", None)  # torch imports the real one when somebody asks for it


class Ddp(Single):
    """A full copy on every rank; torch's own DistributedDataParallel reduces gradients while backward runs.

    DDP lays its buckets out again after its first backward pass. In a ring with three or more ranks the order of
    summation depends on the place in the bucket, so the first step of a process would differ in the last bit from the
    same step in a longer process. The engine therefore runs one pass and throws it away (`needs_warm_up`).
    """

    def __init__(self, stage: Spreadable, runtime: Runtime) -> None:
        super().__init__(stage, runtime)
        self.needs_warm_up = runtime.world_size > 2
        # device_ids stays None: the stage is on its device, and the batch is moved by the engine, not by DDP.
        with _compiler_unless_loaded():
            self._ddp = _Ddp(stage, **_KEEP_BUFFERS, gradient_as_bucket_view=True)
        self.module = self._ddp

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if is_last else self._ddp.no_sync()


class Fsdp(Single):
    """A shard of every parameter on every rank (`fully_shard`), gathered unit by unit.

    With `shard_ranks` below the number of ranks there are several copies of the model, each spread over that many.
    """

    def __init__(self, stage: Spreadable, runtime: Runtime, units: Sequence[nn.Module], config: EngineConfig) -> None:
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        super().__init__(stage, runtime)
        # A stage that ends in float32 gathers float32 throughout: a policy cannot be changed later, autocast can.
        gathers_low = config.precision == "bfloat16" and not config.float32_fraction
        low = torch.bfloat16 if gathers_low else None
        reduce = torch.float32 if gathers_low else None
        inner = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=reduce)
        # What is outside the units stays float32: it sees physical units, decides scales, and is small.
        outer = MixedPrecisionPolicy(reduce_dtype=reduce, cast_forward_inputs=False)
        # Pinned memory, from which a GPU reads on its own, exists only where there is one.
        on_gpu = runtime.device.type == "cuda"
        place = CPUOffloadPolicy(pin_memory=on_gpu) if config.offload else OffloadPolicy()
        # torch warns of every unit that returns a view, in case somebody changes it in place. Our networks do not.
        ours = {type(unit).__name__ for unit in units if type(unit).__module__.startswith("ups.")}
        warnings.filterwarnings("ignore", message=rf"FSDP2-wrapped module \(FSDP({'|'.join(sorted(ours))})\) returned")
        for unit in units:
            fully_shard(unit, mesh=runtime.mesh, mp_policy=inner, offload_policy=place)
        fully_shard(stage, mesh=runtime.mesh, mp_policy=outer, offload_policy=place)
        if not is_fsdp(stage):
            raise TrainingError("fully_shard did not take the stage")
        self._fsdp: FSDPModule = stage

    def micro_batch(self, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        self._fsdp.set_requires_gradient_sync(is_last)
        self._fsdp.set_is_last_backward(is_last)
        return contextlib.nullcontext()

    def weights_changed(self) -> None:
        # The outermost unit stays gathered after a forward pass, and the next pass would use that old copy.
        for module in self._sharded():
            module.reshard()

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        for module in self._sharded():
            module.set_reshard_after_forward(False, recurse=False)
            module.unshard()
        try:
            yield
        finally:
            for module in self._sharded():
                module.reshard()
                module.set_reshard_after_forward(module is not self._fsdp, recurse=False)

    def _sharded(self) -> list[FSDPModule]:
        return [module for module in self.stage.modules() if is_fsdp(module)]

    def _sum_over_shards(self, value: Tensor) -> Tensor:
        # Over the shards of one copy: the others have the same ones.
        mesh = self._runtime.mesh
        value = value.to(self._runtime.device)
        dist.all_reduce(value, group=None if mesh is None or mesh.ndim == 1 else mesh[SHARD].get_group())
        return value


Strategy = Single


def spread(stage: Spreadable, runtime: Runtime, config: EngineConfig) -> Strategy:
    """Move `stage` to the device and spread it over the ranks. Collective: all ranks.

    Every rank must hold the same initial weights: fsdp keeps a slice of its own copy.
    """
    stage.to(device=runtime.device, dtype=weight_dtype(config.precision))
    return arrange(stage, runtime, config)


def compile_unit(unit: nn.Module) -> None:
    """Compile one of the units of a model, for each shape that it meets.

    Units share their code but not their shapes. Left to itself the compiler takes that for one shape that changes, and
    its code for such shapes fails on some of ours. After 8 units and shapes together it would compile no more.
    """
    import torch._dynamo
    import torch._inductor.config

    torch._inductor.config.deterministic = torch.are_deterministic_algorithms_enabled()
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 2000
    unit.forward = torch.compile(unit.forward, dynamic=False)


def arrange(stage: Spreadable, runtime: Runtime, config: EngineConfig) -> Strategy:
    """`spread` for a stage whose weights are where and what they should be already. Collective: all ranks."""
    units = stage.shard_units()
    for unit in units:
        if config.activation_checkpointing:
            # Draws are keyed, not streamed: there is no generator state to restore for the second pass.
            unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, preserve_rng_state=False)
        if config.compile:
            compile_unit(unit)
    if runtime.strategy == "ddp":
        return Ddp(stage, runtime)
    if runtime.strategy == "fsdp":
        return Fsdp(stage, runtime, units, config)
    if runtime.strategy == "single":
        return Single(stage, runtime)
    raise ConfigError(f"engine.strategy '{runtime.strategy}' is unknown", hint="use auto, single, ddp or fsdp")


def is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether a tensor is spread over ranks. Does not import what only sharding needs: that takes a second."""
    return isinstance(tensor, _if_imported("torch.distributed.tensor", "DTensor"))


def is_fsdp(module: nn.Module) -> TypeGuard[FSDPModule]:
    """Whether `fully_shard` took a module."""
    return isinstance(module, _if_imported("torch.distributed.fsdp", "FSDPModule"))


def _if_imported(package: str, name: str) -> Any:
    """A class, or no class: the thread that saves may be about to import the package."""
    return getattr(sys.modules.get(package), name, ())


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: the shard of a sharded one, else the tensor itself. No gradient."""
    if is_sharded(tensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor.detach()


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor, also where a rank holds a part of it. Collective then: all ranks."""
    detached = tensor.detach()
    return detached.full_tensor() if is_sharded(detached) else detached


@torch.no_grad()
def scale_rows(parameter: Tensor, factors: Tensor) -> None:
    """Multiply each row of a parameter, sharded or whole, by its factor (rows,), which every rank knows."""
    local(parameter).mul_(_by_row(parameter, factors))


@torch.no_grad()
def set_rows(parameter: Tensor, values: Tensor) -> None:
    """Write a number into each row of a parameter, sharded or whole, from (rows,), which every rank knows."""
    local(parameter).copy_(_by_row(parameter, values))


def _by_row(parameter: Tensor, values: Tensor) -> Tensor:
    """This rank's part of a tensor like the parameter, with one number in each row."""
    whole = (
        values.to(parameter.device, parameter.dtype).reshape(-1, *[1] * (parameter.ndim - 1)).expand(parameter.shape)
    )
    if is_sharded(parameter):
        from torch.distributed.tensor import distribute_tensor

        whole = distribute_tensor(whole.contiguous(), parameter.device_mesh, parameter.placements, src_data_rank=None)
    return local(whole).to(local(parameter).device)  # which may be kept on the host, whatever the mesh's device is


def locals_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    """`local` of each."""
    return [local(tensor) for tensor in tensors]


_WEIGHTS = {"float32": torch.float32, "bfloat16": torch.float32, "float64": torch.float64}


def weight_dtype(precision: str) -> torch.dtype:
    """Type of weights, optimizer state and batches: bfloat16 runs keep float32 weights."""
    return _WEIGHTS[precision]


def autocast(precision: str, device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """The region in which a forward pass runs: bfloat16 for products, float32 where range matters."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()
