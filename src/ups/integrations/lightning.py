"""Stages of a recipe for a Lightning pipeline: `StageModule` trains one, `StageData` gives it the batches of this rank.

    with open_data(recipe) as opened:
        module = StageModule(recipe, opened)
        data = StageData(recipe, opened, module)
        Trainer(max_steps=module.num_steps, **TRAINER).fit(module, data)
        write_bundle(recipe, opened, module, "bundles/mine")

Losses, optimizer, schedule, clipping and average are those of our engine: nothing is written a second time here. What
Lightning brings (its strategies, loggers, checkpoints) takes the place of our supervisor, which cannot see such a run:
`ups why` knows nothing of it. Needs the package `lightning`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset

from ups.config.recipe import plain_data, resolve_data
from ups.config.schema import Recipe
from ups.data.loader import Loader
from ups.distributed.strategies import weight_dtype
from ups.errors import ConfigError
from ups.models.transfer import transfer
from ups.run.assemble import OpenData, bare_stage, stage_loader
from ups.run.directory import from_outside
from ups.run.scoring import SCORED_TRAJECTORIES, make_bundle, score
from ups.run.trained import Trained
from ups.run.warm_start import stepper_at
from ups.spec.batch import Batch, RankInfo
from ups.training.averages import follow
from ups.training.optim import Ema, GradientJudge, build_optimizer, learning_rate, set_learning_rate, trainable
from ups.training.progress import Progress
from ups.training.stages import pass_measured

logger = logging.getLogger(__name__)

# What a Trainer must be told: our loader knows its rank, and its steps have no epochs.
TRAINER: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": -1, "log_every_n_steps": 1}


class StepBatches:
    """All micro-batches of a rank in one step. A plain object: Lightning takes what it knows apart."""

    def __init__(self, groups: Sequence[tuple[Batch, ...]]) -> None:
        self.groups = tuple(groups)

    def to(self, device: torch.device, dtype: torch.dtype) -> StepBatches:
        moved = [tuple(part.to(device, dtype, non_blocking=True) for part in group) for group in self.groups]
        return StepBatches(moved)


class StageModule(LightningModule):
    """Stage `index` of a recipe. Checkpoints of Lightning hold all that it needs to go on.

    before: the module of the stage whose weights this one starts from, unless its `start_from` is a run, bundle or
    checkpoint. Without it a stage that is not the first can only go on from a checkpoint.
    """

    def __init__(self, recipe: Recipe, opened: OpenData, index: int = 0, before: StageModule | None = None) -> None:
        super().__init__()
        self._config, self._engine = recipe.stages[index], recipe.engine
        if self._config.steps is None:
            raise ConfigError(
                f"stages.{index} has a budget of time, and Lightning counts steps", hint=f"set stages.{index}.steps"
            )
        if self._config.cache_place:
            raise ConfigError(
                f"stages.{index} reads a cache, and only a run of ours checks that it is of these weights",
                hint=f"leave stages.{index}.cache out",
            )
        self.stepper, self.stage = bare_stage(recipe, opened, index)
        self._knows_start = index == 0 or before is not None or index in from_outside(recipe)
        if index in from_outside(recipe):
            source = stepper_at(self._config.start_from or "")
            logger.info(transfer(source, self.stepper, self._config.start_task).describe())
        elif before is not None:
            self.stepper.load_state_dict(before.stepper.state_dict())
        self.to(dtype=weight_dtype(recipe.engine.precision))
        self.num_steps = self._config.steps
        self.progress = Progress(stage_index=index, total_steps=self.num_steps)
        self.ema: Ema | None = None
        self._saved: dict[str, Any] = {}
        self._seen: list[dict[str, Tensor]] = []
        self._judge = GradientJudge(self._config.optim)

    def configure_optimizers(self) -> Optimizer:
        return build_optimizer(self._config.optim, trainable(self.stage.named_parameters()), self.stage.matrices())

    def transfer_batch_to_device(self, batch: StepBatches, device: torch.device, dataloader_idx: int) -> StepBatches:
        return batch.to(device, weight_dtype(self._engine.precision))

    def on_fit_start(self) -> None:
        if self.stage.averages is not None:
            self.stage.averages.move_to(self.device)
        if self._engine.ema.enabled:
            self.ema = Ema(self._engine.ema, trainable(self.stage.named_parameters()))
        if self.progress.stage_step:
            ema, averages = self._saved.get("ema"), self._saved.get("averages")
            with torch.no_grad():
                if self.ema is not None and ema is not None:
                    for name, tensor in self.ema.tensors.items():
                        tensor.copy_(ema[name])
                if self.stage.averages is not None and averages is not None:
                    self.stage.averages.values.copy_(averages)
            return
        if not self._knows_start:
            raise ConfigError(
                f"stages.{self.progress.stage_index} starts from the weights of an earlier stage",
                hint="give the module of that stage: StageModule(..., before=MODULE)",
            )
        self.stage.check_start()
        dtype = weight_dtype(self._engine.precision)
        pass_measured(
            self.stage, (step.to(self.device, dtype).groups for step in self.trainer.datamodule.steps(0)), self.stage
        )
        self.stage.begin()
        if self.ema is not None:
            self.ema.restart()  # what begins is what the average begins with

    def on_train_batch_start(self, batch: StepBatches, batch_idx: int) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, Optimizer)
        set_learning_rate(optimizer, learning_rate(self._config.optim, self.progress.done))

    def training_step(self, batch: StepBatches, batch_idx: int) -> Tensor:
        losses = [self.stage(group) for group in batch.groups]
        self._seen = [one.metrics for one in losses]
        # The weights of samples add up to 1 over all ranks, and Lightning averages over them.
        total: Tensor = torch.stack([one.total for one in losses]).sum() * self.trainer.world_size
        self.log("train/loss", total.detach(), sync_dist=True, batch_size=1)
        return total

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        gradients = [p.grad for p in self.stage.parameters() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients).double()
        self._judge.judge(self.progress, norm, gradients)
        self._judge.read(self.progress)
        if self.progress.skipped_in_row:
            optimizer.zero_grad(set_to_none=True)  # reduced already: every rank leaves this step out

    def on_train_batch_end(self, outputs: Any, batch: StepBatches, batch_idx: int) -> None:
        self.progress.stage_step += 1
        self.progress.step += 1
        if self.progress.skipped_in_row:
            return
        follow(self.stage.averages, self._seen, self.trainer.world_size > 1)
        if self.ema is not None:
            self.ema.update(self.progress.stage_step)

    def on_train_end(self) -> None:
        if self.progress.stage_step < self.num_steps:
            return  # it was interrupted, and continues from a checkpoint
        if self.ema is not None:
            self.ema.become_weights()
        self.stage.finish()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        averages = self.stage.averages
        checkpoint["ups"] = {
            "progress": self.progress.to_json(),
            "ema": None if self.ema is None else self.ema.tensors,
            "averages": None if averages is None else averages.values,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._saved = checkpoint["ups"]
        self.progress = Progress.from_json(self._saved["progress"])


def write_bundle(recipe: Recipe, opened: OpenData, module: StageModule, directory: str | Path) -> Path:
    """Score the model as it stands after its last stage, and write what `ups.Simulator.load` reads; on one rank only.

    Scores are those that `ups train` leaves in a bundle, of as many trajectories of the test split.
    """
    resolved = resolve_data(plain_data(recipe))
    # A model of its own: on the CPU, in the type of a bundle, and the module may train on.
    stepper, _ = bare_stage(recipe, opened, module.progress.stage_index)
    stepper.load_state_dict(dict(module.stepper.named_parameters()), strict=False)
    stepper.requires_grad_(False)
    identity = {"run": recipe.run.name, "recipe": resolved.hash, "trained by": f"Lightning {lightning.__version__}"}
    identity |= {"step": str(module.progress.step)} | {f"data {r.task.name}": r.identity() for r in opened.readers}
    trained = Trained(
        recipe.run.name, stepper.eval(), list(opened.readers), recipe, resolved.text, identity, module.progress.step
    )
    return make_bundle(Path(directory), trained, score(trained, max_trajectories=SCORED_TRAJECTORIES))


class StageData(LightningDataModule):
    """The batches of one stage for this rank, step by step; together they are the global batch of our engine."""

    def __init__(self, recipe: Recipe, opened: OpenData, module: StageModule) -> None:
        super().__init__()
        self._recipe, self._opened, self._module = recipe, opened, module
        self._loader: Loader | None = None

    def steps(self, first: int) -> Iterator[StepBatches]:
        """All steps from `first` on, without end."""
        if self._loader is None:
            trainer = self.trainer
            assert trainer is not None
            kind = "cuda" if self._module.device.type == "cuda" else "cpu"
            rank_info = RankInfo(trainer.global_rank, trainer.world_size, trainer.local_rank, trainer.num_devices, kind)  # type: ignore[arg-type]
            index = self._module.progress.stage_index
            # A strategy of Lightning may exchange weights in each pass.
            self._loader = stage_loader(self._recipe, self._opened, rank_info, index, self._module.stage, together=True)
        loader = self._loader
        loader.load_state_dict({"step": first})
        while True:
            yield StepBatches([next(loader) for _ in range(loader.batches_in_step(loader.step))])

    def train_dataloader(self) -> DataLoader[StepBatches]:
        return DataLoader(_Steps(self), batch_size=None)

    def teardown(self, stage: str) -> None:
        if self._loader is not None:
            self._loader.close()
            self._loader = None


class _Steps(IterableDataset[StepBatches]):
    """What a DataLoader asks for; it starts where the module stands."""

    def __init__(self, data: StageData) -> None:
        self._data = data

    def __iter__(self) -> Iterator[StepBatches]:
        return self._data.steps(self._data._module.progress.stage_step)
