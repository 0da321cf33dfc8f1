"""Small tasks of every kind, with statistics and batches, on which the models are tested."""

from __future__ import annotations

from dataclasses import replace

import torch

from ups.config.model import LatentOperatorConfig
from ups.models.build import build_model
from ups.models.constraints import wave_numbers
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.spec.statistics import Statistics
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

LINE = TaskSpec(
    "line",
    (FieldSpec("u"),),
    (AxisSpec("x"),),
    (ParameterSpec("nu", minimum=0.01, maximum=0.1, scale="log"),),
    dt=0.05,
    symmetries=("translation",),
)
PLANE = TaskSpec(
    "plane",
    (FieldSpec("height"), FieldSpec("velocity", tensor_rank=1), FieldSpec("floor", role="static")),
    (AxisSpec("x", "wall"), AxisSpec("y")),
    dt=0.1,
)
CUBE = TaskSpec("cube", (FieldSpec("u"),), tuple(AxisSpec(a) for a in "xyz"), dt=1.0, symmetries=("translation",))
STEADY = TaskSpec(
    "steady",
    (FieldSpec("a", role="static"), FieldSpec("u", role="target")),
    (AxisSpec("x", "dirichlet"), AxisSpec("y", "dirichlet")),
    (ParameterSpec("beta", minimum=0.5, maximum=2.0),),
    steady=True,
)
TASKS = (LINE, PLANE, CUBE, STEADY)
SPACE = {"line": (32,), "plane": (16, 8), "cube": (8, 8, 8), "steady": (16, 16)}
SMALL = {"width": 16, "depth": 2, "num_heads": 2, "patch_size": 4, "window_tokens": 2}
# An encoder of several blocks, whose latent is smaller than the fields.
DEEP = {"encoder_blocks": 2, "latent_channels": 3}


def statistics_of(task: TaskSpec) -> Statistics:
    """Plausible statistics with a mean far from 0 and a different size for each channel."""

    def numbers(count: int, first: float) -> tuple[float, ...]:
        return tuple(first * (1 + i) for i in range(count))

    state, static, target = (task.num_channels(r) for r in ("state", "static", "target"))
    return Statistics(
        state_mean=numbers(state, 3.0),
        state_std=numbers(state, 2.0),
        difference_mean=numbers(state, 0.0),
        difference_std=numbers(state, 0.25),
        static_mean=numbers(static, 1.0),
        static_std=numbers(static, 0.5),
        target_mean=numbers(target, -1.0),
        target_std=numbers(target, 4.0),
        parameter_mean=numbers(len(task.parameters), 0.5),
        parameter_std=numbers(len(task.parameters), 0.7),
    )


def small_model(
    context_frames: int = 1, seed: int = 0, tasks: tuple[TaskSpec, ...] = TASKS, **changes: object
) -> Stepper:
    """A model of a few thousand weights for all four tasks."""
    config = LatentOperatorConfig.model_validate({**SMALL, **changes})
    return build_model(config, tasks, {t.name: statistics_of(t) for t in tasks}, context_frames, seed)


def awake(stepper: Stepper, seed: int = 1) -> Stepper:
    """The same model with random weights everywhere: a new one has zero gates and hides what blocks do."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in stepper.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.add_(0.3 * noise.to(parameter.dtype))
    return stepper


def batch_of(
    task: TaskSpec,
    frames: int,
    samples: int = 3,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    space: tuple[int, ...] = (),
) -> Batch:
    """A batch of random fields in physical units, on the grid of `SPACE` unless one is given."""
    generator = torch.Generator().manual_seed(seed)
    space = space or SPACE[task.name]

    def fields(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, *space, generator=generator, dtype=torch.float64).to(dtype)

    return Batch(
        task=task,
        state=fields(samples, 0 if task.steady else frames, task.num_channels("state")),
        static=fields(samples, task.num_channels("static")),
        target=fields(samples, task.num_channels("target")),
        parameters=0.5 + torch.rand(samples, len(task.parameters), generator=generator, dtype=torch.float64).to(dtype),
        dt=torch.full((samples,), task.dt, dtype=dtype),
        coordinates=tuple(
            torch.arange(n, dtype=torch.float64) / n * a.extent for n, a in zip(space, task.axes, strict=True)
        ),
        numbers=torch.arange(samples) + 10,
        stage_step=7,
    )


def step(stepper: Stepper, batch: Batch) -> torch.Tensor:
    """One call of the stepper with the first frames of a batch."""
    result: torch.Tensor = stepper(batch.with_state(batch.state[:, : stepper.context_frames]))
    return result


def loss_of(stage: torch.nn.Module, batch: Batch) -> torch.Tensor:
    """The stage's loss of one batch, the mean over its samples."""
    total: torch.Tensor = stage([replace(batch, sample_weight=1 / batch.num_samples)]).total
    return total


def divergence(vectors: torch.Tensor, task: TaskSpec) -> torch.Tensor:
    """(B, A, *S) of a task whose axes are periodic -> (B, *S): the divergence, by Fourier derivatives."""
    dims = tuple(range(2, vectors.ndim))
    modes = torch.fft.rfftn(vectors, dim=dims)
    total = sum(1j * k * modes[:, axis] for axis, k in enumerate(wave_numbers(vectors, task)))
    field: torch.Tensor = torch.fft.irfftn(torch.as_tensor(total), s=vectors.shape[2:], dim=tuple(d - 1 for d in dims))
    return field
