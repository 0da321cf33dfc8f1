"""What each stage of a run does: its length, its loss and its optimizer. The entry points say which `type` it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from ups.config.model import ModelConfig
from ups.config.setting import REQUIRED, PartName, PartSection, Section, section, setting
from ups.registry import LOSSES, OPTIMIZERS, SCHEDULES, STAGES

_AUGMENT = "Show each sample under a random symmetry that its task declares, keyed by seed, step and window."
_BALANCE = "Loss balancing between tasks: 0 none; 1 counts equal relative improvements equally"
_UPDATE_RULE = "Update rule; muon is for the matrices of a network, with adamw for everything else."
_MATRIX_RATE = "Peak learning rate of the matrices when type is 'muon'; the schedule is the same."
_CLIP_NORM = "Largest global gradient norm; 0 turns this limit off."
_CLIP_RATIO = "Largest global gradient norm relative to its moving average, after 20 updates; 0 turns this limit off."
_WEIGHT_DECAY = (
    "Decoupled weight decay of matrices, never of biases and norms; with muon of those that it orthogonalizes."
)


class OptimConfig(Section):
    """Optimizer and schedule of one stage."""

    type: Annotated[str, PartName(OPTIMIZERS)] = setting("adamw", _UPDATE_RULE)
    learning_rate: float = setting(1e-3, "Peak learning rate, after warm-up.", gt=0, le=10)
    matrix_learning_rate: float = setting(5e-3, _MATRIX_RATE, gt=0, le=10)
    schedule: Annotated[str, PartName(SCHEDULES)] = setting(
        "cosine", "How the learning rate falls from the peak to final_fraction of it, after warm-up."
    )
    final_fraction: float = setting(0.01, "Last learning rate relative to the peak.", ge=0, le=1)
    warmup_fraction: float = setting(0.05, "Part of the stage in which the rate rises linearly.", ge=0, le=1)
    weight_decay: float = setting(1e-5, _WEIGHT_DECAY, ge=0, le=1)
    beta1: float = setting(0.9, "Memory of the mean of the gradient (momentum for sgd).", ge=0, lt=1)
    beta2: float = setting(0.99, "Memory of the mean square of the gradient.", ge=0, lt=1)
    clip_norm: float = setting(1.0, _CLIP_NORM, ge=0)
    clip_ratio: float = setting(0.0, _CLIP_RATIO, ge=0, le=1000)

    @model_validator(mode="after")
    def _ratio_leaves_usual_norms(self) -> Self:
        if 0 < self.clip_ratio <= 1:
            raise ValueError(f"clip_ratio ({self.clip_ratio:g}) must be above 1, or 0: a usual norm must pass")
        return self


class StageLength(PartSection):
    """How long a stage runs: a number of steps, or a time from which the number of steps follows."""

    steps: int | None = setting(None, "Optimizer steps; or give budget_seconds.", unit="steps", ge=1, le=10**9)
    budget_seconds: float | None = setting(
        None,
        "Time for the stage; the number of steps is estimated after 5 % of it and adjusted on the way.",
        unit="seconds",
        gt=0,
    )
    budget_clock: Literal["wall", "cpu"] = setting(
        "wall",
        "What budget_seconds counts: wall time, or CPU time of a rank and its loader workers, which a stage of a "
        "fixed number of steps then records too.",
    )
    optim: OptimConfig = section(OptimConfig, "Optimizer and schedule of this stage.")

    @model_validator(mode="after")
    def _one_length(self) -> Self:
        if (self.steps is None) == (self.budget_seconds is None):
            raise ValueError("give either steps or budget_seconds, and not both; null takes one away")
        return self

    @property
    def counts_seconds(self) -> bool:
        """Whether progress records the time that the stage has used."""
        return self.budget_seconds is not None or self.budget_clock == "cpu"


class StageConfig(StageLength):
    """Base of the settings of a stage. What a stage needs is declared here, where checks need no torch.

    trains_latents: leaves an encoder and a decoder behind that later stages can stand on. needs_linear_part: trains the
    linear part of a network that has one. needs_start: trains on from weights that an earlier stage, or start_from,
    gives it.
    """

    registry = STAGES
    trains_latents: ClassVar[bool] = False
    needs_linear_part: ClassVar[bool] = False
    needs_start: ClassVar[bool] = False

    type: str = setting(REQUIRED, "Which stage this is.")
    start_from: str | None = setting(
        None,
        "Weights to start from instead of those of the stage before: the type of an earlier stage, or a run, bundle or "
        "checkpoint. Weights only; tasks and fields may differ.",
        min_length=1,
    )
    start_task: str | None = setting(
        None, "As which task of start_from the one task of the data begins; names stand for each other in their order."
    )
    tasks: list[str] | None = setting(
        None, "Tasks of the data that this stage trains on, by name; default all of them.", min_length=1
    )
    batch_size: int | None = setting(
        None,
        "Windows of each task in a step of this stage, over all ranks together; default what data says.",
        unit="windows",
        formerly="block_size",
        ge=1,
        le=10**6,
    )

    @property
    def cache_place(self) -> str | None:
        """The directory of latents that this stage reads; None if it reads none."""
        return getattr(self, "cache", None)

    @property
    def needs_latents(self) -> bool:
        """Whether only a model with latents can be trained by this stage."""
        return self.trains_latents

    @property
    def needs_trained_latents(self) -> bool:
        """Whether a stage that trains the latents must come before."""
        return False

    @property
    def num_members(self) -> int:
        """Members that validation scores together, of what this stage trains; 0 if that has no members."""
        return int(getattr(self, "members", 0))

    @property
    def needs_noise(self) -> bool:
        """Whether members differ by noise that the operator's network must take."""
        return False

    def problem_with_model(self, model: ModelConfig) -> str:
        """Why this stage cannot train `model`; '' if it can."""
        if self.needs_latents and not model.has_latents:
            return f"model.type '{model.type}' has no latents to train on; use latent_operator"
        if self.needs_linear_part and not model.has_linear_part:
            return f"model.type '{model.type}' has no linear part to fit"
        if self.needs_noise and not model.noise_numbers:
            able = [name for name, kind in ModelConfig.kinds().items() if "noise_size" in kind.model_fields]
            return (
                f"the members of '{self.type}' differ by noise, and the model takes none; set model.noise_size, such "
                f"as 16 (model.type {' or '.join(able)})"
            )
        return ""

    def problem_with_order(self, earlier: Sequence[StageConfig]) -> str:
        """Why this stage cannot come after the stages `earlier`; '' if it can."""
        if self.cache_place and self.start_from in [stage.type for stage in earlier]:
            return (
                f"a cache is written before the run, and weights of stage '{self.start_from}' are known only in it; "
                "start from a run, bundle or checkpoint"
            )
        if self.start_task is not None and self.start_from in (None, *[stage.type for stage in earlier]):
            return "start_task is a task of other weights: give start_from a run, bundle or checkpoint, too"
        if self.start_from is not None:
            return ""
        if self.needs_trained_latents and not any(stage.trains_latents for stage in earlier):
            able = [name for name, kind in StageConfig.kinds().items() if kind.trains_latents]
            return f"'{self.type}' on latents needs a stage before it that trains them: {' or '.join(able)}"
        if self.needs_start and not earlier:
            return (
                f"'{self.type}' continues from learned weights: put a stage before it, or say with start_from where "
                "they are"
            )
        made = {name for stage in earlier for name in stage.networks[:1]}
        missing = [name for name in self.networks[1:] if name not in made]
        if missing:
            return (
                f"'{self.type}' learns from the network '{missing[0]}': put the stage before it that trains that, or "
                "say with start_from where it is"
            )
        return ""

    def trains(self, task: str) -> bool:
        """Whether a task of the recipe, by name, is one that this stage trains on."""
        return self.tasks is None or task in self.tasks

    @property
    def networks(self) -> tuple[str, ...]:
        """The networks next to the operator that this stage needs, the one that it trains first."""
        return ()

    def window_frames(self, context_frames: int) -> int:
        """Frames that a sample of a transient task needs: those that are given, and each step that it trains."""
        return context_frames + int(getattr(self, "unroll_steps", 1))


