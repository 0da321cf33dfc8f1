"""Statistics as buffers, and the way between physical and normalized units, in float32 or float64 always.

The buffers are tables with one row per task, padded to the longest task, in float64: state dicts hold plain tensors
with plain names, and statistics lose no digits before the model itself is moved to another type.

Below: what networks share with it, as tensors that follow from names alone and normal draws that follow from a key.

B samples, T frames, C channels, S space, P parameters.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from ups.errors import DataError
from ups.models.vocabulary import Vocabulary
from ups.spec.keyed import keyed_rows
from ups.spec.statistics import Statistics, safe
from ups.spec.task import Role, TaskSpec

_ROLES = ("state", "static", "target", "parameter")


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32: what is subtracted and divided here never runs in half precision."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as this type; a call of `to` that changes nothing costs as much as a small operation."""
    return x if x.dtype == dtype else x.to(dtype)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """A region in which products are formed in the type of their factors."""
    enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if enabled else contextlib.nullcontext()


class Normalization(nn.Module):
    """Normalizes fields and parameters of every task, and undoes it."""

    def __init__(self, vocabulary: Vocabulary, tasks: Sequence[TaskSpec], statistics: Mapping[str, Statistics]) -> None:
        super().__init__()
        self.vocabulary = vocabulary
        self._columns = Constants()
        rows: dict[str, dict[int, tuple[float, ...]]] = {}
        for task in tasks:
            if task.name not in statistics:
                raise DataError(f"there are no statistics for task '{task.name}'")
            for name, values in _columns(task, statistics[task.name]).items():
                rows.setdefault(name, {})[vocabulary.task_id(task.name)] = values
        for name, values_of in rows.items():
            table = torch.ones(len(tasks), max(1, *(len(v) for v in values_of.values())), dtype=torch.float64)
            for row, values in values_of.items():
                table[row, : len(values)] = torch.tensor(values, dtype=torch.float64)
            self.register_buffer(name, table)

    def column(
        self, name: str, task: TaskSpec, like: Tensor, length: int, shape: Sequence[int] | None = None
    ) -> Tensor:
        """(length,) numbers of one task, or as `shape`, in the dtype and on the device of `like`."""
        row = self.vocabulary.task_id(task.name)

        def read() -> Tensor:
            numbers: Tensor = getattr(self, name)[row, :length]
            return numbers if shape is None else numbers.reshape(*shape)

        key = (name, row, length, None if shape is None else tuple(shape))
        return self._columns.get(read, key, like.device, like.dtype)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._columns.clear()
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._columns.clear()
        super()._load_from_state_dict(*args, **kwargs)

    def normalize(self, role: str, task: TaskSpec, values: Tensor, channel_dim: int) -> Tensor:
        """Physical -> zero mean and unit deviation. role: state, static or target."""
        x = wide(values)
        mean, std = self._mean_std(role, task, x, channel_dim)
        return (x - mean) / std

    def restore(self, role: str, task: TaskSpec, values: Tensor, channel_dim: int) -> Tensor:
        """Inverse of `normalize`."""
        x = wide(values)
        mean, std = self._mean_std(role, task, x, channel_dim)
        return x * std + mean

    def parameters_of(self, task: TaskSpec, parameters: Tensor) -> Tensor:
        """(B, P) physical -> normalized; the logarithm first where the parameter has a log scale."""
        x = wide(parameters)
        if any(p.scale == "log" for p in task.parameters):
            logs = self._columns.get(
                lambda: torch.tensor([p.scale == "log" for p in task.parameters]),
                ("logs", self.vocabulary.task_id(task.name)),
                x.device,
                torch.bool,
            )
            x = torch.where(logs, torch.log(torch.where(logs, x, 1.0)), x)
        mean, std = self._mean_std("parameter", task, x, 1)
        return (x - mean) / std

    def relative_parameters(self, task: TaskSpec, parameters: Tensor) -> Tensor:
        """(B, P) physical -> in units of the largest magnitude of the range that the task declares."""
        x = wide(parameters)
        largest = self._columns.get(
            lambda: torch.tensor([max(abs(p.minimum), abs(p.maximum)) for p in task.parameters], dtype=torch.float64),
            ("largest", self.vocabulary.task_id(task.name)),
            x.device,
            x.dtype,
        )
        # A parameter without a declared range: its usual size.
        mean, std = self._mean_std("parameter", task, x, 1)
        usual = _rms(mean, std)[0]
        return x / torch.where(largest > 0, largest, usual)

    def state_scale(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C, 1, ...): standard deviation of the state, in physical units, for tensors (..., C, *S)."""
        return self._by_channel("state_std", task, like, "state")

    def change_scale(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C, 1, ...): the usual size of a change over one step, in physical units, for tensors (..., C, *S)."""
        return self._by_channel("difference_scale", task, like, "state")

    def error_scale(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C, 1, ...): the unit of predictions: standard deviations of increments, or of a steady task's target."""
        return self._by_channel("target_std", task, like, "target") if task.steady else self.change_scale(task, like)

    def field_size(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C,): root mean square of the predicted fields over the train split, in physical units."""
        length = task.num_channels(task.predicted)
        mean = self.column(f"{task.predicted}_mean", task, like, length)
        std = self.column(f"{task.predicted}_std", task, like, length)
        return _rms(mean, std)

    def change_gain(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C,): normalized change of a predicted channel -> scaled change; 1 for a steady task."""
        if task.steady:
            return like.new_ones(task.num_channels("target"))
        length = task.num_channels("state")
        return self.column("state_std", task, like, length) / self.column("difference_scale", task, like, length)

    def update_ratio(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(): the typical change of a latent over one step, relative to the latent itself; 1 for a steady task."""
        return self.column("latent_ratio", task, like, 1)[0]

    def channel_gain(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C, 1, ...): decoded update of the latent -> scaled change of the fields."""
        return self._by_channel("output_gain", task, like, task.predicted)

    def _by_channel(self, name: str, task: TaskSpec, like: Tensor, role: Role) -> Tensor:
        return self.column(name, task, like, task.num_channels(role), (-1, *[1] * task.num_spatial_dims))

    def _mean_std(self, role: str, task: TaskSpec, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
        length = x.shape[channel_dim]
        shape = [1] * x.ndim
        shape[channel_dim] = length
        mean = self.column(f"{role}_mean", task, x, length, shape)
        return mean, self.column(f"{role}_std", task, x, length, shape)


def _rms(mean: Tensor, std: Tensor) -> Tensor:
    """Root mean square from mean and deviation (never 0). Not `torch.hypot`, which does not export to ONNX; squares of
    physical values may overflow, those of ratios do not."""
    largest = torch.maximum(mean.abs(), std)
    return largest * ((mean / largest).square() + (std / largest).square()).sqrt()


def _columns(task: TaskSpec, statistics: Statistics) -> dict[str, tuple[float, ...]]:
    """Table name -> the values of one task, all checked against its channels."""
    columns: dict[str, tuple[float, ...]] = {}
    for role in _ROLES:
        mean = getattr(statistics, f"{role}_mean")
        std = getattr(statistics, f"{role}_std")
        expected = len(task.parameters) if role == "parameter" else task.num_channels(role)  # type: ignore[arg-type]
        if not len(mean) == len(std) == expected:
            raise DataError(
                f"statistics of task '{task.name}' have {len(mean)} {role} channels, the task has {expected}",
                hint="compute the statistics again from this task's train split",
            )
        columns[f"{role}_mean"], columns[f"{role}_std"] = mean, safe(std)
    num_states = task.num_channels("state")
    if not len(statistics.difference_mean) == len(statistics.difference_std) == num_states:
        raise DataError(f"statistics of task '{task.name}' lack the differences between frames")
    # Root mean square, not deviation: a steady drift is a change too. A field that never changes is measured by its
    # deviation, as its noise is: by 1, an error would count by the physical unit that the field happens to have.
    pairs = zip(statistics.difference_mean, statistics.difference_std, strict=True)
    sizes = [(m * m + s * s) ** 0.5 for m, s in pairs]
    scale = tuple(size or deviation for size, deviation in zip(sizes, columns["state_std"], strict=True))
    ratios = [d / s for d, s in zip(scale, columns["state_std"], strict=True)]
    mean_ratio = torch.tensor(ratios or [1.0], dtype=torch.float64).log().mean().exp().item()
    columns["difference_scale"] = scale
    columns["latent_ratio"] = (mean_ratio,)
    columns["output_gain"] = tuple(mean_ratio / r for r in ratios) or (1.0,) * task.num_channels("target")
    return columns


class Constants:
    """A cache of such tensors. The key must say everything that the value depends on, but for device and type."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, ...], Tensor] = {}

    def get(self, make: Callable[[], Tensor], key: Hashable, device: torch.device, dtype: torch.dtype) -> Tensor:
        """What `make` returns (on the CPU), on `device` as `dtype`."""
        full_key = (key, device, dtype)
        if full_key not in self._known:
            # Autograd refuses to keep a tensor that was made in inference mode, and training may follow.
            with torch.inference_mode(False), torch.device("cpu"):
                made = make().to(device=device, dtype=dtype)
            if is_fake(made):  # of an export or a rehearsal: it has no numbers
                return made
            self._known[full_key] = made
        return self._known[full_key]

    def clear(self) -> None:
        """Forget all, because something that the keys do not say has changed."""
        self._known.clear()

    def index(self, numbers: Callable[[], list[int]], key: Hashable, device: torch.device) -> Tensor:
        """Row numbers as an index on `device`: made there once, because a copy to a GPU waits for it."""
        return self.get(lambda: torch.tensor(numbers(), dtype=torch.int64), key, device, torch.int64)


def sent(values: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Values of the host on `device`. A GPU reads pinned memory while the host goes on; other memory makes it wait."""
    values = values.to(dtype or values.dtype)
    pinned = values.contiguous().pin_memory() if device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """As in a process that has one; the number of threads is what it was afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# 2^64 / golden ratio, and the multipliers of SplitMix64 (ups.spec.keyed), as signed words.
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15 - 2**64, 0xBF58476D1CE4E5B9 - 2**64, 0x94D049BB133111EB - 2**64
_HALF = 2.0**-24


def keyed_normal(key: int, numbers: np.ndarray[tuple[int], np.dtype[np.int64]], count: int, like: Tensor) -> Tensor:
    """(len(numbers), count) standard normal draws on the device of `like`: row i depends on key and numbers[i] alone.

    The words are those behind `keyed_uniform`; each gives a pair (Box-Muller).
    """
    start = sent(torch.from_numpy(keyed_rows(key, numbers).view(np.int64)), like.device)
    columns = torch.arange(1, (count + 1) // 2 + 1, device=like.device) * _GOLDEN
    words = _mixed(start[:, None] + columns)
    radius = (((words >> 40) & 0xFFFFFF).to(like.dtype) + 0.5).mul_(_HALF).log_().mul_(-2.0).sqrt_()
    angle = ((words >> 8) & 0xFFFFFF).to(like.dtype).mul_(2.0 * math.pi * _HALF)
    return torch.cat([radius * angle.cos(), radius * angle.sin()], dim=1)[:, :count]


def _mixed(x: Tensor) -> Tensor:
    """`ups.spec.keyed.mix` on signed words: products wrap around, shifts fill with zeros."""
    x = (x ^ ((x >> 30) & (2**34 - 1))) * _MIX_1
    x = (x ^ ((x >> 27) & (2**37 - 1))) * _MIX_2
    return x ^ ((x >> 31) & (2**33 - 1))
