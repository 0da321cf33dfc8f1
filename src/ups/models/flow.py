"""The corrector of kind `flow`: a network that samples the residual of the frozen operator.

What is left over is the residual: truth less prediction, in the units of predictions (scaled changes, or a steady
task's normalized target), divided by its usual size, a number for each channel that the stage measures before it
trains. A draw begins as white noise x at time 0 and follows the velocity that the network gives to time 1.

The network may be of any type. It is built for tasks that have two more given fields for each predicted one (what the
operator predicts, and x) and one more parameter (the time), so that nothing in it has to know what it is used for.

B samples, T frames, C predicted channels, Cs static channels, S space.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.errors import ConfigError
from ups.models.grid_fit import GridFit
from ups.models.network import Network, NetworkInput
from ups.models.normalization import Constants, keyed_normal, wide
from ups.models.stepper import Stepper
from ups.models.vocabulary import Channels
from ups.models.warm_start import NamedRows, UnitChange
from ups.spec.batch import Batch
from ups.spec.keyed import key_of
from ups.spec.task import FieldSpec, ParameterSpec, TaskSpec

# Names of networks next to the operator: the flow, and its student, which needs one evaluation.
FLOW, STUDENT = "flow", "student"
# Of Heun's method, two evaluations each but for the last.
STEPS = 4
_TIME = "flow_time"
# What the parts of a name are for, where it has room for them.
_PREDICTED, _NOISY, _LONGEST = "predicted.", "noisy.", 50
# Settings that make sense for a step and not for a velocity, whose size does not depend on that of the fields.
_OFF: Mapping[str, object] = {"amplitude": False, "propagator": False, "noise_size": 0, "conserve": False}


@dataclass(frozen=True)
class PredictedStep:
    """A step to correct: the batch with its given frames, and what the operator predicts for it, (B, C, *S)."""

    batch: Batch
    predicted: Tensor


class FlowNetwork(Network):
    """The velocity of draws, by a network for the tasks of `flow_task`. scale (rows,): usual size of each residual."""

    def __init__(self, inner: Network, config: ModelConfig, tasks: Sequence[TaskSpec]) -> None:
        super().__init__()
        self.inner = inner
        self.fit = GridFit(config.grid_divisor)
        self._tasks = {task.name: flow_task(task) for task in tasks}
        self._constants = Constants()
        self.row_names = [(t.name, c) for t in tasks for c in t.channel_names(t.predicted)]
        # A parameter, so that checkpoints hold it; no stage asks for its gradient. 1 until it is measured.
        self.scale = nn.Parameter(torch.ones(len(self.row_names)), requires_grad=False)

    def forward(self, given: NetworkInput) -> Tensor:
        """(B, C, *S): the velocity, from what `network_input` makes."""
        return self.forward_group([given])[0]

    def forward_group(self, group: Sequence[NetworkInput]) -> list[Tensor]:
        """`forward` of each task of a group, through the network at once where it can."""
        return self.inner.forward_group(group)

    def change_units(self, changes: Mapping[str, UnitChange], taken: Collection[str]) -> bool:
        """Of the network inside."""
        return self.inner.change_units(changes, {name.removeprefix("inner.") for name in taken})

    def velocities(
        self, stepper: Stepper, steps: Sequence[PredictedStep], x: Sequence[Tensor], t: Sequence[Tensor]
    ) -> list[Tensor]:
        """The velocity (B, C, *S) of each draw x (B, C, *S) at its time t (B,)."""
        group = [self.network_input(stepper, *each) for each in zip(steps, x, t, strict=True)]
        raw = self.forward_group(group)
        return [self.fit.back(wide(v), s.batch.task, s.batch.space) for v, s in zip(raw, steps, strict=True)]

    def network_input(self, stepper: Stepper, step: PredictedStep, x: Tensor, t: Tensor) -> NetworkInput:
        """What the network gets of a draw."""
        batch = step.batch
        task, num_static = batch.task, batch.task.num_channels("static")
        fields, channels = stepper.inputs(batch.state, batch.static, task)
        added = self._tasks[task.name].channel_names("static")[num_static:]
        names = (*channels.names[:num_static], *added, *channels.names[num_static:])
        slots = (*channels.slots[:num_static], *[stepper.context_frames - 1] * len(added), *channels.slots[num_static:])
        parts = [fields[:, :num_static], step.predicted.to(fields), x.to(fields), fields[:, num_static:]]
        time = wide(t)[:, None]
        return NetworkInput(
            task=self._tasks[task.name],
            fields=self.fit.onto(torch.cat(parts, dim=1), task),
            channels=Channels(names, slots),
            outputs=task.channel_names(task.predicted),
            parameters=torch.cat([stepper.normalization.parameters_of(task, batch.parameters), 2 * time - 1], dim=1),
            relative_parameters=torch.cat(
                [stepper.normalization.relative_parameters(task, batch.parameters), time], dim=1
            ),
            dt=batch.dt,
            coordinates=self.fit.coordinates(batch.coordinates, task),
            change_gain=fields.new_ones(task.num_channels(task.predicted)),
        )

    def size(self, task: TaskSpec, like: Tensor) -> Tensor:
        """(C, 1, ...): the usual size of a residual, in the units of predictions."""
        rows = self._constants.index(
            lambda: [n for n, name in enumerate(self.row_names) if name[0] == task.name], task.name, like.device
        )
        return self.scale[rows].to(like.dtype).reshape(-1, *[1] * task.num_spatial_dims)

    def is_trained(self, task: TaskSpec | None = None) -> bool:
        """Whether a stage has measured residuals (of a task), as it does before it trains. Collective if sharded."""
        scale = self.whole_scale()
        rows = [n for n, name in enumerate(self.row_names) if task is None or name[0] == task.name]
        return bool((scale[rows] != 1).any())

    def whole_scale(self) -> Tensor:
        """(rows,), also where a rank holds a part of it. Collective then."""
        return whole(self.scale)

    def scale_without(self, tasks: Sequence[str]) -> Tensor:
        """(rows,): as it is, and as if residuals of these tasks had never been measured."""
        known = [name[0] not in tasks for name in self.row_names]
        scale = self.whole_scale()
        return torch.where(torch.tensor(known, device=scale.device), scale, 1.0)

    def shard_units(self) -> list[nn.Module]:
        """The modules to shard, recompute or compile one by one."""
        return self.inner.shard_units()

    def matrices(self) -> list[nn.Parameter]:
        """Parameters whose updates Muon may orthogonalize."""
        return self.inner.matrices()

    def fix_weights(self, fixed: bool = True) -> None:
        """Whether weights stay as they are from now on."""
        self.inner.fix_weights(fixed)

    def named_rows(self) -> dict[str, NamedRows]:
        """The rows of all tables."""
        rows = {f"inner.{name}": found for name, found in self.inner.named_rows().items()}
        return rows | {"scale": NamedRows(0, tuple("/".join(name) for name in self.row_names))}

    def borrowed_rows(self, task: TaskSpec, like: TaskSpec) -> dict[str, dict[str, str | None]]:
        """Those of the network inside."""
        found = self.inner.borrowed_rows(flow_task(task), flow_task(like))
        return {f"inner.{name}": rows for name, rows in found.items()}

    def fitted(self, source: Network, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Those of another flow, as far as the networks in both fit."""
        if not isinstance(source, FlowNetwork):
            return {}
        inside = {n.removeprefix("inner."): w for n, w in weights.items() if n.startswith("inner.")}
        fitted = {f"inner.{n}": w for n, w in self.inner.fitted(source.inner, inside).items()}
        # Without weights that were trained in these units, a size would say that there are some.
        own = {name: weight.shape for name, weight in self.inner.named_parameters()}
        tables = self.inner.named_rows()
        fits = all(
            f"inner.{n}" in fitted and (n in tables or fitted[f"inner.{n}"].shape == shape) for n, shape in own.items()
        )
        return fitted | ({"scale": weights["scale"]} if fits else {})