class AutoencodeStageConfig(StageConfig):
    """Train encoder and decoder: fields -> latent tokens -> fields."""

    trains_latents = True

    type: Literal["autoencode"] = setting("autoencode", "Which stage this is.")
    inverse_weight: float = setting(
        0.1, "Weight of the loss that re-encoding a decoded latent gives that latent back.", ge=0, le=100
    )
    augment: bool = setting(True, _AUGMENT, formerly="jitter")

    def window_frames(self, context_frames: int) -> int:
        return context_frames


class LinearOptimConfig(OptimConfig):
    """Optimizer and schedule of a stage that fits few, separate numbers."""

    learning_rate: float = setting(5e-3, "Peak learning rate, after warm-up.", gt=0, le=10)
    final_fraction: float = setting(0.0, "Last learning rate relative to the peak.", ge=0, le=1)
    weight_decay: float = setting(0.0, _WEIGHT_DECAY, ge=0, le=1)
    beta2: float = setting(0.95, "Memory of the mean square of the gradient.", ge=0, lt=1)
    clip_norm: float = setting(0.0, _CLIP_NORM, ge=0)


class LinearStageConfig(StageConfig):
    """Fit the linear part of the network alone, before the rest can explain what it would find."""

    needs_linear_part = True

    type: Literal["linear"] = setting("linear", "Which stage this is.")
    optim: LinearOptimConfig = section(LinearOptimConfig, "Optimizer and schedule of this stage.")
    noise: float = setting(
        0.01,
        "Largest noise on the given frames; teaches the linear part to damp waves that the data lacks.",
        unit="standard deviations of the state",
        ge=0,
        le=1,
    )
    keep_below: float = setting(
        0.7,
        "A task keeps its linear part if the error is below this part of that of no change; else it starts at zero.",
        gt=0,
        le=10,
    )
    augment: bool = setting(True, _AUGMENT)


