"""The stage `corrector`, which trains members that differ where a single prediction leaves the step open.

Kind `ensemble` continues training the operator, with noise in its condition. Members of one sample are judged together,
by the almost fair CRPS of each point over a short rollout of each: its first part asks for members near the truth, its
second for members that are as far from each other as from the truth.

Kind `flow` trains a second network that samples the residual of the frozen operator, by flow matching. On the straight
way x_t = (1 - t) x_0 + t x_1 from white noise x_0 to the residual x_1, in typical residuals, the network learns the
velocity x_1 - x_0. Later steps of a sample start from the operator's own frames, as those of a rollout do.

B samples, M members, C channels, S space.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ups.config.stage import CorrectorStageConfig, DistillStageConfig
from ups.distributed.strategies import gathered, set_rows
from ups.errors import ConfigError
from ups.models.ensemble import Ensemble, by_member
from ups.models.flow import FLOW, STUDENT, FlowNetwork, PredictedStep, flow_of, noise_of
from ups.models.normalization import sent
from ups.models.stepper import Stepper
from ups.spec.batch import Batch
from ups.spec.keyed import key_of, keyed_uniform
from ups.spec.task import TaskSpec
from ups.training.losses import almost_fair_crps
from ups.training.stages import Stage, UnrolledStage, following, in_field_units


class EnsembleStage(UnrolledStage):
    """Trains the whole network, with noise, on the scores of members together."""

    trains_members = True
    config: CorrectorStageConfig

    def __init__(self, config: CorrectorStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(config, stepper, seed)
        self._ensemble = Ensemble(stepper, config.members, seed)

    def begin(self) -> None:
        """Let noise act on the tasks of this stage; on those that it already acts on, as much as it does."""
        super().begin()
        sizes_and_names = self.stepper.network.noise_sizes()
        assert sizes_and_names is not None  # the ensemble would have refused
        parameter, names = sizes_and_names
        sizes = gathered(parameter)[:, 0]
        new = torch.tensor([self.config.trains(name) for name in names], device=sizes.device) & (sizes == 0)
        set_rows(parameter, torch.where(new, 1.0, sizes))

    def prepare(self, batch: Batch, augment: bool) -> Batch:
        """The batch with its members: every sample as many times as there are."""
        return super().prepare(batch, augment).repeated(self.config.members)

    def predict(self, batches: Sequence[Batch], step: int) -> list[Tensor]:
        return self.stepper.predict_group([self._ensemble.with_noise(batch, step) for batch in batches])

    def step_losses(self, batch: Batch, history: Tensor, predicted: Tensor, step: int) -> dict[str, Tensor]:
        """`loss` is the CRPS. error and spread: how far members are from the truth, and from each other."""
        task, stepper, members = batch.task, self.stepper, self.config.members
        at = stepper.context_frames + step
        if task.steady:
            wanted = stepper.normalization.normalize("target", task, batch.target, 1)
            fields = batch.target[::members, None]
        else:
            wanted = stepper.scaled_change(history[:, -1], batch.state[:, at], task)
            fields = batch.state[::members, at - 1 : at + 1]
        errors = by_member(predicted - wanted, members)  # (B, M, C, *S)
        errors, fields, floor = in_field_units(stepper, task, errors, fields)
        score = almost_fair_crps(errors, fields, floor)
        with torch.no_grad():
            spread = errors[:, 0] - errors[:, 1]  # of two of them: members are alike
            apart = {"error": errors[:, 0].abs().flatten(1).mean(1), "spread": spread.abs().flatten(1).mean(1)}
        return {"loss": score, **apart}


def build_corrector(config: CorrectorStageConfig, stepper: Stepper, seed: int) -> Stage:
    """The corrector of the kind that the recipe names."""
    return (FlowStage if config.kind == "flow" else EnsembleStage)(config, stepper, seed)


# Of which the residuals are measured before the first step.
_MEASURED_STEPS = 8


class StageOnResiduals(Stage):
    """Trains a flow on the steps of samples that the frozen operator makes. `trained`: which network."""

    trained: str
    config: CorrectorStageConfig | DistillStageConfig

    def __init__(self, config: CorrectorStageConfig | DistillStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(stepper, seed)
        self.config = config
        self.tasks = [task for task in stepper.tasks if config.trains(task.name)]

    def trained_modules(self) -> list[nn.Module]:
        return [self.flow.inner]

    @property
    def flow(self) -> FlowNetwork:
        """The network that is trained."""
        return flow_of(self.stepper, self.trained)

    def takes(self, task: TaskSpec) -> bool:
        return True

    def sample_losses(self, batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        """The mean over the steps of each sample."""
        batches = [self.prepare(batch, self.config.augment) for batch in batches]
        found: list[list[Tensor]] = [[] for _ in batches]
        for number, (active, steps) in enumerate(self._steps(batches)):
            for i, losses in zip(active, self.step_losses([batches[i] for i in active], steps, number), strict=True):
                found[i].append(losses)
        return [{"loss": torch.stack(losses).mean(0)} for losses in found]

    @abstractmethod
    def step_losses(self, batches: Sequence[Batch], steps: Sequence[PredictedStep], number: int) -> list[Tensor]:
        """(B,) of each batch: losses of the `number`-th step of its samples, which the operator makes as `steps`."""

    def residual(self, batch: Batch, step: PredictedStep, number: int) -> Tensor:
        """(B, C, *S): what the `number`-th step leaves over, in the units of predictions."""
        task, stepper = batch.task, self.stepper
        if task.steady:
            return stepper.normalization.normalize("target", task, batch.target, 1) - step.predicted
        truth = batch.state[:, stepper.context_frames + number]
        return stepper.scaled_change(step.batch.state[:, -1], truth, task) - step.predicted

    @torch.no_grad()
    def _steps(self, batches: Sequence[Batch]) -> Iterator[tuple[list[int], list[PredictedStep]]]:
        """For each step: which batches take part (a steady task in the first alone), and what the operator makes."""
        stepper = self.stepper
        frames = [batch.state[:, : stepper.context_frames] for batch in batches]
        for number in range(self.config.unroll_steps):
            active = [i for i, batch in enumerate(batches) if not batch.task.steady or number == 0]
            if not active:
                return
            given = [batches[i].with_state(frames[i]) for i in active]
            steps = [PredictedStep(b, p) for b, p in zip(given, stepper.predict_group(given), strict=True)]
            yield active, steps
            for i, step in zip(active, steps, strict=True):
                if not step.batch.task.steady:
                    frames[i] = following(stepper, frames[i], step.predicted, step.batch.task)


class FlowStage(StageOnResiduals):
    """Trains the velocity of draws."""

    trained = FLOW
    measured_steps = _MEASURED_STEPS

    def __init__(self, config: CorrectorStageConfig, stepper: Stepper, seed: int) -> None:
        super().__init__(config, stepper, seed)
        self._sums: Tensor | None = None

    def step_losses(self, batches: Sequence[Batch], steps: Sequence[PredictedStep], number: int) -> list[Tensor]:
        residuals = [self.residual(batch, step, number) for batch, step in zip(batches, steps, strict=True)]
        if self._sums is not None:
            self._measure(self._sums, batches, residuals)
        ends = [r / self.flow.size(b.task, r) for b, r in zip(batches, residuals, strict=True)]
        starts = [noise_of(batch, self.seed, 0, number).to(end.dtype) for batch, end in zip(batches, ends, strict=True)]
        times = [self._times(batch, number) for batch in batches]
        now = [torch.lerp(a, b, _beside(t, a)) for a, b, t in zip(starts, ends, times, strict=True)]
        velocities = self.flow.velocities(self.stepper, steps, now, times)
        return [
            (velocity - (end - start)).square().flatten(1).mean(1)
            for velocity, end, start in zip(velocities, ends, starts, strict=True)
        ]

    def _times(self, batch: Batch, number: int) -> Tensor:
        """(B,) uniform draws."""
        key = key_of(self.seed, "flow time", batch.task.name, batch.stage_step, number)
        drawn = torch.from_numpy(keyed_uniform(key, batch.numbers.numpy())[:, 0])
        return sent(drawn, batch.dt.device, batch.dt.dtype)

    def measure(self, on: bool) -> None:
        """Whether passes add up the squares of residuals."""
        device = self.flow.scale.device
        self._sums = torch.zeros(len(self.flow.row_names), 2, dtype=torch.float64, device=device) if on else self._sums

    def measured_enough(self) -> bool:
        """Whether every task was seen, on some rank. Collective: all ranks."""
        return not self._unseen(self._all_sums())

    def begin(self) -> None:
        """The size of residuals from what was measured on all ranks. Collective: all ranks."""
        if self._sums is None:
            return
        sums = self._all_sums()
        self._sums = None
        if unseen := self._unseen(sums):
            raise ConfigError(
                f"no finite residual of task '{unseen[0]}' was in the first steps of this stage, so that their usual "
                "size is not known",
                hint="give the task a larger weight in data.tasks, or leave it out with `tasks` of the stage",
            )
        trained = {task.name for task in self.tasks}
        here = torch.tensor([name[0] in trained for name in self.flow.row_names], device=sums.device)
        # A field that the operator leaves exactly as it is has none: nothing is added to it then.
        measured = (sums[:, 0] / sums[:, 1].clamp_min(1)).sqrt().clamp_min(1e-8).float()
        measured = torch.where(measured == 1, 1 + torch.finfo(torch.float32).eps, measured)  # 1 is "not measured"
        before = self.flow.whole_scale().to(measured)
        set_rows(self.flow.scale, torch.where(here, measured, before))
        if STUDENT in self.stepper.networks:  # one that learned from another teacher
            student = flow_of(self.stepper, STUDENT)
            set_rows(student.scale, student.scale_without(sorted(trained)))

    def _all_sums(self) -> Tensor:
        assert self._sums is not None  # between measure(True) and begin()
        sums = self._sums.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        return sums

    def _unseen(self, sums: Tensor) -> list[str]:
        """Tasks of this stage without a measured residual."""
        seen = {name[0] for name, count in zip(self.flow.row_names, sums[:, 1].tolist(), strict=True) if count}
        return [task.name for task in self.tasks if task.name not in seen]

    @torch.no_grad()
    def _measure(self, sums: Tensor, batches: Sequence[Batch], residuals: Sequence[Tensor]) -> None:
        for batch, residual in zip(batches, residuals, strict=True):
            rows = [n for n, name in enumerate(self.flow.row_names) if name[0] == batch.task.name]
            squares = residual.double().square().flatten(2).mean(2)  # (B, C)
            finite = squares.isfinite().all(1) & (batch.sample_weight > 0)
            sums[rows, 0] += squares[finite].sum(0)
            sums[rows, 1] += finite.sum()


def _beside(t: Tensor, like: Tensor) -> Tensor:
    """t (B,) -> (B, 1, ...), as many dimensions as `like`."""
    return t.to(like.dtype).reshape(-1, *[1] * (like.ndim - 1))