def whole(parameter: Tensor) -> Tensor:
    """A parameter without a graph, also where a rank holds a part of it. Collective then."""
    values = parameter.detach()
    # Not by its class: that import would double the time in which a simulator is loaded.
    gather = getattr(values, "full_tensor", None)
    return values if gather is None else gather()


def flow_task(task: TaskSpec) -> TaskSpec:
    """The task as the network of a flow has it: what is predicted, and the draw, are given fields; time a parameter."""
    added = [
        FieldSpec(
            prefix + (field.name if len(field.name) <= _LONGEST else f"field-{number}"),
            "static",
            "1",
            field.tensor_rank,
        )
        for prefix in (_PREDICTED, _NOISY)
        for number, field in enumerate(task.fields_of(task.predicted))
    ]
    time = ParameterSpec(_TIME, minimum=0.0, maximum=1.0)
    return replace(task, fields=(*task.fields, *added), parameters=(*task.parameters, time))


def flow_settings(config: ModelConfig) -> ModelConfig:
    """The settings of the network in a flow: without what makes sense for a step only."""
    return config.model_copy(update={name: value for name, value in _OFF.items() if name in type(config).model_fields})


def noise_of(batch: Batch, seed: int, member: int, step: int = 0) -> Tensor:
    """(B, C, *S) white noise, the start of a draw: a function of seed, task, step, sample and member.

    step: inside of a training sample; `batch.stage_step` counts optimizer steps, or those of a rollout.
    """
    task = batch.task
    channels = task.num_channels(task.predicted)
    key = key_of(seed, "draw", member, task.name, batch.stage_step, step)
    count = channels * int(np.prod(batch.space))
    return keyed_normal(key, batch.numbers.numpy(), count, batch.dt).reshape(-1, channels, *batch.space)


