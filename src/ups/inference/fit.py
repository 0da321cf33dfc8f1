"""`ups.Simulator.fit`, as one sum of squares: what sensors are off by, in units of noise and stated model error; waves
of the initial state, in units of a usual size; and penalties beyond the range of a parameter and the distance of usual
rollouts, where an optimizer finds nonsense that fits.
B rows of U unknowns (parameters, then W waves), M values, C channels, S space, R residuals."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ups.errors import BundleError, MissingExtraError
from ups.inference.calibration import Calibration, Float64
from ups.inference.query import Interpolant, frame_numbers, waves
from ups.models.error_model import Watched, period_ends
from ups.models.stepper import Stepper, rollout
from ups.spec.batch import Batch
from ups.spec.descriptors import DEVIATION, MEAN, VALUES, first_waves
from ups.spec.statistics import Statistics
from ups.spec.task import TaskSpec

INITIAL_STATE = "initial_state"
CANDIDATES, STARTS, MAX_WAVES, ITERATIONS = 16, 2, 256, 20
SPAN, HORIZONS = 4.0, (0.25, 0.5, 1.0)  # units over the range of a parameter; parts of the rollout to fit in turn
MOST_MISFIT, INDEPENDENT = 2.0, 4.0  # in units of noise and model error; values of an error that is smooth and lasts
MOST_STALE = 0.1  # of the loss: a step that gains less needs new slopes
USUAL, ERROR_LEVEL = 0.9, 0.68  # shares of rollouts without a penalty, and of model errors below their deviation


@dataclass(frozen=True)
class Fit:
    """intervals: (low, high) of unknown parameters. initial_state: (C, *S); state_intervals: half widths, 0 if known.
    misfit: RMS of what sensors are off by, in units of noise; solver_misfit: the same of the reference solver, None
    without one (notes). result: the rollout; p_value: of its distance. declined: why not to use the answer, or ''."""

    parameters: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    initial_state: Any
    state_intervals: Any
    misfit: float
    solver_misfit: float | None
    result: Any
    p_value: float | None
    declined: str
    notes: str


def usual_sizes(task: TaskSpec, statistics: Statistics, space: tuple[int, ...]) -> Float64:
    """(C, *S): of the waves of the state, the product of what the ranges of the train split say about each axis."""
    ranges = np.array(statistics.ranges.get("state", ()))  # (C, D, 4)
    if not ranges.size:  # of an old bundle: all alike
        return np.asarray(np.multiply.outer(statistics.state_std, np.full(space, math.prod(space) ** -0.5)))
    high, column, sizes = ranges[:, :, 1], len(VALUES) + 2, ranges[:, DEVIATION, 1]
    for axis, points in zip(task.axes, space, strict=True):
        wave, bands = np.arange(1, points), first_waves(points if axis.periodic else 2 * points)
        band = np.searchsorted(bands, (wave + 1) // 2 if axis.periodic else wave, side="right") - 1
        share = high[:, column + band] / np.sqrt(np.bincount(band)[band]) / high[:, DEVIATION, None]
        share = np.insert(share, 0, np.sqrt((1 - np.square(share).sum(1)).clip(1e-3)), 1)  # (C, points)
        sizes, column = np.einsum("c...,cn->c...n", sizes, share), column + len(bands) + 2
    sizes.reshape(len(sizes), -1)[:, 0] = np.ptp(ranges[:, MEAN, :2], axis=1)
    return np.asarray(sizes)


class Problem:
    """The residuals of unknowns. batch: one sample, whose unknown parts count for nothing; given: see `_read`."""

    def __init__(self, batch: Batch, stepper: Stepper, stated: Calibration | None, unknown: Any, *given: Any) -> None:
        self.batch, self.stated, task, like = batch, stated, batch.task, batch.dt
        self.predictor: Any = stepper if stated is None else Watched(stepper)
        grid = [c.double().cpu().numpy() for c in batch.coordinates]
        self._read(task, grid, *given)
        self.columns = [n for n, p in enumerate(task.parameters) if p.name in unknown]
        statistics, space = stepper.statistics[task.name], tuple(map(len, grid))
        self.mean = torch.tensor(statistics.state_mean).to(like).reshape(-1, *[1] * len(grid))
        self.bases = [waves(axis, None, n).to(like) for axis, n in zip(task.axes, space, strict=True)]
        self.sizes = torch.from_numpy(usual_sizes(task, statistics, space)).to(like)  # (C, *S)
        kept = self.sizes.flatten().argsort(descending=True)[: MAX_WAVES if INITIAL_STATE in unknown else 0]
        self.kept = kept[self.sizes.flatten()[kept] > 1e-4 * self.sizes.max()]

    def _read(self, task: TaskSpec, grid: list[Float64], given: Any, noise: Any, first: float | None) -> None:
        """given: `observations` of `Simulator.fit`; first: time of the initial state, None for the earliest value."""
        known = task.channel_names("state")
        names = [name for name in known if name in given]
        if not names or not {"points", "times"} <= set(given) <= {"points", "times", *known}:
            raise BundleError(f"observations have {[*given]}; expected points, times and some of {', '.join(known)}")
        points, times, *values = (np.asarray(given[name], np.float64) for name in ("points", "times", *names))
        noises = np.array([noise[name] if isinstance(noise, Mapping) else noise for name in names], np.float64)
        shapes = [part.shape for part in (points[:, 0] if points.ndim > 1 else points, times, *values)]
        if len({*shapes}) > 1 or np.isnan(values).all() or not ((noises > 0) & np.isfinite(noises)).all():
            raise BundleError(f"observations need a time and values for each point, and noise > 0: {shapes}, {noise}")
        self.interpolant, (channel, row) = Interpolant(task, grid, grid, points), np.nonzero(np.isfinite(values))
        channel, row = (part[np.argsort(times[row], kind="stable")] for part in (channel, row))
        begin, times = times[row[0]] if first is None else first, times[row]
        clock = begin + task.dt * np.arange(max(0, round((times[-1] - begin) / task.dt)) + 1)
        self.steps, self.rows = torch.tensor(frame_numbers(times, clock, task.dt)), torch.from_numpy(row)
        self.here = [(self.steps == step).nonzero()[:, 0] for step in range(len(clock))]  # which values, by step
        self.last, self.channels = len(clock) - 1, torch.tensor([known.index(name) for name in names])[channel]
        self.values = torch.from_numpy(np.array(values)[channel, row]).to(self.batch.dt)
        self.noise = self.scale = torch.from_numpy(noises[channel]).to(self.batch.dt)  # scale: with the model error

    def inputs(self, unknowns: Tensor) -> Batch:
        """(B, U) -> what a rollout starts from."""
        batch, waves = self.batch.repeated(len(unknowns)), unknowns[:, len(self.columns) :]
        parameters = batch.parameters.clone()
        for column, place in enumerate(self.columns):
            spec, part = batch.task.parameters[place], unknowns[:, column].clamp(-2, SPAN + 2) / SPAN
            low, high, log = spec.minimum, spec.maximum, spec.scale == "log"
            parameters[:, place] = low * (high / low) ** part if log else low + (high - low) * part
        state = (self.mean + self.fields(waves))[:, None] if len(self.kept) else batch.state
        return replace(batch, state=state, parameters=parameters)

    def fields(self, coefficients: Tensor) -> Tensor:
        """Waves (B, W) -> (B, C, *S) without the mean."""
        fields = coefficients.new_zeros(len(coefficients), *self.sizes.shape)
        fields.flatten(1)[:, self.kept] = coefficients * self.sizes.flatten()[self.kept]
        for dim, basis in enumerate(self.bases, start=2):
            fields = (fields.movedim(dim, -1) @ basis.T).movedim(-1, dim)
        return fields

    def seen(self, frames: Iterable[Tensor]) -> Tensor:
        """Frames (B, C, *S), the initial one first -> what the sensors measure (B, m)."""
        pairs = zip(frames, self.here, strict=False)
        seen = [self.interpolant(x, self.rows[at])[:, self.channels[at], torch.arange(len(at))] for x, at in pairs]
        return torch.cat(seen, 1)

    def residuals(self, unknowns: Tensor, steps: int) -> Tensor:
        """(B, U) -> (B, R): of waves, of sensors over so many steps, and of the two penalties."""
        batch, count, firm = self.inputs(unknowns), len(self.columns), math.sqrt(len(self.values))
        frames, far = [batch.state[:, -1]], [unknowns.new_zeros(len(unknowns))]
        for step, frame in enumerate(rollout(self.predictor, batch, steps), 1):
            frames.append(frame)
            if self.stated is not None:
                period = bisect_left(period_ends(self.stated.document.leads[-1])[:-1], step)
                distance = self.stated.model.distance(self.predictor.numbers, period)
                far.append((distance - float(self.stated.bound("distance", USUAL))).relu().log1p() / math.sqrt(steps))
        seen, beyond = self.seen(frames), ((unknowns[:, :count] / SPAN - 0.5).abs() - 0.5).relu()
        off = (seen - self.values[: seen.shape[1]]) / self.scale[: seen.shape[1]]
        # A penalty of 1 counts as all sensors together.
        parts = [unknowns[:, count:], off, firm * 10 * beyond, firm * torch.stack(far, 1)]
        return torch.cat(parts, 1).double().nan_to_num(1e6).clamp(-1e6, 1e6)

    def slopes(self, unknowns: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """(U,) -> residuals (R,) and their changes with the unknowns (U, R), in float64."""
        base = self.residuals(unknowns[None], steps)
        parts = torch.split(torch.eye(len(unknowns)).to(unknowns), 32)
        return base[0], (torch.cat([self.residuals(unknowns + 1e-3 * part, steps) for part in parts]) - base) / 1e-3

    def covariance(self, best: Tensor) -> tuple[Tensor, Tensor]:
        """(U,) -> what sensors are off by (M,), and the covariance of the unknowns (U, U)."""
        free, rows = len(self.kept), len(self.kept) + len(self.values)  # no penalties: they are no knowledge
        base, slopes = (part[..., :rows] for part in self.slopes(best, self.last))
        inverse = torch.linalg.pinv(slopes @ slopes.T, hermitian=True)
        share = torch.cat([base.new_zeros(free), 1 - (self.noise / self.scale).square()])  # of the model error
        spread = 1 + share * max(0.0, len(self.values) / INDEPENDENT - 1)
        spread *= base[free:].square().mean().clamp_min(1)  # noise or model error are larger than stated
        return base[free:], inverse @ (slopes * spread) @ slopes.T @ inverse

    def descend(self, best: Tensor, steps: int) -> tuple[float, Tensor, bool]:
        """The loss and the unknowns (U,) after Levenberg-Marquardt, and whether it came to an end.

        Slopes cost a rollout for each unknown. They are updated after a step (Broyden), and taken anew when one gains
        little."""
        damping, powers, slopes = 1.0, torch.tensor([0.1, 1.0, 10.0, 1000.0]).to(best), None
        base = self.residuals(best[None], steps)[0]
        for _ in range(ITERATIONS):
            if fresh := slopes is None:
                base, slopes = self.slopes(best, steps)
            added = (damping * powers)[:, None, None] * torch.eye(len(best)).to(base)
            trials = best - torch.linalg.solve(slopes @ slopes.T + added, slopes @ base).to(best)
            ends = self.residuals(trials, steps)
            losses, loss = ends.square().sum(1), float(base.square().sum())
            row = int(losses.argmin())
            gain = 1 - float(losses[row]) / max(loss, 1e-300)
            if ended := fresh and gain < 1e-3:
                break
            if gain > 0:
                step, damping = (trials[row] - best).to(base), damping * float(powers[row])
                slopes = slopes + torch.outer(step, ends[row] - base - step @ slopes) / step.square().sum()
                best, base = trials[row], ends[row]
            slopes = slopes if gain > MOST_STALE else None
        return float(base.square().sum()), best, ended

    def best(self) -> Tensor:
        """(U,): the best of several starts: other parameters, and interpolated sensors, more or less damped."""
        count, ends = len(self.columns), []
        horizons = [round(share * self.last) for share in (HORIZONS if len(self.kept) else (1.0,))]
        start = self.descend(self.values.new_zeros(count + len(self.kept)), 0)[1]
        candidates, sobol = torch.linspace(1, 0, CANDIDATES).to(start)[:, None] * start, torch.quasirandom.SobolEngine
        candidates[:, :count] = SPAN * sobol(max(1, count)).draw(CANDIDATES + 1)[1:, :count]  # type: ignore[no-untyped-call]
        losses = self.residuals(candidates, horizons[0]).square().sum(1)
        for start in candidates[losses.argsort()[:: CANDIDATES // STARTS]]:  # one of them is not near the best
            for horizon in horizons:
                loss, start, _ = self.descend(start, horizon)
            ends.append((loss, start))
        return min(ends, key=lambda end: end[0])[1]

    def solved(self, batch: Batch) -> tuple[Tensor | None, str]:
        """What the sensors see (M,) of the reference solver, started from the answer; or None and why there is none."""
        try:
            from ups.solvers.coarse_solver import RESTARTS, Given, Setting, solved_by
            from ups.solvers.problem import require_solvers

            require_solvers("comparing the answer with the solver")
        except MissingExtraError as error:
            return None, error.message
        own, first, dt = solved_by(batch.task), batch.state[:, -1].double().cpu(), batch.task.dt
        restart, points = RESTARTS.get(own.spec.name if own else ""), 2 * first.shape[-1]
        if restart is None or len(set(first.shape[2:])) > 1:
            return None, "no solver of this package has this task: the answer was not compared with one"
        setting = Setting(points, 2 * restart.substeps(points, dt) if restart.substeps else 0)
        given = Given(*(part.double().cpu().numpy() for part in (first, batch.static, batch.parameters)))
        frames = restart.run(batch.task, given, dt, max(1, self.last), setting)
        return self.seen([first, *torch.from_numpy(frames.copy()).unbind(1)])[0].to(self.values), ""


@torch.no_grad()
def fit(problem: Problem, level: float, roll: Callable[..., Any]) -> Fit:
    """roll: (state, steps, parameters) -> what `Simulator.rollout` says about them, with errors if it can."""
    task, best, count, known = problem.batch.task, problem.best(), len(problem.columns), problem.stated is not None

    def answer() -> Any:
        batch = problem.inputs(best[None])
        parameters = {p.name: float(value) for p, value in zip(task.parameters, batch.parameters[0], strict=True)}
        found = roll(batch.state[0, 0].cpu().numpy(), max(1, problem.last), parameters)
        return found.isel(sample=0) if "sample" in found.dims else found  # of a static field with an axis of samples

    if known:
        result, fields = answer(), [(f.name, f.num_channels(task.num_spatial_dims)) for f in task.fields_of("state")]
        rows = [result[f"{name}_error"].values for name, size in fields for _ in range(size)]
        rows = [np.append(0.0, np.nan_to_num(row, nan=np.nanmax(row))) for row in rows]  # (C, 1 + steps)
        problem.scale = torch.from_numpy(np.array(rows)).to(best)[problem.channels, problem.steps].hypot(problem.noise)
    _, best, ended = problem.descend(best, problem.last)
    result, start, (off, covariance), intervals = answer(), problem.inputs(best[None]), problem.covariance(best), {}
    covariance = covariance * 2 * float(torch.erfinv(torch.tensor(level))) ** 2
    for column, place in enumerate(problem.columns):
        away = torch.diag(covariance.diagonal().clamp_min(0).sqrt().to(best))[column]
        ends = problem.inputs(torch.stack([best - away, best + away])).parameters[:, place]
        intervals[task.parameters[place].name] = (float(ends[0]), float(ends[1]))
    variances, vectors = torch.linalg.eigh(covariance[count:, count:])
    widths = problem.fields((vectors * variances.clamp_min(0).sqrt()).T.to(best)).square().sum(0).sqrt()
    solver, why = problem.solved(start)
    offs = [off, off * problem.scale / problem.noise]
    offs += [] if solver is None else [(solver - problem.values) / problem.noise]
    explained, misfit, *solved = (float(part.square().mean().sqrt()) for part in offs)
    doubts = [result.attrs["warnings"]]
    if not ended:
        doubts.append("no start converged")
    if not explained <= MOST_MISFIT:  # also where it is no number
        doubts.append(f"sensors are off by {explained:.2g} times noise and model error")
    notes = [why, "" if known else "the bundle was not calibrated: no distance, and no model error in intervals"]
    return Fit(
        parameters={p.name: float(result[p.name]) for p in task.parameters},
        intervals=intervals,
        initial_state=start.state[0, 0].cpu().numpy(),
        state_intervals=widths.cpu().numpy(),
        misfit=misfit,
        solver_misfit=solved[0] if solved else None,
        result=result,
        p_value=float(result["p_value"][-1]) if known else None,
        declined="; ".join(filter(None, doubts)),
        notes="; ".join(filter(None, notes)),
    )