class OperatorStageConfig(StageConfig):
    """Train the step in time (or the map from given fields to the target, for steady tasks)."""

    type: Literal["operator"] = setting("operator", "Which stage this is.")
    loss: Annotated[str, PartName(LOSSES)] = setting(
        "relative_l2",
        "Error of a sample: relative to the size of its change, of each field relative to the field itself (as scores "
        "are), or plain mean square.",
    )
    balance: float = setting(0.0, f"{_BALANCE}.", ge=0, le=1)
    relative_floor: float = setting(
        1.0,
        "Smallest change that relative_l2 divides by: samples in which less happens are not weighted up further.",
        unit="standard deviations of increments",
        ge=1e-6,
        le=10,
    )
    space: Literal["physical", "latent"] = setting(
        "physical", "Where the loss is taken: decoded fields (end to end), or latents of a frozen autoencoder."
    )
    decode_weight: float = setting(
        1.0,
        "Weight of the error of the decoded fields relative to that of the latents, when space is 'latent'.",
        ge=0,
        le=100,
    )
    cache: str | None = setting(
        None,
        "Directory of the latents of the encoder that the stage starts from, written by `ups data cache`; default: "
        "they are encoded in every step. Its content is part of the run, its place is not.",
        min_length=1,
        may_change=True,
    )
    cache_dtype: Literal["float32", "bfloat16", "float16"] = setting("float32", "Numbers of the cache.")
    unroll_steps: int = setting(1, "Model steps in a training sample.", unit="steps", ge=1, le=64)
    pushforward_steps: int = setting(
        0, "Of those, how many leading steps run without gradient (pushforward).", unit="steps", ge=0, le=63
    )
    noise: float = setting(
        0.005,
        "Largest noise on the given frames of a transient task; teaches the step to damp what is not in the data.",
        unit="deviations over space of the frame",
        ge=0,
        le=1,
    )
    noise_clean: float = setting(0.5, "Share of the samples that get no noise.", ge=0, le=1)
    conservation_weight: float = setting(
        0.0,
        "Weight of the change of integrals that a task conserves, in standard deviations of increments: for a model "
        "that does not keep them exactly (conserve: false, or a grid that is not uniform).",
        ge=0,
        le=1000,
    )
    inverse_weight: float = setting(
        0.0,
        "Weight of the losses of stage autoencode (fields -> latent -> fields, and back to the same latent), for a "
        "model with latents, when space is 'physical'.",
        ge=0,
        le=100,
    )
    augment: bool = setting(True, _AUGMENT, formerly="jitter")

    @property
    def needs_latents(self) -> bool:
        return self.space == "latent" or self.inverse_weight > 0

    @property
    def needs_trained_latents(self) -> bool:
        return self.space == "latent" and self.start_from is None

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.space == "latent" and self.loss == "nrmse":
            raise ValueError("loss 'nrmse' compares fields, and space is 'latent'; use relative_l2 or mse")
        if self.space == "latent" and (self.inverse_weight or self.conservation_weight):
            raise ValueError("inverse_weight and conservation_weight are for fields, and space is 'latent'")
        if self.cache and (self.space != "latent" or not self.start_from):
            raise ValueError("cache holds latents of the encoder of start_from: give that too, and space: latent")
        if self.pushforward_steps >= self.unroll_steps:
            raise ValueError(
                f"pushforward_steps ({self.pushforward_steps}) must be below unroll_steps ({self.unroll_steps})"
            )
        return self


