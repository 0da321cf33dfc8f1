"""The stepper: what every user of a model calls. Physical units in, physical units out, for all tasks of the model.

It owns the meaning of a prediction. For a transient task the network's output is the change of the state over one step,
in standard deviations of increments; for a steady task it is the normalized target. The arithmetic of networks is in
multiscale.py and its neighbors, the losses are the stages'. Here are also the loop of a rollout, which feeds
predictions back for evaluation and simulator alike, and the predictors that learn nothing, which scores are held
against.

B samples, T context frames, C state channels, Cs static channels, Ct target channels, S space, P parameters.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.errors import ConfigError, DataError
from ups.models import constraints
from ups.models.grid_fit import GridFit
from ups.models.network import Network, NetworkInput, NetworkWithLatents, NetworkWithLinearPart
from ups.models.normalization import Normalization, wide
from ups.models.vocabulary import Channels, Vocabulary
from ups.spec.batch import Batch, Memo, valid_points
from ups.spec.statistics import Statistics
from ups.spec.task import TaskSpec

# The name of the network that makes the step, and of the one that steady tasks may have instead.
OPERATOR, STEADY = "operator", "steady"


class Stepper(nn.Module):
    """Networks by name and normalization of a set of tasks.

    The network `operator` makes the step; any other stands next to it, for the stages that train or use it. configs,
    tasks, statistics and context_frames rebuild it (`ups.models.build.build_model`); the state dict holds plain
    tensors.
    """

    def __init__(
        self,
        configs: Mapping[str, ModelConfig],
        networks: Mapping[str, Network],
        tasks: Sequence[TaskSpec],
        statistics: Mapping[str, Statistics],
        context_frames: int,
    ) -> None:
        super().__init__()
        self.configs = dict(configs)
        self.tasks = tuple(tasks)
        self.statistics = {t.name: statistics[t.name] for t in tasks}
        self.context_frames = context_frames
        self.networks = nn.ModuleDict(networks)
        self.normalization = Normalization(Vocabulary.of(tasks), tasks, statistics)
        self.fit = GridFit(self.config.grid_divisor)
        self._steady_fit = GridFit(self.configs[STEADY].grid_divisor) if STEADY in self.configs else self.fit
        self._conserve = self.config.conserves
        self._known = {t.name: t for t in tasks}

    @property
    def config(self) -> ModelConfig:
        """The settings of the network that makes the step."""
        return self.configs[OPERATOR]

    @property
    def network(self) -> Network:
        """The network that makes the step."""
        return cast(Network, self.networks[OPERATOR])

    def forward(self, batch: Batch) -> Tensor:
        """The next frame (B, C, *S) after the context frames in `batch.state`, or the target (B, Ct, *S) if steady."""
        return self.fields(batch, self.predict(batch))

    def fields(self, batch: Batch, prediction: Tensor) -> Tensor:
        """What a prediction (B, C, *S) means in physical units: the next frame, or the target of a steady task."""
        if batch.task.steady:
            return constraints.at_boundaries(
                self.normalization.restore("target", batch.task, prediction, 1), batch.task
            )
        return self.advance(batch.state[:, -1], prediction, batch.task)

    def predict(self, batch: Batch) -> Tensor:
        """Scaled change (B, C, *S) of the last frame, or normalized target (B, Ct, *S): what losses are taken of."""
        return self.predict_group([batch])[0]

    def predict_group(self, batches: Sequence[Batch], *, refine: bool = True) -> list[Tensor]:
        """`predict` of each task of a group, through the network at once where it can.

        refine: where the equation of a steady task is known, as many steps nearer to it as the model's settings say.
        """
        predictions: dict[int, Tensor] = {}
        for name in (OPERATOR, STEADY):
            mine = [n for n, batch in enumerate(batches) if self.network_of(batch.task) == name]
            if not mine:
                continue
            raw = cast(Network, self.networks[name]).forward_group([self.network_input(batches[n]) for n in mine])
            steps = self.configs[name].refine_steps if refine else 0
            for n, x in zip(mine, raw, strict=True):
                batch = batches[n]
                x = self.masked(self._gained(x, batch.task, batch.space), batch)
                predictions[n] = self.refined(batch, x, steps) if steps and batch.task.residual else x
        return [predictions[n] for n in range(len(batches))]

    def refined(self, batch: Batch, prediction: Tensor, num_steps: int) -> Tensor:
        """The normalized target (B, Ct, *S) of a steady task after steps of its solver."""
        solution = self.normalization.restore("target", batch.task, prediction, 1)
        return self.normalization.normalize("target", batch.task, constraints.refined(batch, solution, num_steps), 1)

    def network_of(self, task: TaskSpec) -> str:
        """The name of the network that predicts a task: steady ones may have one of their own."""
        return STEADY if task.steady and STEADY in self.networks else OPERATOR

    def network_input(self, batch: Batch) -> NetworkInput:
        """The samples as the network gets them. Raises DataError for a task that it was not built for."""
        memo, task = batch.memo or Memo(), batch.task
        lasting = memo.once("input", lambda: self._lasting_input(batch, memo))
        fields, channels = self.inputs(batch.state, batch.static, task, memo)
        return lasting(fields=self._fit_of(task).onto(fields, task), channels=channels, noise=batch.noise)

    def _lasting_input(self, batch: Batch, memo: Memo) -> Callable[..., NetworkInput]:
        """What the state does not change of the input of a network."""
        self._check(batch)
        task = batch.task
        return functools.partial(
            NetworkInput,
            task=task,
            outputs=task.channel_names(task.predicted),
            parameters=self.normalization.parameters_of(task, batch.parameters),
            relative_parameters=self.normalization.relative_parameters(task, batch.parameters),
            dt=batch.dt,
            coordinates=self._fit_of(task).coordinates(batch.coordinates, task),
            change_gain=self.normalization.change_gain(task, wide(batch.static if task.steady else batch.state)),
            spans_sizes=self.statistics[task.name].spans_sizes,
            memo=memo,
        )

    def _fit_of(self, task: TaskSpec) -> GridFit:
        return self.fit if self.network_of(task) == OPERATOR else self._steady_fit

    def encode(self, fields: Tensor, channels: Channels, task: TaskSpec) -> Tensor:
        """Normalized fields (B, F, *S) -> latent."""
        latent: Tensor = self.latent.encoder(self.fit.onto(fields, task), channels, task)
        return latent

    def decode(self, latent: Tensor, names: Sequence[str], task: TaskSpec, space: Sequence[int]) -> Tensor:
        """Latent -> normalized fields (B, C, *S), one channel per name."""
        return self.fit.back(self.latent.decoder(latent, names, task), task, space)

    def decode_update(self, update: Tensor, task: TaskSpec, space: Sequence[int]) -> Tensor:
        """Update of the latent (B, *N, D) -> what `predict` returns."""
        outputs = task.channel_names(task.predicted)
        return self._gained(self.latent.decoder(update, outputs, task), task, space)

    def _gained(self, raw: Tensor, task: TaskSpec, space: Sequence[int]) -> Tensor:
        x = self._fit_of(task).back(wide(raw), task, space)
        if cast(Network, self.networks[self.network_of(task)]).predicts_update:
            x = x * self.normalization.channel_gain(task, x)
        return self.constrained(x, task)

    def constrained(self, prediction: Tensor, task: TaskSpec) -> Tensor:
        """A scaled change (B, C, *S) with what the task says of changes; the target of a steady task as it is."""
        x = prediction
        if self.config.removes_unseen_waves:
            x = constraints.without_shortest_waves(x, self.statistics[task.name].smooth_from)
        if task.divergence_free:
            x = constraints.without_divergence(x, self.normalization.change_scale(task, x), task)
        return constraints.conserving(x, task) if self._conserve and not task.mask else x

    def masked(self, prediction: Tensor, batch: Batch) -> Tensor:
        """A prediction that keeps holes at 0, and conserves what it should in the rest."""
        valid, task = batch.valid, batch.task
        if valid is None:
            return prediction
        if task.steady:
            nothing = self.normalization.normalize("target", task, torch.zeros_like(prediction), 1)
            return prediction.where(valid > 0, nothing)
        change = prediction * valid
        if not self._conserve:
            return change
        share = valid.flatten(1).mean(1).reshape(-1, *[1] * (valid.ndim - 1)).clamp_min(1e-9)
        return change - valid * (change - constraints.conserving(change, task)) / share

    def advance(self, last: Tensor, change: Tensor, task: TaskSpec) -> Tensor:
        """last (B, C, *S) physical, change (B, C, *S) scaled -> the next frame, physical."""
        x = wide(last)
        following = torch.addcmul(x, change, self.normalization.change_scale(task, x))
        return constraints.at_boundaries(constraints.not_negative(following, task, conserve=self._conserve), task)

    def scaled_change(self, last: Tensor, following: Tensor, task: TaskSpec) -> Tensor:
        """Inverse of `advance`: two frames (B, C, *S) -> the scaled change between them."""
        difference = wide(following) - wide(last)
        return difference / self.normalization.change_scale(task, difference)

    def inputs(
        self, state: Tensor, static: Tensor, task: TaskSpec, memo: Memo | None = None
    ) -> tuple[Tensor, Channels]:
        """Context frames and static fields as one normalized tensor (B, T * C + Cs, *S), and what its channels are."""
        memo = memo or Memo()
        parts = []
        if static.shape[1] or task.steady:
            parts.append(memo.once("static", lambda: self.normalization.normalize("static", task, static, 1)))
        if not task.steady:
            given = self.normalization.normalize("state", task, state, 2)
            valid = valid_points(task, static)
            parts.append((given if valid is None else given * valid[:, None]).flatten(1, 2))
        fields = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return fields, memo.once("channels", lambda: self._channels(task))

    def _channels(self, task: TaskSpec) -> Channels:
        names = list(task.channel_names("static"))
        slots = [self.context_frames - 1] * len(names)
        for frame in range(0 if task.steady else self.context_frames):
            names += task.channel_names("state")
            slots += [frame] * task.num_channels("state")
        return Channels(tuple(names), tuple(slots))

    def target_inputs(self, target: Tensor, task: TaskSpec) -> tuple[Tensor, Channels]:
        """The target (B, Ct, *S) of a steady task as the encoder takes fields: what a latent of it is made from."""
        names = task.channel_names("target")
        fields = self.normalization.normalize("target", task, target, 1)
        return fields, Channels(names, (self.context_frames - 1,) * len(names))

    @property
    def latent(self) -> NetworkWithLatents:
        """The network, for stages that work on its latents. Raises ConfigError for a network without."""
        if not isinstance(self.network, NetworkWithLatents):
            raise ConfigError(
                f"model type '{self.config.type}' has no latents to train on",
                hint="use model.type latent_operator, or an operator stage in physical space",
            )
        return self.network

    @property
    def linear(self) -> NetworkWithLinearPart:
        """The network, for a stage that fits its linear part. Raises ConfigError for a network without."""
        if not isinstance(self.network, NetworkWithLinearPart) or not self.config.has_linear_part:
            raise ConfigError(
                f"model type '{self.config.type}' has no linear part to fit",
                hint="use model.type multiscale with its propagator, or leave this stage out",
            )
        return self.network

    def fix_weights(self, fixed: bool = True) -> None:
        """Whether the weights of all networks stay as they are from now on (`Network.fix_weights`)."""
        for network in self.networks.values():
            cast(Network, network).fix_weights(fixed)

    def shard_units(self) -> list[nn.Module]:
        """The modules of all networks to shard, recompute or compile one by one."""
        return [unit for network in self.networks.values() for unit in cast(Network, network).shard_units()]

    def matrices(self) -> list[nn.Parameter]:
        """Parameters of all networks whose updates Muon may orthogonalize."""
        return [matrix for network in self.networks.values() for matrix in cast(Network, network).matrices()]

    def _check(self, batch: Batch) -> None:
        task, state = batch.task, batch.state
        known = self._known.get(task.name)
        if known is None:
            raise DataError(
                f"the model does not know task '{task.name}'; it was built for {', '.join(self._known)}",
                hint="use a model that was trained on this task",
            )
        if known is not task and _interface(known) != _interface(task):
            raise DataError(
                f"task '{task.name}' has another dt, or other fields, axes, boundaries or parameters, than the one the "
                "model was built for",
                hint="use the specification that is stored with the model",
            )
        counted = (
            ("static channels", task.num_channels("static"), batch.static.shape[1]),
            ("state channels", task.num_channels("state"), state.shape[2]),
            ("parameters", len(task.parameters), batch.parameters.shape[1]),
        )
        for what, expected, given in counted:
            if given != expected:
                raise DataError(f"task '{task.name}' has {expected} {what}, not {given}")
        space = tuple((batch.static if task.steady else state).shape[2 if task.steady else 3 :])
        if space != batch.space:
            raise DataError(f"fields of task '{task.name}' have {space} points, and their coordinates {batch.space}")
        if not task.steady and state.shape[1] != self.context_frames:
            raise DataError(
                f"the model sees {self.context_frames} context frames, not {state.shape[1]}",
                hint="give it the last frames of the trajectory, oldest first",
            )


def _interface(task: TaskSpec) -> tuple[object, ...]:
    """What a model was built for. dt is the unit of its steps; boundaries and `translation` choose rows of weights."""
    axes = tuple((a.name, a.boundary) for a in task.axes)
    return (task.fields, axes, task.parameters, task.steady, task.dt, "translation" in task.symmetries)


# In front of a name: the kind of entry of a checkpoint, and the stepper inside a stage.
_WHERE = r"^((?:[a-z]+/)?(?:stepper\.)?)"
_PRESENT = re.compile(_WHERE + r"networks\.operator\.")
_FORMER = re.compile(_WHERE + r"network\.")


def former_name(name: str) -> str:
    """The name that a tensor of today had; the same if it had no other."""
    return _PRESENT.sub(r"\1network.", name)


def present_name(name: str) -> str:
    """The name that a stored tensor has today; the same if it was never called otherwise."""
    return _FORMER.sub(r"\1networks.operator.", name)


# From the given frames (B, T, C, *S) in `batch.state` to the next one (B, C, *S), or to the target of a steady task, in
# physical units. A stepper is one, and so is each reference.
Predictor = Callable[[Batch], Tensor]


def rollout(predictor: Predictor, batch: Batch, num_steps: int) -> Iterator[Tensor]:
    """Yields (B, C, *S) for each of `num_steps` steps after the frames in `batch.state`; once for a steady task.

    `batch.stage_step` counts the steps, for a predictor that draws.
    """
    if batch.task.steady:
        yield predictor(batch)
        return
    batch = replace(batch, memo=Memo())
    for _ in range(num_steps):
        frame = predictor(batch)
        yield frame
        batch = replace(batch, state=following(batch.state, frame), stage_step=batch.stage_step + 1)


def following(state: Tensor, frame: Tensor) -> Tensor:
    """Context frames (B, T, C, *S) and the next frame -> the context of the step after it; none if steady."""
    if not state.shape[1]:
        return state
    # With one context frame there is nothing to join, and so nothing to copy.
    return frame[:, None] if state.shape[1] == 1 else torch.cat([state[:, 1:], frame[:, None]], dim=1)


def persistence(batch: Batch) -> Tensor:
    """Nothing changes: the next frame (B, C, *S) is the last one given."""
    return batch.state[:, -1]


def linear_extrapolation(batch: Batch) -> Tensor:
    """The last change continues: 2 u(t) - u(t - dt). Needs two given frames; with one it is persistence."""
    state = batch.state
    return state[:, -1] if state.shape[1] < 2 else 2 * state[:, -1] - state[:, -2]


class TrainingMean:
    """The mean frame of the train split, point by point: the least that a steady task's model must beat.

    mean_fields: task name -> (C, *S), on the grid of the data (see `ups.evaluation.rollout.mean_field`).
    """

    def __init__(self, mean_fields: dict[str, Tensor]) -> None:
        self.mean_fields = mean_fields

    def __call__(self, batch: Batch) -> Tensor:
        mean = self.mean_fields[batch.task.name].to(device=batch.dt.device, dtype=batch.dt.dtype)
        return mean[None].expand(batch.num_samples, *mean.shape)
