"""Statistics as buffers, and the way between physical and normalized units, in float32 or float64 always.

The buffers are tables with one row per task, padded to the longest task, in float64: state dicts hold plain tensors
with plain names, and statistics lose no digits before the model itself is moved to another type.

B samples, T frames, C channels, S space, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ups.errors import DataError
from ups.models.vocabulary import Vocabulary
from ups.spec.statistics import Statistics, safe
from ups.spec.task import TaskSpec

_ROLES = ("state", "static", "target", "parameter")


def wide(x: Tensor) -> Tensor:
    """`x` in at least float32: what is subtracted and divided here never runs in half precision."""
    return x if x.dtype == torch.float64 else x.float()


class Normalization(nn.Module):
    """Normalizes fields and parameters of every task, and undoes it."""

    def __init__(self, vocabulary: Vocabulary, tasks: Sequence[TaskSpec], statistics: Mapping[str, Statistics]) -> None:
        super().__init__()
        self.vocabulary = vocabulary
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

    def column(self, name: str, task: TaskSpec, like: Tensor, length: int) -> Tensor:
        """(length,) numbers of one task, in the dtype and on the device of `like`."""
        table: Tensor = getattr(self, name)
        return table[self.vocabulary.task_id(task.name), :length].to(device=like.device, dtype=like.dtype)

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
            logs = torch.tensor([p.scale == "log" for p in task.parameters], device=x.device)
            x = torch.where(logs, torch.log(torch.where(logs, x, 1.0)), x)
        mean, std = self._mean_std("parameter", task, x, 1)
        return (x - mean) / std

    def relative_parameters(self, task: TaskSpec, parameters: Tensor) -> Tensor:
        """(B, P) physical -> in units of the largest magnitude of the range that the task declares."""
        x = wide(parameters)
        largest = torch.tensor([max(abs(p.minimum), abs(p.maximum)) for p in task.parameters], dtype=x.dtype)
        # A parameter without a declared range: its usual size.
        mean, std = self._mean_std("parameter", task, x, 1)
        usual = torch.hypot(mean, std)[0]
        return x / torch.where(largest.to(x.device) > 0, largest.to(x.device), usual)

    def state_scale(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C, 1, ...): standard deviation of the state, in physical units, for tensors (..., C, *S)."""
        scale = self.column("state_std", task, like, task.num_channels("state"))
        return scale.reshape(-1, *([1] * task.num_spatial_dims))

    def change_scale(self, task: TaskSpec, like: Tensor, num_spatial_dims: int) -> Tensor:
        """(C, 1, ...): the usual size of a change over one step, in physical units, for tensors (..., C, *S)."""
        scale = self.column("difference_scale", task, like, task.num_channels("state"))
        return scale.reshape(-1, *([1] * num_spatial_dims))

    def error_scale(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C, 1, ...): the unit of predictions: the usual change, or the deviation of a steady task's target."""
        if not task.steady:
            return self.change_scale(task, like, task.num_spatial_dims)
        scale = self.column("target_std", task, like, task.num_channels("target"))
        return scale.reshape(-1, *([1] * task.num_spatial_dims))

    def field_size(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C,): root mean square of the predicted fields over the train split, in physical units."""
        length = task.num_channels(task.predicted)
        mean = self.column(f"{task.predicted}_mean", task, like, length)
        std = self.column(f"{task.predicted}_std", task, like, length)
        return torch.hypot(mean, std)

    def change_gain(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C,): normalized change of a predicted channel -> scaled change; 1 for a steady task."""
        if task.steady:
            return like.new_ones(task.num_channels("target"))
        length = task.num_channels("state")
        return self.column("state_std", task, like, length) / self.column("difference_scale", task, like, length)

    def update_ratio(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(): the usual change of a latent over one step, relative to the latent itself; 1 for a steady task."""
        return self.column("latent_ratio", task, like, 1)[0]

    def channel_gain(self, task: TaskSpec, like: Tensor, num_spatial_dims: int) -> Tensor:
        """(C, 1, ...): decoded update of the latent -> scaled change of the fields."""
        gain = self.column("output_gain", task, like, task.num_channels(task.predicted))
        return gain.reshape(-1, *([1] * num_spatial_dims))

    def _mean_std(self, role: str, task: TaskSpec, x: Tensor, channel_dim: int) -> tuple[Tensor, Tensor]:
        length = x.shape[channel_dim]
        shape = [1] * x.ndim
        shape[channel_dim] = length
        mean = self.column(f"{role}_mean", task, x, length).reshape(shape)
        return mean, self.column(f"{role}_std", task, x, length).reshape(shape)


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