# From docs/stages.md#what-correctors-are-worth: a flow is as good at 0.3 to 3 times these, an ensemble is not.
_FLOW_RATES = {"learning_rate": 2e-3, "matrix_learning_rate": 5e-3}
_ENSEMBLE_RATES = {"learning_rate": 1.5e-4, "matrix_learning_rate": 3.75e-4}


class CorrectorOptimConfig(OptimConfig):
    """Optimizer and schedule of a stage that trains on from what has been learned."""

    type: Annotated[str, PartName(OPTIMIZERS)] = setting("muon", _UPDATE_RULE)
    learning_rate: float = setting(5e-4, "Peak learning rate, after warm-up.", gt=0, le=10)
    matrix_learning_rate: float = setting(1.25e-3, _MATRIX_RATE, gt=0, le=10)
    weight_decay: float = setting(0.0, _WEIGHT_DECAY, ge=0, le=1)
    clip_norm: float = setting(0.0, _CLIP_NORM, ge=0)
    clip_ratio: float = setting(3.0, _CLIP_RATIO, ge=0, le=1000)


class CorrectorStageConfig(StageConfig):
    """Train what covers the part of a step that a single prediction leaves open: members that differ by noise."""

    needs_start = True

    type: Literal["corrector"] = setting("corrector", "Which stage this is.")
    kind: Literal["ensemble", "flow"] = setting(
        "flow",
        "flow: a second network samples the residual of the frozen operator, by flow matching, at rates 2e-3 and 5e-3 "
        "where optim names none; the operator stays as it is. ensemble: the operator trained on, with noise in its "
        "condition, by almost fair CRPS, at 1.5e-4 and 3.75e-4.",
    )
    optim: CorrectorOptimConfig = section(CorrectorOptimConfig, "Optimizer and schedule of this stage.")
    members: int = setting(
        2,
        "Members of a training sample (ensemble: each costs a forward and backward pass), and of validation.",
        unit="members",
        ge=2,
        le=16,
    )
    unroll_steps: int = setting(2, "Model steps in a training sample.", unit="steps", ge=1, le=64)
    balance: float = setting(
        0.5,
        f"{_BALANCE}; of kind ensemble. The losses of flow have one size for all tasks.",
        ge=0,
        le=1,
    )
    augment: bool = setting(True, _AUGMENT)

    @model_validator(mode="before")
    @classmethod
    def _rates_of_the_kind(cls, value: Any) -> Any:
        """The network of a flow starts from nothing, as an operator does; an ensemble must keep what it has learned."""
        optim = value.get("optim", {}) if isinstance(value, dict) else None
        if not isinstance(optim, dict):
            return value
        rates = _ENSEMBLE_RATES if value.get("kind") == "ensemble" else _FLOW_RATES
        return {**value, "optim": {**rates, **optim}}

    @property
    def needs_noise(self) -> bool:
        return self.kind == "ensemble"

    @property
    def networks(self) -> tuple[str, ...]:
        return ("flow",) if self.kind == "flow" else ()


class DistillStageConfig(StageConfig):
    """Train a student that draws in one evaluation what the corrector of kind flow draws in several."""

    needs_start = True

    type: Literal["distill"] = setting("distill", "Which stage this is.")
    optim: CorrectorOptimConfig = section(CorrectorOptimConfig, "Optimizer and schedule of this stage.")
    members: int = setting(2, "Members that validation scores together.", unit="members", ge=2, le=16)
    unroll_steps: int = setting(2, "Model steps in a training sample.", unit="steps", ge=1, le=64)
    augment: bool = setting(True, _AUGMENT)

    @property
    def networks(self) -> tuple[str, ...]:
        return ("student", "flow")


class SteadyStageConfig(StageConfig):
    """Train the solution of steady tasks, by their own network if the recipe has one, before and after refinement."""

    type: Literal["steady"] = setting("steady", "Which stage this is.")
    balance: float = setting(0.0, f"{_BALANCE}.", ge=0, le=1)
    refined_weight: float = setting(
        1.0,
        "Weight of the error after the model's refine_steps, relative to the one before; of tasks that have them.",
        ge=0,
        le=100,
    )
    augment: bool = setting(True, _AUGMENT)
