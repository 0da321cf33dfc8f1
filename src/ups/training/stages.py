"""Stages: what is trained, and the loss of each sample. One class per stage; the loop is the engine's.

A stage is the module that a strategy wraps: one forward per micro-batch, which holds batches of one task each. No loss
of a sample depends on another sample, and random draws are keyed by (seed, step, window number), so that ranks and
micro-batches may cut a batch anywhere.

B samples, T frames, C channels, S space.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ups.config.stage import (
    AutoencodeStageConfig,
    CorrectorStageConfig,
    OperatorStageConfig,
    StageConfig,
    SteadyStageConfig,
)
from ups.distributed.strategies import Spreadable, gathered, set_rows
from ups.errors import ConfigError, DataError, PluginError
from ups.models.constraints import by_cells, conserved_channels
from ups.models.flow import FLOW, STUDENT, flow_of
from ups.models.normalization import Constants, sent, wide
from ups.models.stepper import OPERATOR, STEADY, Stepper
from ups.models.vocabulary import Channels
from ups.registry import LOSSES, STAGES
from ups.spec.batch import LATENTS, Batch
from ups.spec.points import POINT_VALUES, POINTS, at_points, valid_at_points
from ups.spec.statistics import safe
from ups.spec.task import TaskSpec
from ups.training.augment import Augmentation, Moves, moved, noisy
from ups.training.averages import TaskAverages
from ups.training.losses import Loss, Losses, Prediction, normalized_rmse, nrmse_loss, relative_l2

# Normalized fields have unit size: a sample that is nearly constant is judged against a tenth of that.
_FIELD_FLOOR = 0.1
_BALANCE_MEMORY = 0.98
_constants = Constants()


class LossModule(Spreadable, ABC):
    """What the engine trains: a module that gives the losses of samples. `Stage` is one around a stepper.

    measured_steps: batches of so many steps are passed through the stage before its first one, without gradients,
    between `measure(True)` and `begin()`; and of so many more, again and again, while `measured_enough` says no.
    averages: moving averages of the tasks' losses, if this stage needs them: the engine then updates them each step.
    """

    measured_steps: ClassVar[int] = 0
    averages: TaskAverages | None = None

    @abstractmethod
    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """For each batch (of one task each, all of one micro-batch) its losses (B,) by name; `loss` is trained."""

    def forward(self, batches: Sequence[Batch]) -> Losses:
        """The weighted sum of the losses of all samples, and a metric for each name and task."""
        total: Tensor | None = None
        weight = 0.0
        metrics: dict[str, Tensor] = {}
        for batch, losses in zip(batches, self.sample_losses(batches), strict=True):
            part = losses["loss"].sum() * batch.sample_weight
            if (factor := self.task_factor(batch.task)) is not None:
                part = part * factor.to(part.dtype)
            total = part if total is None else total + part
            weight += batch.sample_weight * batch.num_samples
            for name, values in losses.items():
                pair = sum_and_count(values.detach().sum(), batch.num_samples)
                if not batch.sample_weight:  # what a rank without windows of a task reads in their place
                    pair = torch.zeros_like(pair)
                key = f"train/{batch.task.name}/{name}"
                metrics[key] = metrics[key] + pair if key in metrics else pair  # a step may have a task twice
        if total is None:
            raise DataError("a micro-batch without a batch has no loss")
        metrics["loss"] = sum_and_count(total.detach(), weight)
        return Losses(total, metrics)

    def task_factor(self, task: TaskSpec) -> Tensor | None:
        """() What the losses of a task are multiplied by; None for 1."""
        return None

    def measure(self, on: bool) -> None:
        """Whether the passes that follow are to be measured."""

    def measured_enough(self) -> bool:
        """Whether what was passed so far is enough. Collective: all ranks."""
        return True

    def begin(self) -> None:
        """Before the first step, when the weights to start from are in place. Collective: all ranks."""

    def finish(self) -> None:
        """After the last step, when the weights are final. Collective: all ranks."""

    def matrices(self) -> list[nn.Parameter]:
        """Parameters that Muon may orthogonalize; those that this stage does not train are left out by the engine."""
        return []


class Stage(LossModule):
    """Base of all stages. Building one decides which parameters are trained: all others stop asking for gradients.

    trains_members: whether it trains the noise that makes members differ, next to what predicts.
    """

    trains_members: ClassVar[bool] = False
    config: StageConfig

    def __init__(self, stepper: Stepper, seed: int) -> None:
        super().__init__()
        self.stepper = stepper
        self.seed = seed
        self._augmentation = Augmentation(seed)
        trained = {id(p) for module in self.trained_modules() for p in module.parameters()}
        for parameter in stepper.parameters():
            parameter.requires_grad_(id(parameter) in trained)

    @abstractmethod
    def trained_modules(self) -> list[nn.Module]:
        """The modules whose parameters this stage trains; every one of them is in the graph of every batch."""

    def window_frames(self, context_frames: int) -> int:
        """Frames that a sample of a transient task needs: by default as the settings say."""
        return self.config.window_frames(context_frames)

    def takes(self, task: TaskSpec) -> bool:
        """Whether this stage trains on a task: its trained modules are what predicts that."""
        return self.stepper.network_of(task) == OPERATOR

    def check_start(self) -> None:
        """Raises ConfigError if the weights to start from lack what this stage learns from. Collective: all ranks.

        Of a real run alone: a rehearsal, or a measurement of one stage, has no stages before it.
        """

    def begin(self) -> None:
        """Before the first step, when the weights to start from are in place. Collective: all ranks.

        What corrects a network that is trained now is forgotten.
        """
        for name in (OPERATOR, STEADY):
            if name in self.stepper.networks and any(p.requires_grad for p in self.stepper.networks[name].parameters()):
                forget_correctors(self.stepper, name, members=not self.trains_members)

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that the optimizer of this stage gets, in a fixed order."""
        return (p for p in self.parameters() if p.requires_grad)

    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one."""
        return self.stepper.shard_units()

    def matrices(self) -> list[nn.Parameter]:
        """Parameters that Muon may orthogonalize; those that this stage does not train are left out by the engine."""
        return self.stepper.matrices()

    def prepare(self, batch: Batch, augment: bool) -> Batch:
        """The batch, under random symmetries of its task if asked.

        Raises DataError if the samples have fewer frames than the stage needs.
        """
        needed = self.window_frames(self.stepper.context_frames)
        if not batch.task.steady and batch.state.shape[1] < needed:
            raise DataError(
                f"stage needs {needed} frames a sample of task '{batch.task.name}', got {batch.state.shape[1]}",
                hint="read windows of stage.window_frames(context_frames) frames",
            )
        # Points are not moved with the fields.
        return self._augmentation(batch) if augment and POINTS not in batch.extra else batch


class AutoencodeStage(Stage):
    """Trains encoder and decoder: fields -> latent -> the same fields, and back to the same latent."""

    config: AutoencodeStageConfig

    def __init__(self, config: AutoencodeStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(stepper, seed)
        self.config = config

    def trained_modules(self) -> list[nn.Module]:
        return [self.stepper.latent.encoder, self.stepper.latent.decoder]

    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        return [self.task_losses(batch) for batch in batches]

    def task_losses(self, batch: Batch) -> dict[str, Tensor]:
        """Relative errors of fields and of re-encoded latents; a steady task's given and asked fields in turn."""
        batch = self.prepare(batch, self.config.augment)
        reconstruction, inverse = round_trips(self.stepper, batch)
        loss = reconstruction + self.config.inverse_weight * inverse
        return {"loss": loss, "reconstruction": reconstruction, "inverse": inverse}