Velocity = Callable[[list[Tensor], float], list[Tensor]]


def heun(velocity: Velocity, x: list[Tensor], num_steps: int = STEPS) -> list[Tensor]:
    """Follow a velocity from time 0 to 1 in equal steps of second order.

    The last one is Euler's: at time 1 the velocity of a draw is known least.
    """
    size = 1.0 / num_steps
    for number in range(num_steps):
        first = velocity(x, number * size)
        guess = [a + size * v for a, v in zip(x, first, strict=True)]
        if number + 1 == num_steps:
            return guess
        second = velocity(guess, (number + 1) * size)
        x = [a + 0.5 * size * (v + w) for a, v, w in zip(x, first, second, strict=True)]
    return x


def endpoints(
    stepper: Stepper, network: FlowNetwork, steps: Sequence[PredictedStep], x: list[Tensor], num_steps: int
) -> list[Tensor]:
    """What the draws that begin as x (B, C, *S) end as, in usual residuals."""

    def velocity(now: list[Tensor], time: float) -> list[Tensor]:
        times = [torch.full_like(step.batch.dt, time) for step in steps]
        return network.velocities(stepper, steps, now, times)

    return heun(velocity, x, num_steps)


def corrected(stepper: Stepper, name: str, step: PredictedStep, noise: Tensor) -> Tensor:
    """The prediction (B, C, *S) of a step with a draw of its residual, by the corrector or by its student."""
    network = flow_of(stepper, name)
    num_steps = 1 if name == STUDENT else STEPS
    (drawn,) = endpoints(stepper, network, [step], [noise], num_steps)
    task = step.batch.task
    return stepper.masked(stepper.constrained(step.predicted + drawn * network.size(task, drawn), task), step.batch)


def flow_of(stepper: Stepper, name: str) -> FlowNetwork:
    """The network of that name, which is one of a flow."""
    network = stepper.networks[name]
    assert isinstance(network, FlowNetwork)  # `build_model` makes no other under these names
    return network


def corrector_of(stepper: Stepper, task: TaskSpec) -> str:
    """`trained_flow` of a task. Raises ConfigError where there is none."""
    name = trained_flow(stepper, task)
    if not name:
        raise ConfigError(
            f"the corrector of this model was not trained on task '{task.name}': it has no members",
            hint="leave members out for this task, or train it on: stage corrector (docs/stages.md)",
        )
    return name


def trained_flow(stepper: Stepper, task: TaskSpec | None = None) -> str:
    """The name of the network that corrects: the student if there is one, else the corrector, '' if none is trained.

    task: on which it must have been trained.
    """
    for name in (STUDENT, FLOW):
        if name in stepper.networks and flow_of(stepper, name).is_trained(task):
            return name
    return ""
