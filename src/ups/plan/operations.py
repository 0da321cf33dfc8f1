"""What a piece of torch code does: every operation with its arithmetic and the bytes it moves, and the memory alive.

A dispatch mode, so it sees forward, backward and optimizer alike, and what autograd keeps is alive because autograd
keeps it. It works on fake tensors (`ups.plan.rehearsal`) and on real ones: the same code is counted and measured.
"""

from __future__ import annotations

import math
import time
import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from ups.distributed.strategies import is_sharded

PRODUCT, CONVOLUTION, DEPTHWISE, FOURIER, MOVE = "product", "convolution", "depthwise", "fourier", "move"
KINDS = (PRODUCT, CONVOLUTION, DEPTHWISE, FOURIER, MOVE)
_FORWARD, _BACKWARD = "aten::convolution", "aten::convolution_backward"


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: its kind, floating point operations, and bytes read and written."""

    kind: str
    flops: float
    num_bytes: int


class OperationTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, operations are listed with CPU time, and live bytes followed; `mark` reads and restarts the peak."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.seconds: list[float] = []
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing compiled runs inside: torch need not import its compiler, which takes as long as torch itself."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # what it does to its local tensors comes by here
        kwargs = kwargs or {}
        if func.namespace == "prim":
            return func(*args, **kwargs)  # a question about a tensor, of which ghosts are asked many
        started = time.process_time()
        out = func(*args, **kwargs)
        seconds = time.process_time() - started
        results = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        for tensor in results:
            self.hold(tensor)
        if not _moves_nothing(func):
            self.operations.append(operation_of(func, args, kwargs, out, results))
            self.seconds.append(seconds)
        return out

    def hold(self, tensor: Tensor) -> None:
        """Count the storage of a tensor while it is alive."""
        if is_sharded(tensor):
            tensor = tensor._local_tensor
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return
        size = storage.nbytes()
        self._known[key] = weakref.ref(storage, lambda _: self._gone(key, size))
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def mark(self) -> int:
        """The most bytes that were alive since the last mark."""
        peak, self.peak_bytes = self.peak_bytes, self.live_bytes
        return peak

    def _gone(self, key: int, size: int) -> None:
        del self._known[key]
        self.live_bytes -= size


def operation_of(func: Any, args: Any, kwargs: Any, out: Any, results: list[Tensor]) -> Operation:
    """What one call does. Arithmetic of products, convolutions and transforms; of everything else only its bytes."""
    inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    writes_in_place = any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    num_bytes = sum(_size(x) for x in inputs) + (0 if writes_in_place else sum(_size(x) for x in results))
    name = func._schema.name
    if name.startswith("aten::_fft"):
        points = max(x.numel() for x in (*inputs, *results))
        dims = args[1] if len(args) > 1 else (-1,)
        length = math.prod(inputs[0].shape[d] for d in dims)
        return Operation(FOURIER, 5.0 * points * math.log2(max(2, length)), num_bytes)
    if name in (_FORWARD, _BACKWARD):
        return _convolution(name == _BACKWARD, args, num_bytes, results)
    count = flop_registry.get(func._overloadpacket)
    if count is None:
        return Operation(MOVE, 0.0, num_bytes)
    return Operation(PRODUCT, float(count(*args, **kwargs, out_val=out)), num_bytes)


def _convolution(backward: bool, args: Any, num_bytes: int, results: list[Tensor]) -> Operation:
    """Own arithmetic: the counter of torch takes the channels of groups for connected when it goes backward."""
    weight = args[2 if backward else 1]
    transposed, groups = bool(args[7 if backward else 6]), int(args[9 if backward else 8])
    # Each value of the larger grid's other side meets one kernel: of the output, or of the input if transposed.
    meets = args[1] if transposed and backward else args[0] if transposed or backward else results[0]
    flops = 2.0 * meets.numel() * math.prod(weight.shape[1:])
    passes = sum(map(bool, args[10][:2])) if backward else 1
    alone = groups > 1 and weight.shape[1] == 1
    return Operation(DEPTHWISE if alone else CONVOLUTION, flops * passes, num_bytes)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _moves_nothing(func: Any) -> bool:
    """Views, and questions about a tensor."""
    if func.namespace == "profiler":
        return True
    returns = func._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