class BalancedStage(Stage):
    """Trains the whole network, with balanced losses of tasks."""

    config: OperatorStageConfig | CorrectorStageConfig | SteadyStageConfig

    def __init__(
        self, config: OperatorStageConfig | CorrectorStageConfig | SteadyStageConfig, stepper: Stepper, seed: int
    ) -> None:
        super().__init__(stepper, seed)
        self.config = config
        if config.balance:
            loss = LOSSES.factory(config.loss) if isinstance(config, OperatorStageConfig) else nrmse_loss
            fields = getattr(loss, "relative_to_fields", False)
            start = {task.name: baseline_loss(stepper, task) if fields else 1.0 for task in stepper.tasks}
            self.averages = TaskAverages(start, _BALANCE_MEMORY)

    def trained_modules(self) -> list[nn.Module]:
        return [self.stepper.network]

    def task_factor(self, task: TaskSpec) -> Tensor | None:
        return None if self.averages is None else self.averages.factor(task.name, self.config.balance)


class UnrolledStage(BalancedStage):
    """Trains on one step, or on several on the model's own results."""

    config: OperatorStageConfig | CorrectorStageConfig
    # The first steps, which leave no gradient.
    pushforward_steps = 0

    @abstractmethod
    def step_losses(self, batch: Batch, history: Tensor, predicted: Tensor, step: int) -> dict[str, Tensor]:
        """Losses (B,) of the `step`-th prediction of an unrolled sample, which was given the history (B, T, C, *S)."""

    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """The means over the steps that count."""
        batches = [self.prepare(batch, self.config.augment) for batch in batches]
        histories = [self.given_frames(batch) for batch in batches]
        losses: list[list[dict[str, Tensor]]] = [[] for _ in batches]
        for step in range(self.config.unroll_steps):
            counts = step >= self.pushforward_steps
            # A steady task has one step: it takes part in the first one that counts.
            active = [i for i, b in enumerate(batches) if not b.task.steady or step == self.pushforward_steps]
            with torch.set_grad_enabled(counts and torch.is_grad_enabled()):
                given = [batches[i].with_state(histories[i]) for i in active]
                for i, predicted in zip(active, self.predict(given, step), strict=True):
                    if counts:
                        losses[i].append(self.step_losses(batches[i], histories[i], predicted, step))
                    if not batches[i].task.steady and step + 1 < self.config.unroll_steps:
                        histories[i] = following(self.stepper, histories[i], predicted, batches[i].task)
        means = [{name: torch.stack([one[name] for one in each]).mean(0) for name in each[0]} for each in losses]
        for batch, each in zip(batches, means, strict=True):
            self.add_penalties(batch, each)
        return means

    def add_penalties(self, batch: Batch, losses: dict[str, Tensor]) -> None:
        """Add to the mean losses (B,) of a batch what depends on no step."""

    def given_frames(self, batch: Batch) -> Tensor:
        """The context frames (B, T, C, *S)."""
        return batch.state[:, : self.stepper.context_frames]

    def predict(self, batches: Sequence[Batch], step: int) -> list[Tensor]:
        """The scaled changes (or normalized targets) after the frames in each batch's state."""
        return self.stepper.predict_group(batches)


