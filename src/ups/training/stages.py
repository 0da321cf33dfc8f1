"""Stages: what is trained, and the loss of a batch. One class per stage; the loop is the engine's.

A stage is the module that a strategy wraps: one forward per micro-batch. Its loss is a mean over samples in which no
sample depends on another one, and its random draws are keyed by (seed, step, window number), so that ranks and
micro-batches may cut a batch anywhere.

B samples, T frames, C channels, S space.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ups.config.stage import AutoencodeStageConfig, OperatorStageConfig, StageConfig
from ups.errors import DataError, PluginError
from ups.models.stepper import Stepper
from ups.models.vocabulary import Channels
from ups.registry import STAGES
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec
from ups.training.augment import Augmentation
from ups.training.losses import Losses, relative_l2, sample_errors
from ups.training.noise import noisy

# Normalized fields have unit size: a sample that is nearly constant is judged against a tenth of that.
_FIELD_FLOOR = 0.1


class Stage(nn.Module, ABC):
    """Base of all stages. Building one decides which parameters are trained: all others stop asking for gradients."""

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

    @abstractmethod
    def window_frames(self, context_frames: int) -> int:
        """Frames that a sample of a transient task needs."""

    @abstractmethod
    def forward(self, batch: Batch) -> Losses:
        """The mean loss over the samples of a batch of one task."""

    def trainable_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters that the optimizer of this stage gets, in a fixed order."""
        return (p for p in self.parameters() if p.requires_grad)

    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one."""
        return self.stepper.shard_units()

    def matrices(self) -> list[nn.Parameter]:
        """Parameters that Muon may orthogonalize; those that this stage does not train are left out by the engine."""
        return self.stepper.network.matrices()

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
        return self._augmentation(batch) if augment else batch


class AutoencodeStage(Stage):
    """Trains encoder and decoder: fields -> latent -> the same fields, and back to the same latent."""

    def __init__(self, config: AutoencodeStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(stepper, seed)
        self.config = config

    def trained_modules(self) -> list[nn.Module]:
        return [self.stepper.latent.encoder, self.stepper.latent.decoder]

    def window_frames(self, context_frames: int) -> int:
        return self.config.window_frames(context_frames)

    def forward(self, batch: Batch) -> Losses:
        """Relative errors of fields and of re-encoded latents; a steady task's given and asked fields in turn."""
        batch = self.prepare(batch, self.config.augment)
        task, stepper = batch.task, self.stepper
        fields, channels = stepper.inputs(batch.state[:, : stepper.context_frames], batch.static, task)
        pairs = [self.round_trip(fields, channels)]
        if task.steady:
            pairs.append(self.round_trip(*stepper.target_inputs(batch.target, task)))
        errors = {
            "reconstruction": torch.stack([p[0] for p in pairs]).mean(0),
            "inverse": torch.stack([p[1] for p in pairs]).mean(0),
        }
        return _mean_losses(task, errors, {"inverse": self.config.inverse_weight})

    def round_trip(self, fields: Tensor, channels: Channels) -> tuple[Tensor, Tensor]:
        """(B, F, *S) normalized -> (B,) errors of the decoded fields and of the re-encoded latent.

        The decoder gives the last frame; older context frames stay as they are.
        """
        network, last_slot = self.stepper.latent, self.stepper.context_frames - 1
        latent = network.encoder(fields, channels)
        newest = [i for i, slot in enumerate(channels.slots) if slot == last_slot]
        decoded = network.decoder(latent, [channels.names[i] for i in newest])
        index = torch.tensor(newest, device=fields.device)
        wanted = fields.index_select(1, index)
        again = network.encoder(fields.index_copy(1, index, decoded.to(fields.dtype)), channels)
        return (
            relative_l2(decoded - wanted, wanted, _FIELD_FLOOR),
            relative_l2(again - latent, latent.detach(), _FIELD_FLOOR),
        )


