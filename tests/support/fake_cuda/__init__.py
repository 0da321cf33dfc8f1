"""A CUDA device that does not exist: its tensors have shapes, types and a device, and no data.

`install` makes torch take the device; it cannot be undone, so this belongs into a process of its own (`__main__`).
`on_device` runs what the host computes, fakes what the device would, and notes what only a GPU would suffer from.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.cuda.amp import common
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from ups.models import normalization

DEVICE = torch.device("cuda:0")
# Operations whose result decides what the host does next.
ANSWERS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
# Without a deterministic implementation on CUDA (torch.use_deterministic_algorithms), by the beginning of their names.
RANDOM = (
    *(
        "adaptive_avg_pool",
        "_adaptive_avg_pool",
        "adaptive_max_pool",
        "avg_pool3d_backward",
        "max_pool3d_with_indices_b",
    ),
    *("upsample_linear1d_b", "upsample_bilinear2d_b", "upsample_bicubic2d_b", "upsample_trilinear3d_b", "grid_sampler"),
    *("reflection_pad1d_b", "reflection_pad2d_b", "reflection_pad3d_b", "replication_pad1d_b", "replication_pad2d_b"),
    *("replication_pad3d_b", "cumsum", "histc", "kthvalue", "scatter_reduce", "put_", "_embedding_bag", "median"),
)
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "convolution", "convolution_backward", "_scaled_dot_product_attention"}
LOW = (torch.float16, torch.bfloat16)


def install() -> None:
    """Give this process the device."""
    if not torch.backends.cuda.is_built():
        package, source = Path(torch.__path__[0]), Path(__file__).with_name("device.cpp")
        with tempfile.TemporaryDirectory() as folder:
            library = f"{folder}/device.so"
            options = ["-std=c++20", "-O0", "-shared", "-fPIC", f"-I{package}/include", f"-L{package}/lib"]
            libraries = ["-lc10", "-ltorch_cpu"]
            subprocess.run(["g++", *options, str(source), "-o", library, *libraries], check=True)
            ctypes.CDLL(library).install()
    # torch switches autocast off where it finds no GPU.
    common.amp_definitely_not_available = lambda: False
    torch.cuda.is_bf16_supported = lambda *_, **__: True
    torch.cuda.is_initialized, torch.cuda.current_device = lambda: True, lambda: 0
    for name in ("Stream", "Event", "stream", "current_stream", "synchronize"):
        setattr(torch.cuda, name, Nothing)
    # As a rank does: torch then takes another way for some operations.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    # No value, not even that of a constant, is computed on a device that is not there; constants stay as with numbers.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment,method-assign]
    normalization.is_fake = lambda tensor: False  # type: ignore[attr-defined]


class Nothing:
    """Streams, events, and all that is done with them."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, name: str) -> Any:
        return Nothing

    def __enter__(self) -> None: ...

    def __exit__(self, *error: Any) -> None: ...


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs what the host computes, leaves the rest to fake tensors, and notes by the place in ups:

    waits: the host waits for the device. pageable: memory is copied between them that is not pinned, or has another
    type or order there, so that torch copies it to memory that is not pinned. rejected: CUDA has no kernel for it.
    random: CUDA has nothing deterministic for it.
    """

    operators: ClassVar[set[str]] = set()  # all that the device was asked for

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._pinned: dict[int, Tensor] = {}

    def pin(self, tensor: Tensor) -> Tensor:
        """The tensor, whose memory counts as pinned."""
        self._pinned[tensor.untyped_storage()._cdata] = tensor  # kept, so that nothing else gets its address
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # what it does to its local tensors comes by here
        if func.namespace in ("prim", "c10d"):
            return func(*args, **kwargs)  # a question about a tensor; what ranks send
        name = func.overloadpacket.__name__
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        devices = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)]
        if all(d.type == "cpu" for d in devices) and not any(isinstance(t, FakeTensor) for t in tensors):
            with _disable_current_modes():
                pins = kwargs.get("pin_memory") or False
                result = func(*args, **(kwargs | {"pin_memory": False} if pins else kwargs))
            return self.pin(result) if pins else result
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode, operations come here before they were taken apart
                return func.decompose(*args, **kwargs)
        self.operators.add(func.name())
        self._judge(name, args, kwargs, tensors)
        # Answers, so that the host goes on: 1, and as if every mask were true everywhere.
        if name == "_local_scalar_dense":
            return 1
        if name == "nonzero":
            return torch.empty(args[0].numel(), args[0].ndim, dtype=torch.int64, device=DEVICE)
        if name == "index":
            args = (args[0], [i for index in args[1] for i in _as_numbers(index)])
        if name in ("_to_copy", "copy_"):
            source, target = (args[1], args[0]) if name == "copy_" else (args[0], None)
            here = target.device if target is not None else torch.device(kwargs.get("device") or source.device)
            if source.device.type != here.type:
                return self._copied(name, source, target, here, args, kwargs, func)
        return func(*args, **kwargs)

    def _copied(
        self, name: str, source: Tensor, target: Tensor | None, here: torch.device, args: Any, kwargs: Any, func: Any
    ) -> Any:
        waits_not = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        dtype = kwargs.get("dtype") or source.dtype if target is None else target.dtype
        host = source if here.type == "cuda" else target
        if not waits_not:
            self.note(f"waits: {name} from {source.device.type} to {here.type}")
        elif host is None or host.untyped_storage()._cdata not in self._pinned:
            self.note(f"pageable: {name} from {source.device.type} to {here.type}")
        elif dtype != source.dtype or not source.is_contiguous():
            self.note(f"pageable: {name} of a {source.dtype} as {dtype}, or of another order")
        if here.type == "cuda":
            return func(*args, **kwargs)
        if target is not None:
            return target
        with _disable_current_modes():
            return torch.ones(source.shape, dtype=dtype)

    def _judge(self, name: str, args: Any, kwargs: Any, tensors: list[Tensor]) -> None:
        if name in ANSWERS:
            self.note(f"waits: {name}")
        indices = args[1] if name.startswith("index") and len(args) > 1 and isinstance(args[1], list | tuple) else ()
        if any(i is not None and (i.dtype == torch.bool or i.device.type == "cpu") for i in indices):
            self.note(f"waits: {name} by a mask, or by numbers of the host")
        types = {t.dtype for t in tensors}
        if name.startswith(("_fft", "linalg", "_linalg")) and types & {*LOW}:
            self.note(f"rejected: {name} of {types}")
        if name in PRODUCTS and (len(types) > 1 or not all(t.is_floating_point or t.is_complex for t in types)):
            self.note(f"rejected: {name} of {types}")
        if name.startswith(RANDOM) and any(t.is_floating_point for t in types):
            self.note(f"random: {name}")

    def note(self, what: str) -> None:
        """Keep the innermost place in the package."""
        where = [
            f"{f.filename.split('/ups/')[-1]}:{f.lineno} {f.name}"
            for f in traceback.extract_stack()
            if "/ups/" in f.filename
        ]
        self.found.append(f"{what}: {where[-1] if where else '?'}")


@contextlib.contextmanager
def on_device() -> Iterator[Watch]:
    """Inside, tensors of the host are real and those of the device fake."""
    watch, pin_memory = Watch(), Tensor.pin_memory
    Tensor.pin_memory = lambda tensor: watch.pin(_as_it_lies(tensor))  # type: ignore[method-assign,assignment,misc]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), watch:
            yield watch
    finally:
        Tensor.pin_memory = pin_memory  # type: ignore[method-assign]


def _as_it_lies(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def _as_numbers(index: Tensor | None) -> list[Tensor | None]:
    """An index as numbers of rows: those of a mask that is true everywhere."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [torch.empty(index.numel(), dtype=torch.int64, device=DEVICE) for _ in range(index.ndim)]


def left_on_host(module: nn.Module) -> list[str]:
    """Names of tensors in a module, registered or not, that are not on the device."""
    return [
        f"{path}.{name}"
        for path, part in module.named_modules()
        for name, value in {**part._parameters, **part._buffers, **vars(part)}.items()
        for leaf in tree_leaves(value)
        if isinstance(leaf, Tensor) and leaf.device.type != DEVICE.type
    ]