def following(stepper: Stepper, history: Tensor, predicted: Tensor, task: TaskSpec) -> Tensor:
    """The history (B, T, C, *S) one step later: without its oldest frame, and with the predicted one."""
    frame = stepper.advance(history[:, -1], predicted, task)
    return torch.cat([history[:, 1:], frame[:, None].to(history.dtype)], dim=1)


class OperatorStage(UnrolledStage):
    """Trains the step in time, end to end, on the scaled change of the fields (or the normalized target)."""

    config: OperatorStageConfig

    def __init__(self, config: OperatorStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(config, stepper, seed)
        self.pushforward_steps = config.pushforward_steps
        self._loss: Loss = LOSSES.factory(config.loss)
        self._cells = Constants()

    def add_penalties(self, batch: Batch, losses: dict[str, Tensor]) -> None:
        """Those that the recipe asks for."""
        if "conservation" in losses:
            losses["loss"] = losses["loss"] + self.config.conservation_weight * losses["conservation"]
        if self.config.inverse_weight:
            losses["reconstruction"], losses["inverse"] = round_trips(self.stepper, batch)
            penalty = losses["reconstruction"] + losses["inverse"]
            losses["loss"] = losses["loss"] + self.config.inverse_weight * penalty

    def given_frames(self, batch: Batch) -> Tensor:
        """The context frames (B, T, C, *S), with noise."""
        frames, config = super().given_frames(batch), self.config
        if batch.task.steady:
            return frames
        normalization = self.stepper.normalization
        return noisy(batch, frames, normalization, self.seed, largest=config.noise, clean=config.noise_clean)

    def step_losses(self, batch: Batch, history: Tensor, predicted: Tensor, step: int) -> dict[str, Tensor]:
        """The loss of the recipe, and how far conserved integrals moved where that counts."""
        task, stepper, at = batch.task, self.stepper, self.stepper.context_frames + step
        valid, last, change, target, state = batch.valid, history[:, -1:], predicted, batch.target, batch.state
        if (points := batch.extra.get(POINTS)) is not None:  # the truth is known there, and on the grid only nearly
            valid, change, state = valid_at_points(points), at_points(predicted, points), batch.extra[POINT_VALUES]
            target, last = state[:, 0], last if task.steady else at_points(last, points)
        if task.steady:
            reference = stepper.normalization.normalize("target", task, target, 1)
            error, fields = change - reference, target[:, None]
        else:
            error = change - stepper.scaled_change(last[:, 0], state[:, at], task)
            # Relative to the true change, not to the correction of the model's own error: a poor history must not make
            # the denominator large.
            reference = stepper.scaled_change(state[:, at - 1], state[:, at], task)
            fields = state[:, at - 1 : at + 1]
        if valid is not None:  # means over all points are then means over those with values
            valid = valid / valid.flatten(1).mean(1).sqrt().reshape(-1, *[1] * (valid.ndim - 1)).clamp_min(1e-9)
            error, reference, fields = error * valid, reference * valid, fields * valid[:, None]
        units = functools.partial(in_field_units, stepper, task, error, fields)
        losses = {"loss": self._loss(Prediction(error, reference, self.config.relative_floor, units))}
        if self.config.conservation_weight:
            losses["conservation"] = conservation_errors(batch, predicted, self._cells)
        return losses

    def _relative(self, error: Tensor, reference: Tensor) -> Tensor:
        """(B,): errors of what need not be a field, such as a latent."""
        return self._loss(Prediction(error, reference, self.config.relative_floor))


class LatentOperatorStage(OperatorStage):
    """Trains the operator alone, on latents of a frozen autoencoder; the decoded fields may count too.

    Latents are encoded from the fields of a batch, or come with it in `Batch.extra` from a cache
    (`ups.data.latent_cache`).
    """

    def __init__(self, config: OperatorStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(config, stepper, seed)
        if config.cache and config.augment and not stepper.latent.patch_size:
            raise ConfigError(
                f"latents of model type '{stepper.config.type}' cannot be moved, and the stage has a cache and augment",
                hint="set augment: false of the stage, or leave its cache out",
            )

    def trained_modules(self) -> list[nn.Module]:
        return [self.stepper.latent.operator]

    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        return [self.task_losses(self.prepare(batch, self.config.augment)) for batch in batches]

    def prepare(self, batch: Batch, augment: bool) -> Batch:
        """As for fields; a batch that brings its latents is moved by whole patches."""
        if LATENTS not in batch.extra:
            return super().prepare(batch, augment)
        moves = self._augmentation.moves_of(batch) if augment else None
        # Which axes a static field allows is seen in the field, and that may not be there.
        if moves is None or (not batch.task.steady and batch.task.num_channels("static")):
            return batch
        return moved_by_patches(batch, moves, self._augmentation.draws_of(batch), self.stepper.latent.patch_size)

    def task_losses(self, batch: Batch) -> dict[str, Tensor]:
        """As `OperatorStage`, with the step fed by its own latents instead of re-encoded fields.

        Fields that do not count are not decoded.
        """
        in_latent, in_fields = self.steady_errors(batch) if batch.task.steady else self.unrolled_errors(batch)
        latent = torch.stack(in_latent).mean(0)
        if not in_fields:
            return {"loss": latent, "latent": latent}
        decoded = torch.stack(in_fields).mean(0)
        return {"loss": latent + self.config.decode_weight * decoded, "latent": latent, "decoded": decoded}

    def latents(self, batch: Batch) -> list[Tensor]:
        """(B, *N, Z): of the given frames and of those after each step; of a steady task of given fields and target."""
        if LATENTS in batch.extra:
            return list(batch.extra[LATENTS].unbind(1))
        context, task, stepper = self.stepper.context_frames, batch.task, self.stepper
        if task.steady:
            given = stepper.encode(*stepper.inputs(batch.state, batch.static, task), task)
            return [given, stepper.encode(*stepper.target_inputs(batch.target, task), task)]
        frames = range(self.config.unroll_steps + 1)
        return [
            stepper.encode(*stepper.inputs(batch.state[:, f : f + context], batch.static, task), task) for f in frames
        ]

    def steady_errors(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """(B,) errors of the latent and, if fields count, of the decoded target."""
        task, stepper = batch.task, self.stepper
        given, wanted = self.latents(batch)
        updated = self._update(given, batch)
        in_latent = [self._relative(updated - wanted, wanted)]
        if not self.config.decode_weight:
            return in_latent, []
        target, _ = stepper.target_inputs(batch.target, task)
        decoded = stepper.decode_update(updated, task, batch.space)
        return in_latent, [self._relative(decoded - target, target)]

    def unrolled_errors(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """(B,) errors of latent and, if fields count, decoded field for each step that carries a gradient."""
        context, task, stepper = self.stepper.context_frames, batch.task, self.stepper
        decodes = self.config.decode_weight > 0
        truths = self.latents(batch)
        ratio = stepper.normalization.update_ratio(task, truths[0])
        latent = truths[0]
        last = batch.state[:, context - 1] if decodes else None
        in_latent: list[Tensor] = []
        in_fields: list[Tensor] = []
        for step in range(self.config.unroll_steps):
            counts = step >= self.config.pushforward_steps
            with torch.set_grad_enabled(counts and torch.is_grad_enabled()):
                update = self._update(latent, batch)
                if counts:
                    wanted, usual = truths[step + 1] - latent, truths[step + 1] - truths[step]
                    in_latent.append(self._relative(update - wanted / ratio, usual / ratio))
                latent = latent + ratio * update
                if last is not None:
                    change = stepper.decode_update(update, task, batch.space)
                    truth, before = batch.state[:, context + step], batch.state[:, context + step - 1]
                    if counts:
                        error = change - stepper.scaled_change(last, truth, task)
                        in_fields.append(self._relative(error, stepper.scaled_change(before, truth, task)))
                    last = stepper.advance(last, change, task)
        return in_latent, in_fields

    def _update(self, latent: Tensor, batch: Batch) -> Tensor:
        parameters = self.stepper.normalization.parameters_of(batch.task, batch.parameters)
        places = self.stepper.fit.coordinates(batch.coordinates, batch.task)
        update: Tensor = self.stepper.latent.operator(latent, batch.task, parameters, batch.dt, places)
        return update


def moved_by_patches(batch: Batch, moves: Moves, draws: npt.NDArray[np.float64], patch_size: int) -> Batch:
    """The batch under the drawn shifts (B, A + 1), each rounded down to whole patches; no turn, no reflection.

    Nothing else that is done to fields can be done to their latents. An axis that patches do not divide stays as it is:
    its latents are of another grid than the fields. B samples, L latents, N tokens, Z channels of a token, A axes.
    """
    space = np.array(batch.space)
    patches = np.where((moves.rolled > 0) & (space % patch_size == 0), space // patch_size, 0)  # (A,)
    steps = (draws[:, :-1] * patches).astype(np.int64)  # (B, A)
    latents = batch.extra[LATENTS]
    grid = latents.shape[2:-1]
    index = torch.zeros((), dtype=torch.int64)
    for axis, count in enumerate(grid):
        source = (torch.arange(count) - torch.from_numpy(steps[:, axis, None])) % count  # (B, n)
        shape = [-1] + [count if a == axis else 1 for a in range(len(grid))]
        index = index * count + source.reshape(shape)
    flat = latents.flatten(2, -2)  # (B, L, N, Z)
    chosen = sent(index.flatten(1), latents.device)[:, None, :, None].expand(flat.shape)
    rolled = replace(batch, extra={**batch.extra, LATENTS: flat.gather(2, chosen).reshape(latents.shape)})
    # The middle of the interval that `moved` takes for this shift; the first element of the group is the identity.
    shifts = np.divide(steps * patch_size + 0.5, moves.rolled, out=np.zeros(steps.shape), where=moves.rolled > 0)
    return moved(rolled, moves, np.concatenate([shifts, np.zeros((len(draws), 1))], axis=1))


def round_trips(stepper: Stepper, batch: Batch) -> tuple[Tensor, Tensor]:
    """(B,) errors of the decoded fields and of the re-encoded latent; mean of given and asked fields if steady."""
    task = batch.task
    pairs = [_round_trip(stepper, *stepper.inputs(batch.state[:, : stepper.context_frames], batch.static, task), task)]
    if task.steady:
        pairs.append(_round_trip(stepper, *stepper.target_inputs(batch.target, task), task))
    return torch.stack([p[0] for p in pairs]).mean(0), torch.stack([p[1] for p in pairs]).mean(0)


def _round_trip(stepper: Stepper, fields: Tensor, channels: Channels, task: TaskSpec) -> tuple[Tensor, Tensor]:
    """(B, F, *S) normalized -> (B,) errors of the decoded fields and of the re-encoded latent.

    The decoder gives the last frame; older context frames stay as they are.
    """
    last_slot = stepper.context_frames - 1
    latent = stepper.encode(fields, channels, task)
    newest = [i for i, slot in enumerate(channels.slots) if slot == last_slot]
    decoded = stepper.decode(latent, [channels.names[i] for i in newest], task, fields.shape[2:])
    index = _constants.index(lambda: newest, tuple(newest), fields.device)
    wanted = fields.index_select(1, index)
    again = stepper.encode(fields.index_copy(1, index, decoded.to(fields.dtype)), channels, task)
    return (
        relative_l2(decoded - wanted, wanted, _FIELD_FLOOR),
        relative_l2(again - latent, latent.detach(), _FIELD_FLOOR),
    )


def conservation_errors(batch: Batch, change: Tensor, constants: Constants) -> Tensor:
    """(B,): how far a scaled change (B, C, *S) moves the integrals that its task conserves, in standard deviations of
    increments.

    Root mean square over those fields of the task alone, so that tasks with other fields, or none that is conserved,
    can share a step; on grids that are not uniform points count by their cells.
    """
    task = batch.task
    rows = [] if task.steady else conserved_channels(task)
    if not rows:
        return change.flatten(1).sum(1) * 0.0  # every parameter is in every graph
    index = constants.index(lambda: rows, ("conserved", task.name), change.device)
    moved = by_cells(change.index_select(1, index), batch, constants)
    return torch.sqrt(moved.flatten(2).mean(2).square().mean(1) + 1e-16)


def field_errors(stepper: Stepper, task: TaskSpec, error: Tensor, fields: Tensor) -> Tensor:
    """(B,): error (B, C, *S) in scaled units, relative to the fields (B, T, C, *S), which are in physical units."""
    return normalized_rmse(*in_field_units(stepper, task, error, fields))


def in_field_units(stepper: Stepper, task: TaskSpec, error: Tensor, fields: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Error (..., C, *S) in scaled units and fields (B, T, C, *S) in physical ones, both in units of the usual size of
    each field (squares of physical units may not be numbers in float32); and the smallest size that counts, (C,)."""
    size = stepper.normalization.field_size(task, error)  # (C,)
    each = size.reshape(-1, *[1] * task.num_spatial_dims)
    unit = stepper.normalization.error_scale(task, error) / each  # (C, 1, ...)
    return error * unit, wide(fields) / each, torch.full_like(size, _FIELD_FLOOR)


def baseline_loss(stepper: Stepper, task: TaskSpec) -> float:
    """About the error of an untrained model (no change, or the mean of the target), from the statistics alone."""
    statistics = stepper.statistics[task.name]
    if task.steady:
        units, means, deviations = statistics.target_std, statistics.target_mean, statistics.target_std
    else:
        units = tuple(
            math.hypot(*pair) for pair in zip(statistics.difference_mean, statistics.difference_std, strict=True)
        )
        means, deviations = statistics.state_mean, statistics.state_std
    sizes = safe(tuple(math.hypot(*pair) for pair in zip(means, deviations, strict=True)))
    # A channel that never changes adds nothing; a task in which nothing does has no scale of its own.
    return sum(unit / size for unit, size in zip(units, sizes, strict=True)) / len(sizes) or 1.0


def sum_and_count(total: Tensor, number: float) -> Tensor:
    """(2,): a sum and what to divide it by, on the device of the sum."""
    return torch.stack([total.double(), total.new_full((), number, dtype=torch.float64)])


def build_operator(config: OperatorStageConfig, stepper: Stepper, seed: int) -> OperatorStage:
    """The stage that trains the step, in the space that the recipe names."""
    return (LatentOperatorStage if config.space == "latent" else OperatorStage)(config, stepper, seed)


def build_stage(config: StageConfig, stepper: Stepper, seed: int) -> Stage:
    """The stage that a recipe names. Freezes what it does not train."""
    stage = STAGES.factory(config.type)(config, stepper, seed)
    if not isinstance(stage, Stage):
        raise PluginError(
            f"stage '{config.type}' of {STAGES.origin(config.type)} built a {type(stage).__name__}, not a Stage",
            hint="derive it from ups.training.stages.Stage",
        )
    return stage


logger = logging.getLogger(__name__)


def forget_correctors(stepper: Stepper, network: str, *, members: bool) -> None:
    """Of the tasks that `network` predicts. members: also those that noise makes. Collective: all ranks."""
    tasks = [task for task in stepper.tasks if stepper.network_of(task) == network]
    forgotten = set()
    for name in (FLOW, STUDENT):
        if name in stepper.networks:
            flow = flow_of(stepper, name)
            forgotten |= {task.name for task in tasks if flow.is_trained(task)}
            set_rows(flow.scale, flow.scale_without([task.name for task in tasks]))
    sizes_and_names = stepper.network.noise_sizes() if members and network == OPERATOR else None
    if sizes_and_names is not None:
        sizes, names = sizes_and_names
        forgotten |= {name for name, size in zip(names, gathered(sizes)[:, 0].tolist(), strict=True) if size}
        set_rows(sizes, torch.zeros(len(names)))
    if forgotten:
        logger.warning(
            "what corrects %s was trained for other weights than this stage ends with, and is forgotten",
            ", ".join(sorted(forgotten)),
        )


# How often a stage may ask for more: a task that is in none of so many steps has hardly a part in the training.
_MOST_TIMES = 16


def pass_measured(
    stage: LossModule, steps: Iterable[Iterable[tuple[Batch, ...]]], forward: Callable[[tuple[Batch, ...]], object]
) -> bool:
    """Pass the batches of the steps that a stage wants to measure through it; returns whether it wants some.

    steps: the batches of each step, from the first step on. Collective: all ranks, if `forward` is.
    """
    if not stage.measured_steps:
        return False
    stage.measure(True)
    remaining = iter(steps)
    for _ in range(_MOST_TIMES):
        for batches in itertools.islice(remaining, stage.measured_steps):
            for batch in batches:
                with torch.no_grad():
                    forward(batch)
        if stage.measured_enough():
            break
    return True
