"""What a bundle states about its errors, from trajectories that chose nothing: split conformal prediction.

The exchangeable unit is the trajectory: points and steps of one trajectory resemble each other, and say nothing about
how many would be covered. A score is an error in units of what the error model expects. Of the scores of n trajectories
the k-th smallest, k = ceil((n + 1) level), is exceeded by a new one with a chance of at most 1 - level. Each of three
statements has its level: each field at each lead, the whole trajectory, and each scalar quantity at each lead.

`calibration.safetensors` holds tensors, and a document that is checked like `bundle.json`. Scores are kept in order, so
that any level can be answered later.

B samples, L leads, M fields, Q quantities, K scores that are kept.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ups.errors import BundleError
from ups.formats.set_aside import level_words
from ups.models.error_model import ErrorModel, period_ends
from ups.record.files import mode_by_umask
from ups.spec.grid import point_weights
from ups.spec.task import TaskSpec

MAX_LEADS, MAX_KEPT = 256, 256
# Usual trajectories that count as further out than calibrated.
FALSE_ALARMS = 0.004
# What a statement is made of: errors at each lead, of whole trajectories, of quantities; and the largest distances.
_SCORES = ("fields", "trajectory", "quantities", "distance")
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
# Fields by name (B, [component,] *S) and coordinates by axis -> (B,).
Quantity = Callable[[Mapping[str, Any], Mapping[str, Any]], Any]
Quantities = Mapping[str, Quantity]


class TaskDocument(BaseModel):
    """What is measured of a task, and on what."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    count: int = Field(ge=1, le=10**7)
    data: str = Field(max_length=200)
    split: str = Field(max_length=100)
    leads: list[Annotated[int, Field(ge=1, le=10**9)]] = Field(min_length=1, max_length=MAX_LEADS)
    quantities: list[str] = Field([], max_length=100)

    def words(self) -> str:
        """What can be stated, for people."""
        when = "the solution" if self.leads == [1] else f"steps 1 to {self.leads[-1]}"
        return f"{level_words(self.count)}; {when}; {', '.join(self.quantities)}"


_DOCUMENT = TypeAdapter(dict[str, TaskDocument])