class OperatorStage(Stage):
    """Trains the step in time, end to end, on the scaled change of the fields (or the normalized target)."""

    def __init__(self, config: OperatorStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(stepper, seed)
        self.config = config

    def trained_modules(self) -> list[nn.Module]:
        return [self.stepper.network]

    def window_frames(self, context_frames: int) -> int:
        return self.config.window_frames(context_frames)

    def forward(self, batch: Batch) -> Losses:
        """One step, or several on the model's own results; leading pushforward steps leave no gradient."""
        batch = self.prepare(batch, self.config.augment)
        errors = self.steady_errors(batch) if batch.task.steady else self.unrolled_errors(batch)
        return _mean_losses(batch.task, {"loss": errors})

    def steady_errors(self, batch: Batch) -> Tensor:
        """(B,) errors of the normalized target."""
        predicted = self.stepper.predict(batch)
        wanted = self.stepper.normalization.normalize("target", batch.task, batch.target, 1)
        return self._errors(predicted - wanted, wanted)

    def unrolled_errors(self, batch: Batch) -> Tensor:
        """(B,) errors, averaged over the steps that carry a gradient."""
        context, task, stepper = self.stepper.context_frames, batch.task, self.stepper
        history = noisy(
            batch,
            batch.state[:, :context],
            stepper.normalization,
            self.seed,
            largest=self.config.noise,
            clean=self.config.noise_clean,
        )
        errors: list[Tensor] = []
        for step in range(self.config.unroll_steps):
            counts = step >= self.config.pushforward_steps
            with torch.set_grad_enabled(counts and torch.is_grad_enabled()):
                predicted = stepper.predict(batch.with_state(history))
                if counts:
                    truth = batch.state[:, context + step]
                    # Relative to the true change, not to the correction of the model's own error: a poor history must
                    # not make the denominator large.
                    reference = stepper.scaled_change(batch.state[:, context + step - 1], truth, task)
                    error = predicted - stepper.scaled_change(history[:, -1], truth, task)
                    errors.append(self._errors(error, reference))
                if step + 1 < self.config.unroll_steps:
                    following = stepper.advance(history[:, -1], predicted, task)
                    history = torch.cat([history[:, 1:], following[:, None].to(history.dtype)], dim=1)
        return torch.stack(errors).mean(0)

    def _errors(self, error: Tensor, reference: Tensor) -> Tensor:
        return sample_errors(self.config.loss, error, reference, self.config.relative_floor)


class LatentOperatorStage(OperatorStage):
    """Trains the operator alone, on latents of a frozen autoencoder; the decoded fields may count too."""

    def trained_modules(self) -> list[nn.Module]:
        return [self.stepper.latent.operator]

    def forward(self, batch: Batch) -> Losses:
        """As `OperatorStage`, with the step fed by its own latents instead of re-encoded fields."""
        batch = self.prepare(batch, self.config.augment)
        pairs = self.steady_pairs(batch) if batch.task.steady else self.unrolled_pairs(batch)
        errors = {
            "latent": torch.stack([p[0] for p in pairs]).mean(0),
            "decoded": torch.stack([p[1] for p in pairs]).mean(0),
        }
        return _mean_losses(batch.task, errors, {"decoded": self.config.decode_weight})

    def steady_pairs(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """(B,) errors of the latent and of the decoded target."""
        task, stepper = batch.task, self.stepper
        given = stepper.latent.encoder(*stepper.inputs(batch.state, batch.static, task))
        target, channels = stepper.target_inputs(batch.target, task)
        wanted = stepper.latent.encoder(target, channels)
        found = self._update(given, batch)
        decoded = stepper.decode_update(found, task)
        return [(self._errors(found - wanted, wanted), self._errors(decoded - target, target))]

    def unrolled_pairs(self, batch: Batch) -> list[tuple[Tensor, Tensor]]:
        """(B,) errors of latent and decoded field for each step that carries a gradient."""
        context, task, stepper = self.stepper.context_frames, batch.task, self.stepper
        frames = range(self.config.unroll_steps + 1)
        truths = [
            stepper.latent.encoder(*stepper.inputs(batch.state[:, f : f + context], batch.static, task)) for f in frames
        ]
        ratio = stepper.normalization.update_ratio(task, truths[0])
        latent, last = truths[0], batch.state[:, context - 1]
        pairs: list[tuple[Tensor, Tensor]] = []
        for step in frames[:-1]:
            counts = step >= self.config.pushforward_steps
            with torch.set_grad_enabled(counts and torch.is_grad_enabled()):
                update = self._update(latent, batch)
                change = stepper.decode_update(update, task)
                if counts:
                    truth, before = batch.state[:, context + step], batch.state[:, context + step - 1]
                    in_latent = self._errors(
                        update - (truths[step + 1] - latent) / ratio, (truths[step + 1] - truths[step]) / ratio
                    )
                    in_fields = self._errors(
                        change - stepper.scaled_change(last, truth, task), stepper.scaled_change(before, truth, task)
                    )
                    pairs.append((in_latent, in_fields))
                latent, last = latent + ratio * update, stepper.advance(last, change, task)
        return pairs

    def _update(self, latent: Tensor, batch: Batch) -> Tensor:
        parameters = self.stepper.normalization.parameters_of(batch.task, batch.parameters)
        update: Tensor = self.stepper.latent.operator(latent, batch.task, parameters, batch.dt, batch.coordinates)
        return update


def _mean_losses(task: TaskSpec, errors: dict[str, Tensor], weights: dict[str, float] | None = None) -> Losses:
    """Sample errors (B,) by name -> their weighted sum, and a metric each."""
    means = {name: values.mean() for name, values in errors.items()}
    total = torch.stack([means[name] * (weights or {}).get(name, 1.0) for name in means]).sum()
    metrics = {f"train/{task.name}/{name}": value.detach() for name, value in means.items()}
    metrics[f"train/{task.name}/loss"] = total.detach()
    return Losses(total, metrics)


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
