"""`ups.Simulator`: load a bundle, step it, roll it out; results are xarray datasets with names, units and time.

Deterministic: the same bundle, input, seed, device and thread count give the same numbers. What a result cannot be
trusted for is part of it, for each sample (`ups.inference.trust`); another domain than the trained one is refused
(`ups.inference.domain`).

`Simulator.module` is the simulator as a torch module in physical units, through which gradients flow: for inverse
problems, control and assimilation. It checks shapes and names, and leaves to `Simulator.rollout` what needs numbers on
the host: finite values, ranges, coordinates, warnings.

B samples, T context frames, C state channels, Cs static channels, Ct target channels, S space, P parameters.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ups.errors import BundleError, DataError
from ups.inference.bundle import Bundle, BundleInfo, load_bundle
from ups.inference.calibration import Quantities, Watch
from ups.inference.domain import fit_domain, is_dataset
from ups.inference.fit import ERROR_LEVEL, INITIAL_STATE, Fit, Problem, fit
from ups.inference.hub import local_bundle
from ups.inference.inputs import Start, check_parameters, read_start, suggestion
from ups.inference.onnx_steps import OnnxSteps, check_runtime
from ups.inference.query import Interpolant, query_result
from ups.inference.results import Layout, Sink, open_sink
from ups.inference.stored_scores import bundle_warnings
from ups.inference.trust import judge
from ups.models.ensemble import has_members, members_of
from ups.models.error_model import Watched
from ups.models.grid_fit import Resampling
from ups.models.stepper import Predictor, Stepper, rollout
from ups.record.text import html_table
from ups.spec.batch import Batch
from ups.spec.task import TaskSpec

Parameters = Mapping[str, Tensor | float] | Tensor
MAX_STEPS = 10**8
# Steps whose frames are looked at together.
MAX_AT_ONCE, BYTES_AT_ONCE = 16, 4 * 2**20
ON_DOUBT = ("warn", "stop", "ignore")
MAX_MEMBERS = 10_000
MAX_SEED = 2**63 - 1


class BundleWarning(UserWarning):
    """A bundle that was loaded is not better than a baseline, or its training was too short."""


class Simulator:
    """A trained simulator. Make one with `Simulator.load(path)`."""

    def __init__(self, bundle: Bundle, device: torch.device, runtime: str = "eager") -> None:
        self._bundle = bundle
        self._exported = None if runtime == "eager" else OnnxSteps(bundle, choose=runtime == "auto")
        self._stepper = bundle.stepper
        self._stepper.fix_weights()
        self._watched = Watched(self._stepper)
        self._device = device

    @classmethod
    def load(cls, path: str | Path, device: str = "auto", runtime: str = "eager") -> Self:
        """Load a bundle: a directory (or the run that has it), the name of a shipped model (`ups models`), or
        `hf://OWNER/NAME@REVISION` on the Hugging Face Hub.

        A directory is preferred to a name. device: 'auto' (CUDA where there is one), 'cpu', 'cuda' or 'cuda:N'.
        runtime: of rollouts: 'eager' torch; 'onnx' for onnxruntime on the CPU, which exports a task where that was not
        done; 'auto' for onnxruntime where there is an export and it is faster (docs/export.md).
        Warns (`BundleWarning`) of a bundle that is not better than a baseline.
        """
        chosen = check_runtime(runtime, _device("cpu" if runtime == "onnx" and device == "auto" else device))
        bundle = load_bundle(local_bundle(path), chosen)
        for text in bundle_warnings(bundle.info.scores, bundle.info.provenance):
            warnings.warn(f"{path}: {text}", BundleWarning, stacklevel=2)
        return cls(bundle, chosen, runtime)

    @property
    def tasks(self) -> dict[str, TaskSpec]:
        """What it can simulate, by name: fields, axes, parameters with their trained ranges, time step."""
        return {t.name: t for t in self._bundle.info.tasks}

    @property
    def card(self) -> str:
        """The bundle's card: trained on what, scores, known limits (Markdown)."""
        return (self._bundle.path / "card.md").read_text(encoding="utf-8")

    @property
    def context_frames(self) -> int:
        """Frames that have to be given before the first step."""
        return self._bundle.info.context_frames

    @functools.cached_property
    def is_ensemble(self) -> bool:
        """Whether it was trained as an ensemble: `rollout(members=...)` then gives members that differ."""
        return has_members(self._stepper)

    @functools.cached_property
    def module(self) -> SimulatorModule:
        """The differentiable torch module, in physical units: gradients with respect to state and parameters.

        It has its own copy of the weights: what is done to it (`double()`, fine-tuning) does not change this simulator.
        """
        with torch.inference_mode(False):  # else no gradient could ever flow through the copy
            stepper = copy.deepcopy(self._stepper)
        stepper.fix_weights(False)
        return SimulatorModule(stepper, self._bundle.info)

    def __repr__(self) -> str:
        return f"Simulator(tasks={list(self.tasks)}, bundle={self._bundle.hash[:12]}, device={self._device})"

    def _repr_html_(self) -> str:
        """What a notebook shows: a row for each task, and what speaks against the bundle."""
        rows = []
        for name, task in self.tasks.items():
            parameters = ", ".join(f"{p.name} {p.minimum:g} to {p.maximum:g}" for p in task.parameters)
            fields = ", ".join(f"{f.name} ({f.role})" for f in task.fields)
            grid = " x ".join(map(str, self._bundle.info.space(name)))
            stated = "yes" if name in self._bundle.calibrations else "no"
            rows.append([name, fields, grid, "steady" if task.steady else f"{task.dt:g}", parameters, stated])
        head = ("task", "fields", "grid", "time step", "parameters", "error bars")
        warned = bundle_warnings(self._bundle.info.scores, self._bundle.info.provenance)
        return html_table(". ".join([f"Simulator, bundle {self._bundle.hash[:12]}", *warned]), head, rows)

    def task(self, name: str | None) -> TaskSpec:
        """The task of that name, or the only one."""
        return find_task(self.tasks, name)

    def coordinates(self, task: str) -> tuple[Any, ...]:
        """The grid that a task was trained on, one (n,) for each axis."""
        return self._bundle.info.coordinates[task]

    def step(
        self,
        state: Any = None,
        parameters: Any = None,
        *,
        task: str | None = None,
        static: Any = None,
        coordinates: Any = None,
        rescale_domain: bool = False,
    ) -> Any:
        """One step from `state` (or the solution of a steady task): an xarray.Dataset with one frame."""
        return self.rollout(
            state, 1, parameters, task=task, static=static, coordinates=coordinates, rescale_domain=rescale_domain
        )

    def rollout(
        self,
        state: Any = None,
        steps: int = 1,
        parameters: Any = None,
        *,
        task: str | None = None,
        static: Any = None,
        coordinates: Any = None,
        rescale_domain: bool = False,
        dt: float | None = None,
        time: float | None = None,
        every: int = 1,
        members: int | None = None,
        seed: int = 0,
        out: str | Path | None = None,
        reversed_axes: bool = False,
        level: float | None = None,
        quantities: Quantities | None = None,
        on_doubt: str = "warn",
        progress: Callable[[int], None] | None = None,
    ) -> Any:
        """Roll out `steps` steps and keep every `every`-th frame: an xarray.Dataset.

        state: what is given, as an array (channels, *space), a dict of fields, or an xarray.Dataset; with a sample axis
        in front for several at once. parameters: dict of numbers, or of one number per sample. static: given fields.
        coordinates: axis -> values, for inputs that are not of xarray; without any the trained domain is assumed.
        rescale_domain: map a domain of another length or origin to the trained one instead of refusing it.
        dt: the time step, for a task that was trained with different ones; without it the usual one is taken.
        time: of the last given frame, for inputs that are not of xarray; without it the result's time starts at 0.
        members: of a simulator that is an ensemble, so many trajectories of each sample, along an axis `member`: where
        they differ, the future is not known. Without it the one trajectory whose noise is zero, which is the same
        each time and no mean of the members. seed: of the noise; equal seeds give equal members, and a member is the
        same however many there are.
        out: a new file that frames are streamed to, so that memory does not grow with `steps`; the result then reads
        from it: NetCDF if its name ends with .nc, else a Zarr store. reversed_axes: variables lie in the order time, z,
        y, x, as programs for NetCDF expect them.
        level: also state errors, each with this chance to hold (docs/trust.md), of a bundle that was calibrated: of
        each field `NAME_error` at each time and `NAME_band` at all times together, and scalar quantities with theirs.
        quantities: functions that the bundle was calibrated for, by name (`ups.calibrate`).
        on_doubt: where a trajectory gets further out than those that a bundle was calibrated on: warn, and state no
        errors from that step on (NaN); stop, so that frames are missing too; or ignore, which states them all the same
        and without a level saves the time to look (`p_value`, `outside_at`).
        progress: called with the number of steps done.
        """
        spec = self.task(task)
        _check_count("steps", steps, MAX_STEPS)
        _check_count("every", every, MAX_STEPS)
        if spec.steady and steps != 1:
            raise BundleError(f"task '{spec.name}' is steady: it has one solution, not {steps} steps")
        if members is not None:
            _check_count("members", members, MAX_MEMBERS)
            self._check_ensemble(spec)
        if isinstance(seed, bool) or not isinstance(seed, int | np.integer) or not 0 <= seed <= MAX_SEED:
            raise BundleError(f"seed must be a whole number from 0 to {MAX_SEED}, not {str(seed)[:40]!r}")
        if steps < every:
            raise BundleError(f"every={every} keeps no frame of {steps} steps")
        trained = self._bundle.info.coordinates[spec.name]
        start = read_start(
            spec,
            self.context_frames,
            state,
            static,
            parameters,
            trained,
            coordinates=coordinates,
            rescale=rescale_domain,
            dt=dt,
            time=time,
        )
        trust = judge(spec, start, steps, self._bundle.info)
        facts = {"task": spec.name, "equation": spec.equation, "bundle": self._bundle.hash}
        if members is not None:
            facts |= {"ensemble": f"{members} members, seed {seed}"}
        num_kept = steps // every
        if on_doubt not in ON_DOUBT:
            raise BundleError(f"on_doubt is one of {', '.join(ON_DOUBT)}, not {str(on_doubt)[:40]!r}")
        level = self._level(spec, start, level, on_doubt, members)
        layout = Layout(spec, start, num_kept, every, trust, facts, members, reversed_axes=reversed_axes)
        self._accept(layout, out)
        calibration = self._bundle.calibrations.get(spec.name)
        if calibration is not None and members is None and (level is not None or on_doubt != "ignore"):
            kept = (start.batch.num_samples, num_kept, int(every))
            points, withhold = start.domain.coordinates, on_doubt != "ignore"
            layout.watch = Watch(calibration, spec, kept, points, level, quantities or {}, withhold, trust.outside)
        batch, watched = start.batch.to(self._device), layout.watch is not None
        predictor: Predictor = self._watched if watched else self._stepper
        if members is not None:
            predictor = members_of(self._stepper, spec, int(members), int(seed))
        elif self._exported is not None:
            predictor = self._exported.predictor(spec, batch, predictor, watched=watched)
        batch = batch if members is None else batch.repeated(int(members))
        # Last: from here on there is a file, and whatever ends the rollout early removes it.
        sink = self._open_sink(layout, out)
        return self._roll(Rolling(predictor, batch, steps, start.domain.resampling, sink, on_doubt == "stop"), progress)

    def query(
        self, result: Any, points: Any, times: Any = None, *, task: str | None = None, in_time: str | None = None
    ) -> Any:
        """Values of a `rollout` at points (N, axes) and some of its times: an xarray.Dataset with a dimension `point`,
        which states the error of the interpolation. in_time: 'cubic' for times between frames, else refused.
        Of a tensor (..., C, *S) a tensor (..., C, N), with gradients to values and points (docs/simulator.md)."""
        spec = self.task(task or getattr(result, "attrs", {}).get("task"))
        trained = self._bundle.info.coordinates[spec.name]
        if isinstance(result, Tensor):
            if times is not None:
                raise BundleError("frames of a tensor have no times", hint="choose them by number, and leave times out")
            return Interpolant(spec, trained, trained, points)(result)
        return query_result(result, points, times, spec, trained, in_time)

    def fit(
        self, observations: Any, unknown: Any, *, noise: Any, task: str | None = None, level: float = 0.9, **known: Any
    ) -> Fit:
        """Find parameters and the initial state of a trajectory from scattered, noisy sensors (docs/simulator.md).
        observations: dict or xarray.Dataset of `points` (N, axes), `times` (N,) and values (N,) by channel (NaN: none).
        unknown: names of parameters, and 'initial_state', which is that of the earliest value. noise: deviation of the
        sensors, or one by channel. level: chance of each interval. known: what `rollout` takes, as state=."""
        spec, free = self.task(task), INITIAL_STATE in (unknown := {*unknown})
        names, grid = [p.name for p in spec.parameters], self._bundle.info.coordinates[spec.name]
        if not unknown or unknown - {*names, INITIAL_STATE} or spec.steady or self.context_frames > 1:
            hint = f"unknown= some of {', '.join([*names, INITIAL_STATE])}, of a task in time, for a model of one frame"
            raise BundleError(f"{sorted(unknown)} of task '{spec.name}' cannot be fitted", hint=hint)
        state: Any = known.get("state")
        given = {n: state[n] for n in names if is_dataset(state) and n in state} | dict(
            known.pop("parameters", None) or {}
        )
        given |= {p.name: p.minimum for p in spec.parameters if p.name in unknown}
        known["state"] = np.zeros((spec.num_channels("state"), *map(len, grid))) if free else state
        start = read_start(spec, 1, parameters=given, trained=grid, **{"static": None} | known)
        if start.batch.num_samples > 1:
            raise BundleError(f"one trajectory can be fitted, and {start.batch.num_samples} samples were given")
        stated, time = self._bundle.calibrations.get(spec.name), None if free else start.time
        roll = functools.partial(self.rollout, task=spec.name, static=known.get("static"), on_doubt="ignore")
        problem = Problem(start.batch.to(self._device), self._stepper, stated, unknown, observations, noise, time)
        return fit(problem, level, functools.partial(roll, level=ERROR_LEVEL if stated else None))

    def _level(
        self, spec: TaskSpec, start: Start, level: float | None, on_doubt: str, members: int | None
    ) -> float | None:
        """The level of error bars. Raises BundleError where nothing was measured that could be stated."""
        if level is None and on_doubt != "stop":
            return None
        if spec.name not in self._bundle.calibrations:
            raise BundleError(
                f"this bundle was not calibrated for task '{spec.name}': it can state no errors and has no doubt",
                hint="calibrate it first: ups calibrate BUNDLE (docs/trust.md)",
            )
        moved = start.domain.resampling.given != start.batch.space or bool(start.domain.rescaled)
        if members is not None or (moved and level is not None):
            raise BundleError(
                "errors were measured for the central trajectory on the trained grid, not for members or other grids",
                hint="leave level and on_doubt out, or give a state on the trained grid",
                command_hint="leave --level and --on-doubt out, or give a state on the trained grid",
            )
        return level

    def _check_ensemble(self, spec: TaskSpec) -> None:
        if has_members(self._stepper, spec):
            return
        problem = f"the corrector of this simulator was not trained on task '{spec.name}': it has no members"
        instead = " for this task"
        if not self.is_ensemble:
            problem = "this simulator was not trained as an ensemble: its members would all be the same"
            instead = ", or train one: stage corrector (docs/stages.md)"
        raise BundleError(problem, hint=f"leave members out{instead}", command_hint=f"leave --members out{instead}")

    def _accept(self, layout: Layout, out: str | Path | None) -> None:
        """Raises for a result that is too large, before anything is allocated for it."""

    def _open_sink(self, layout: Layout, out: str | Path | None) -> Sink:
        return open_sink(layout, out)

    @torch.inference_mode()
    def _roll(self, rolling: Rolling, progress: Callable[[int], None] | None) -> Any:
        """All steps of a rollout, and its result."""
        try:
            for number, frame in enumerate(rollout(rolling.predictor, rolling.batch, rolling.steps), start=1):
                rolling.take(frame, getattr(rolling.predictor, "numbers", None))
                if progress is not None:
                    progress(number)
                if rolling.is_done:
                    break
            return rolling.sink.finish()
        except BaseException as error:
            rolling.sink.abandon()
            if isinstance(error, DataError):  # its hint is for who trains a model
                raise BundleError(error.message) from error
            raise