@dataclass(frozen=True)
class Calibration:
    """The statements about a task. scores: name -> the kept ones in order (K, ...), and of how many (...)."""

    document: TaskDocument
    model: ErrorModel
    scores: Mapping[str, tuple[Float64, Int64]]

    def check_level(self, level: float) -> None:
        """Raises BundleError for a level that so few trajectories cannot state."""
        count = self.document.count
        if not 0 < level <= count / (count + 1) + 1e-9:
            raise BundleError(
                f"level {level:g} cannot be stated: {count} calibration trajectories allow levels above 0 and up to "
                f"{count / (count + 1):.3g}",
                hint="ask for a lower level, such as 0.9, or calibrate with more trajectories (docs/trust.md)",
            )

    def bound(self, name: str, level: float) -> Float64:
        """(...): what a new score exceeds with a chance of at most 1 - level; NaN where too few trajectories are."""
        kept, count = self.scores[name]
        rank = np.ceil((count + 1) * level - 1e-9).astype(np.int64)
        index = (rank - 1) * np.minimum(count, len(kept)) // np.maximum(count, 1)
        chosen = np.take_along_axis(kept, np.clip(index, 0, len(kept) - 1)[None], axis=0)[0]
        return np.where(rank <= count, chosen, np.nan)

    @property
    def alarm(self) -> float:
        """The p-value from which on a trajectory counts as further out than calibrated: the share of false alarms."""
        return max(FALSE_ALARMS, 1 / (self.document.count + 1))

    def p_value(self, distance: Float64) -> Float64:
        """(B,) largest distances -> the share of trajectories that go as far, the new one included; never too small."""
        kept, count = self.scores["distance"][0], int(self.scores["distance"][1])
        nearer = -(-np.searchsorted(kept, distance) * count // len(kept))
        return np.asarray((1 + count - nearer) / (count + 1), np.float64)


Stated = Mapping[str, Calibration]


def order_statistics(scores: Float64) -> tuple[Float64, Int64]:
    """(n, ...) -> at most MAX_KEPT of them in order (K, ...), and how many there were; NaN does not count."""
    ordered, counts = np.sort(scores, axis=0), np.asarray((~np.isnan(scores)).sum(axis=0), np.int64)
    num_kept = min(len(scores), MAX_KEPT)
    rows = np.arange(1, num_kept + 1).reshape(-1, *[1] * counts.ndim)
    kept = np.maximum(np.minimum(counts, num_kept), 1)
    # Of more, each stands for those below it, so that a bound is never too small.
    ranks = np.clip(-(-rows * counts // kept), 1, len(scores))
    chosen = np.take_along_axis(ordered, ranks - 1, axis=0)
    return np.where(rows <= counts, chosen, np.inf), counts


def choose_leads(steps: int) -> list[int]:
    """The steps of a rollout that get statements: all, or of many those at growing distances."""
    return sorted(
        {round(step) for step in np.geomspace(1, steps, MAX_LEADS)} if steps > MAX_LEADS else range(1, steps + 1)
    )


def quantities_of(task: TaskSpec, points: Sequence[Float64], given: Quantities) -> dict[str, Quantity]:
    """Functions by name: mean and energy (mean square) of each field, and those that are given."""
    weights = point_weights(task.axes, points)

    def mean(name: str, power: int, is_scalar: bool) -> Quantity:
        def value(fields: Mapping[str, Any], _: object) -> Any:
            density = fields[name] ** power * (1.0 if weights is None else weights)
            summed = density if is_scalar else density.sum(axis=1)
            return summed.reshape(len(summed), -1).mean(axis=1)

        return value

    found = {}
    for field in task.fields_of(task.predicted):
        if not field.tensor_rank:
            found[f"{field.name}_mean"] = mean(field.name, 1, True)
        found[f"{field.name}_energy"] = mean(field.name, 2, not field.tensor_rank)
    return found | dict(given)


def measured(task: TaskSpec, frame: Tensor, points: Sequence[Float64], quantities: Quantities) -> Float64:
    """(B, C, *S) -> (B, Q)."""
    sizes = [field.num_channels(task.num_spatial_dims) for field in task.fields_of(task.predicted)]
    parts = np.split(frame.double().cpu().numpy(), np.cumsum(sizes)[:-1], axis=1)
    pairs = zip(task.fields_of(task.predicted), parts, strict=True)
    fields = {field.name: part if field.tensor_rank else part[:, 0] for field, part in pairs}
    by_axis = {axis.name: along for axis, along in zip(task.axes, points, strict=True)}
    columns = [np.asarray(quantity(fields, by_axis), np.float64) for quantity in quantities.values()]
    return np.stack(columns, axis=1) if columns else np.empty((len(frame), 0))


class Watch:
    """What is stated about one rollout, gathered step by step: memory for the frames that are kept only.

    outside_at (B,): the first step that is further out than calibrated, 0 if there is none. It is 1 for samples that
    are known to be outside before the first step.
    """

    def __init__(
        self,
        calibration: Calibration,
        task: TaskSpec,
        kept: tuple[int, int, int],
        points: Sequence[Float64],
        level: float | None,
        given: Quantities,
        withhold: bool,
        outside: npt.NDArray[np.bool_] | None,
    ) -> None:
        """kept: samples, frames, and steps between two of these. level: None states no errors. withhold: state none
        from the step on that is further out than calibrated, because no such trajectory was measured."""
        names = calibration.document.quantities
        if unknown := [name for name in given if name not in names]:
            hint = "ups.calibrate(..., quantities={name: function})"
            raise BundleError(f"quantity '{unknown[0]}' was not calibrated", hint=hint)
        samples, frames, self._every = kept
        self._calibration, self._task, self._points, self._level = calibration, task, points, level
        self._withhold = withhold
        self._places = {lead: place for place, lead in enumerate(calibration.document.leads)}
        # Steps beyond the last period count as that one.
        self._ends = period_ends(calibration.document.leads[-1])[:-1]
        self._sum: Tensor | None = None
        self.outside_at = np.zeros(samples, np.int32) if outside is None else outside.astype(np.int32)
        self._distance = np.full(samples, -np.inf)
        self._distances = np.full((samples, frames), -np.inf)
        self._quantities: Quantities = {}
        if level is not None:
            calibration.check_level(level)
            self._quantities = quantities_of(task, points, given)
            self._columns = [names.index(name) for name in self._quantities]
            self._bounds = {name: calibration.bound(name, level) for name in _SCORES}
            self._errors, self._bands = np.full((2, samples, frames, len(task.fields_of(task.predicted))), np.nan)
            self._values, self._widths = np.full((2, samples, frames, len(self._quantities)), np.nan)

    def look(self, numbers: Tensor, frames: Tensor, first: int) -> None:
        """numbers (K, B, F): of consecutive steps that gave these frames (K, B, C, *S). first: step, counted from 1."""
        model, steps = self._calibration.model, range(first, first + len(numbers))
        periods = torch.tensor([bisect_left(self._ends, step) for step in steps])
        away = model.distance(numbers, periods).double().cpu().numpy()  # (K, B)
        reached = np.maximum.accumulate(np.concatenate([self._distance[None], away]))[1:]
        self._distance, p_values = reached[-1], self._calibration.p_value(reached)
        for step, far in zip(steps, p_values <= self._calibration.alarm, strict=True):
            self.outside_at[(self.outside_at == 0) & far] = step
        kept = [n for n, step in enumerate(steps) if step % self._every == 0]
        rows = [steps[n] // self._every - 1 for n in kept]
        self._distances[:, rows] = reached[kept].T
        if self._level is None:
            return
        components = model.components(numbers)
        if self._sum is not None:
            components[0] += self._sum
        sums = components.cumsum(0)
        self._sum = sums[-1]
        if not kept:
            return
        values = measured(self._task, frames[kept].flatten(0, 1), self._points, self._quantities)
        self._values[:, rows] = values.reshape(len(kept), len(self._distance), -1).swapaxes(0, 1)
        stated = [(n, row) for n, row in zip(kept, rows, strict=True) if steps[n] in self._places]
        if not stated:
            return
        places = [self._places[steps[n]] for n, _ in stated]
        rows = [row for _, row in stated]
        means = torch.stack([sums[n] / steps[n] for n, _ in stated], dim=1)  # (B, L, K)
        logs = model.log_error(means, places)
        expected = logs.double().exp().cpu().numpy()
        self._errors[:, rows] = self._bounds["fields"][places] * expected
        self._bands[:, rows] = self._bounds["trajectory"] * model.spread[places].cpu().numpy() * expected
        widths = self._bounds["quantities"][places][:, self._columns]
        self._widths[:, rows] = widths * relative_error(model, logs, places).cpu().numpy()[..., None]

    def words(self) -> str:
        """Which samples left the calibrated range, and when; '' if none did."""
        steps = self.outside_at[self.outside_at > 0]
        if not len(steps):
            return ""
        many = f"{len(steps)} of {len(self.outside_at)} samples are further out than calibrated"
        return f"{many}, the first at step {steps.min()}"

    def arrays(self) -> dict[str, tuple[npt.NDArray[Any], dict[str, Any]]]:
        """Name -> (sample, time) and attributes."""
        about = "share of calibration trajectories that go at least as far from the training as this one up to here"
        parts: dict[str, tuple[npt.NDArray[Any], dict[str, Any]]]
        distance = np.maximum.accumulate(self._distances, 1)
        parts = {"p_value": (self._calibration.p_value(distance).astype(np.float32), {"long_name": about})}
        parts["distance"] = distance.astype(np.float32), {"long_name": "largest distance from the training up to here"}
        said = {"level": self._level, "calibration_trajectories": self._calibration.document.count}
        if self._level is not None and self._withhold:
            steps = self._every * np.arange(1, distance.shape[1] + 1)
            doubted = (self.outside_at > 0)[:, None] & (steps >= self.outside_at[:, None])
            for stated in (self._errors, self._bands, self._widths):
                stated[doubted] = np.nan
        for n, field in enumerate(self._task.fields_of(self._task.predicted) if self._level is not None else ()):
            at, both = (
                f"RMS error of {field.name} at {when}" for when in ("each time", "all times, and of all fields")
            )
            parts[f"{field.name}_error"] = self._errors[..., n], {"long_name": at} | said
            parts[f"{field.name}_band"] = self._bands[..., n], {"long_name": both} | said
        for n, name in enumerate(self._quantities):
            parts[name] = self._values[..., n], {"long_name": f"{name} of the prediction"}
            parts[f"{name}_error"] = self._widths[..., n], {"long_name": f"error of {name}"} | said
        return parts


def relative_error(model: ErrorModel, logs: Tensor, place: int | slice | list[int]) -> Tensor:
    """Log errors (B, [L,] M) -> (B, [L]): how much larger than usual errors are expected, the unit of quantities."""
    return (logs - model.typical[place]).mean(-1).exp()


def write_calibration(path: Path, calibrations: Mapping[str, Calibration]) -> None:
    """Write the file; an older one is replaced."""
    tensors: dict[str, Tensor] = {}
    for task, one in calibrations.items():
        parts = {n: torch.from_numpy(kept.astype(np.float32)) for n, (kept, _) in one.scores.items()}
        parts |= {f"{n}.count": torch.from_numpy(np.asarray(count)) for n, (_, count) in one.scores.items()}
        tensors |= {f"{task}/{n}": tensor.contiguous() for n, tensor in (vars(one.model) | parts).items()}
    document = {task: c.document.model_dump(mode="json") for task, c in calibrations.items()}
    save_file(tensors, path, metadata={"document": json.dumps(document, sort_keys=True)})
    mode_by_umask(path)


def read_calibration(
    path: Path, tasks: Sequence[TaskSpec], device: torch.device | None = None
) -> dict[str, Calibration]:
    """The statements by task; none where there is no file. Raises BundleError for a file that is not sound."""
    if not path.exists():
        return {}
    specs, found = {task.name: task for task in tasks}, {}
    try:
        with safe_open(path, framework="pt", device=str(device or "cpu")) as file:
            documents = _DOCUMENT.validate_json((file.metadata() or {}).get("document", ""))
            for name, document in documents.items():
                names = [key.removeprefix(f"{name}/") for key in file.keys() if key.startswith(f"{name}/")]  # noqa: SIM118
                tensors = {key: file.get_tensor(f"{name}/{key}") for key in names}
                shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
                if shapes != _shapes(document, specs[name], tensors):
                    raise ValueError(f"tensors of task '{name}' do not have the shapes of its document")
                model = ErrorModel(*(tensors[key].float() for key in ErrorModel.__annotations__))
                arrays = {key: tensor.cpu().double().numpy() for key, tensor in tensors.items()}
                scores = {key: (arrays[key], arrays[f"{key}.count"].astype(np.int64)) for key in _SCORES}
                found[name] = Calibration(document, model, scores)
    except (SafetensorError, OSError, ValidationError, ValueError, KeyError) as error:
        lines = str(error).strip().splitlines()
        raise BundleError(
            f"{path} cannot be read: {lines[0][:200] if lines else type(error).__name__}",
            hint="calibrate the bundle again: ups calibrate",
        ) from error
    return found


def _shapes(document: TaskDocument, task: TaskSpec, tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    leads, fields, kept = len(document.leads), len(task.fields_of(task.predicted)), min(document.count, MAX_KEPT)
    (numbers, components), periods = tensors["basis"].shape, len(period_ends(document.leads[-1]))
    law = ((numbers,), (numbers,), (numbers, components), (leads, fields), (2 * components, fields), (leads,))
    shapes = dict(zip(ErrorModel.__annotations__, (*law, (leads, fields), (4, periods, numbers)), strict=True))
    ends = dict(zip(_SCORES, ((leads, fields), (), (leads, len(document.quantities)), ()), strict=True))
    return shapes | {n: (kept, *end) for n, end in ends.items()} | {f"{n}.count": end for n, end in ends.items()}
