"""`Simulator.module`: the simulator as a torch module in physical units, through which gradients flow.

For inverse problems, control and assimilation. It checks shapes and names, and leaves to `Simulator.rollout` what needs
numbers on the host: finite values, ranges, coordinates, warnings.

B samples, T context frames, C state channels, Cs static channels, Ct target channels, S space, P parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ups.errors import BundleError, DataError
from ups.inference.bundle import BundleInfo
from ups.inference.domain import fit_domain
from ups.inference.inputs import suggestion
from ups.models.grid_fit import Resampling
from ups.models.rollout import rollout
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec

Parameters = Mapping[str, Tensor | float] | Tensor


class SimulatorModule(nn.Module):
    """A differentiable rollout. Its weights ask for no gradient (`requires_grad_()` changes that, to fine-tune them).

    `module.double()` makes it compute in float64.
    """

    def __init__(self, stepper: Stepper, info: BundleInfo) -> None:
        super().__init__()
        self.stepper = stepper
        self._tasks = {task.name: task for task in info.tasks}
        self._grids = dict(info.coordinates)

    def forward(
        self,
        state: Tensor | None = None,
        parameters: Parameters | None = None,
        static: Tensor | None = None,
        steps: int = 1,
        *,
        task: str | None = None,
    ) -> Tensor:
        """The next `steps` frames (B, steps, C, *S); of a steady task the solution (B, Ct, *S).

        state: (B, C, *S), or (B, T, C, *S) where the model takes several frames, oldest first. parameters: name ->
        number, tensor () or tensor (B,); or one tensor (B, P) in the order of the task. static: (B, Cs, *S). The grid
        covers the trained domain; another number of points is resampled, or refused, as in `Simulator.rollout`. task:
        which one, where the simulator knows several. Raises BundleError.
        """
        spec = self._task(task)
        if steps < 1 or (spec.steady and steps != 1):
            raise BundleError(f"task '{spec.name}' cannot be rolled out for {steps} steps")
        batch, resampling = self._batch(spec, state, parameters, static)
        try:
            frames = [resampling.back(frame, spec.predicted) for frame in rollout(self.stepper, batch, steps)]
        except DataError as error:
            raise BundleError(error.message, hint=error.hint) from error
        return frames[0] if spec.steady else torch.stack(frames, dim=1)

    def _task(self, name: str | None) -> TaskSpec:
        if name is None and len(self._tasks) == 1:
            return next(iter(self._tasks.values()))
        if name not in self._tasks:
            known = list(self._tasks)
            what = f"no task '{name}'{suggestion(name, known)}" if name else "several tasks"
            raise BundleError(f"this simulator has {what}", hint=f"say which: task= one of {', '.join(known)}")
        return self._tasks[name]

    def _batch(
        self, task: TaskSpec, state: Tensor | None, parameters: Parameters | None, static: Tensor | None
    ) -> tuple[Batch, Resampling]:
        dims, context = task.num_spatial_dims, self.stepper.context_frames
        given: list[Tensor] = []
        for name, part in (("state", state), ("static", static)):
            wanted = bool(task.fields_of("state" if name == "state" else "static"))
            if (part is not None) != wanted:
                needs = "needs" if wanted else "has no"
                raise BundleError(f"task '{task.name}' {needs} {name} fields", hint=_shapes(task, context))
            if part is not None:
                several = name == "state" and context > 1
                if part.ndim != dims + 2 + several:
                    raise BundleError(f"{name} has shape {tuple(part.shape)}", hint=_shapes(task, context))
                given.append(part[:, None] if name == "state" and not several else part)
        space, num_samples, like = given[0].shape[-dims:], given[0].shape[0], self._like()
        if any(part.shape[-dims:] != space or part.shape[0] != num_samples for part in given):
            raise BundleError("state and static differ in samples or grid", hint=_shapes(task, context))
        domain = fit_domain(task, self._grids[task.name], tuple(space), {}, rescale=False)
        resampling = domain.resampling
        none = like.new_zeros(num_samples, 0, *resampling.trained)
        batch = Batch(
            task=task,
            state=none[:, None] if state is None else resampling.onto(given[0].to(like), "state"),
            static=none if static is None else resampling.onto(given[-1].to(like), "static"),
            target=none,
            parameters=_parameters(task, parameters, num_samples, like),
            dt=like.new_full((num_samples,), task.dt),
            coordinates=tuple(torch.from_numpy(c.copy()).to(like) for c in domain.trained),
            numbers=torch.arange(num_samples),
        )
        return batch, resampling

    def _like(self) -> Tensor:
        return next(self.stepper.parameters()).detach()


def _shapes(task: TaskSpec, context: int) -> str:
    space = ", ".join(axis.name for axis in task.axes)
    frames = f"{context} frames, " if context > 1 else ""
    parts = [f"state (samples, {frames}{task.num_channels('state')}, {space})"] if not task.steady else []
    if task.fields_of("static"):
        parts.append(f"static (samples, {task.num_channels('static')}, {space})")
    return "give " + " and ".join(parts)


def _parameters(task: TaskSpec, parameters: Parameters | None, num_samples: int, like: Tensor) -> Tensor:
    """(B, P), still connected to what was given."""
    names = [p.name for p in task.parameters]
    if isinstance(parameters, Tensor):
        if parameters.shape != (num_samples, len(names)):
            raise BundleError(
                f"parameters have shape {tuple(parameters.shape)}; expected ({num_samples}, {len(names)})",
                hint=f"one column for each of {', '.join(names) or 'none'}, or a dict by name",
            )
        return parameters.to(like)
    values = parameters or {}
    for name in values:
        if name not in names:
            raise BundleError(
                f"task '{task.name}' has no parameter '{name}'{suggestion(name, names)}",
                hint=f"its parameters are {', '.join(names) or 'none'}",
            )
    columns = []
    for name in names:
        if name not in values:
            raise BundleError(f"parameter '{name}' of task '{task.name}' is missing")
        column = torch.as_tensor(values[name]).to(like)
        if column.shape not in ((), (num_samples,)):
            raise BundleError(
                f"parameter '{name}' has shape {tuple(column.shape)}; expected one number or {num_samples}"
            )
        columns.append(column.expand(num_samples))
    return torch.stack(columns, dim=1) if columns else like.new_zeros(num_samples, 0)