class Rolling:
    """A rollout that was checked: what its first step is given, and what becomes of each frame.

    Frames are looked at several steps at a time, which costs a part of looking at each.
    """

    def __init__(
        self, predictor: Predictor, batch: Batch, steps: int, resampling: Resampling, sink: Sink, stop: bool
    ) -> None:
        """stop: frames that are further out than calibrated are missing."""
        self.predictor, self.batch, self.steps, self.sink = predictor, batch, steps, sink
        self._resampling, self._stop = resampling, stop
        frame_bytes = max(1, batch.state.element_size() * batch.state[:, :1].numel())
        self._at_once = 1 if stop else max(1, min(MAX_AT_ONCE, BYTES_AT_ONCE // frame_bytes))
        self._frames: list[Tensor] = []
        self._numbers: list[Tensor] = []
        self.steps_done, self.is_done = 0, False

    def take(self, frame: Tensor, numbers: Tensor | None) -> None:
        """frame (B, C, *S): of the next step. numbers (B, F): what the watch compares, where there is one."""
        self._frames.append(frame)
        if numbers is not None:
            self._numbers.append(numbers)
        self.steps_done += 1
        self.is_done = self.steps_done == self.steps
        if len(self._frames) == self._at_once or self.is_done:
            self._look()

    def _look(self) -> None:
        frames, first = torch.stack(self._frames), self.steps_done - len(self._frames) + 1  # (K, B, C, *S)
        sink, watch, every = self.sink, self.sink.layout.watch, self.sink.layout.every
        outside = np.zeros(sink.layout.num_rows, np.int32)
        sink.divergence.look(frames, first)
        if watch is not None:
            watch.look(torch.stack(self._numbers), frames, first)
            outside = watch.outside_at if self._stop else outside
        self._frames, self._numbers, valid = [], [], self.batch.valid
        for step, frame in enumerate(frames, start=first):
            if step % every == 0:
                kept = self._resampling.back(frame, self.batch.task.predicted).float().cpu().numpy()
                if valid is not None:
                    kept[np.broadcast_to(valid.cpu().numpy() == 0, kept.shape)] = np.nan
                if outside.any():
                    kept[(outside > 0) & (outside <= step)] = np.nan
                sink.add(kept)
        if outside.all() and not self.is_done:
            for _ in range(self.steps_done // every, self.steps // every):
                sink.add(np.full_like(sink.buffer[:, 0], np.nan))
            self.is_done = True


def find_task(tasks: Mapping[str, TaskSpec], name: str | None) -> TaskSpec:
    """The task of that name, or the only one."""
    if name is None and len(tasks) == 1:
        return next(iter(tasks.values()))
    if name is None or name not in tasks:
        known = list(tasks)
        what = "knows several tasks" if name is None else f"does not know task '{name}'{suggestion(str(name), known)}"
        raise BundleError(
            f"this simulator {what}",
            hint=f"give its task: one of {', '.join(known)}",
        )
    return tasks[name]


def _check_count(name: str, value: object, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 1 <= value <= most:
        raise BundleError(f"{name} must be a whole number from 1 to {most}, not {str(value)[:40]!r}")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BundleError(f"'{name}' is not a device", hint="use auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise BundleError(f"device '{name}' is not supported", hint="use auto, cpu, cuda or cuda:N")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BundleError(
            "device 'cuda' was asked for, and there is no CUDA here",
            hint="use device='cpu'",
            command_hint="use --device cpu",
        )
    return device


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
        spec = find_task(self._tasks, task)
        if steps < 1 or (spec.steady and steps != 1):
            raise BundleError(f"task '{spec.name}' cannot be rolled out for {steps} steps")
        batch, resampling = self._batch(spec, state, parameters, static)
        try:
            frames = [resampling.back(frame, spec.predicted) for frame in rollout(self.stepper, batch, steps)]
        except DataError as error:
            raise BundleError(error.message, hint=error.hint) from error
        return frames[0] if spec.steady else torch.stack(frames, dim=1)

    def _batch(
        self, task: TaskSpec, state: Tensor | None, parameters: Parameters | None, static: Tensor | None
    ) -> tuple[Batch, Resampling]:
        dims, context = task.num_spatial_dims, self.stepper.context_frames
        fields: list[Tensor] = []
        for name, part in (("state", state), ("static", static)):
            wanted = bool(task.fields_of("state" if name == "state" else "static"))
            if (part is not None) != wanted:
                needs = "needs" if wanted else "has no"
                raise BundleError(f"task '{task.name}' {needs} {name} fields", hint=_shapes(task, context))
            if part is not None:
                several = name == "state" and context > 1
                if part.ndim != dims + 2 + several:
                    raise BundleError(f"{name} has shape {tuple(part.shape)}", hint=_shapes(task, context))
                fields.append(part[:, None] if name == "state" and not several else part)
        space, num_samples, like = fields[0].shape[-dims:], fields[0].shape[0], next(self.stepper.parameters()).detach()
        if any(part.shape[-dims:] != space or part.shape[0] != num_samples for part in fields):
            raise BundleError("state and static differ in samples or grid", hint=_shapes(task, context))
        domain = fit_domain(task, self._grids[task.name], tuple(space), {}, rescale=False)
        resampling = domain.resampling
        batch = Batch.of(
            task,
            state=None if state is None else resampling.onto(fields[0].to(like), "state"),
            static=None if static is None else resampling.onto(fields[-1].to(like), "static"),
            parameters=_parameters(task, parameters, num_samples, like),
            dt=task.dt,
            coordinates=[torch.from_numpy(c.copy()).to(like) for c in domain.trained],
        )
        if (valid := batch.valid) is not None and not task.steady:
            batch = batch.with_state(batch.state.where(valid[:, None] > 0, 0.0))
        return batch, resampling


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
    check_parameters(task, values)
    columns = []
    for name in names:
        column = torch.as_tensor(values[name]).to(like)
        if column.shape not in ((), (num_samples,)):
            raise BundleError(
                f"parameter '{name}' has shape {tuple(column.shape)}; expected one number or {num_samples}"
            )
        columns.append(column.expand(num_samples))
    return torch.stack(columns, dim=1) if columns else like.new_zeros(num_samples, 0)
