"""The recipe: everything a run depends on, as validated sections. Loading and overrides are in `recipe.py`."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from ups.buckets.client import is_address, parse_bucket_url
from ups.buckets.path import matching_paths
from ups.config.description import SourceConfig, TaskDescription
from ups.config.model import ModelConfig
from ups.config.setting import REQUIRED, PartName, Section, section, setting
from ups.config.stage import StageConfig
from ups.config.tracker import TrackerConfig
from ups.errors import ConfigError
from ups.registry import HOOKS, METRICS, READERS, TASKS

MEANS = ("rmse", "nrmse", "vrmse", "trmse")
COST = "step_milliseconds"
DRIFT = "drift"
# What a summary of scores has without the registered metrics (`ups.evaluation.accumulate`, `ups.evaluation.results`).
SCORES = (
    *MEANS,
    *(f"{name}_median" for name in MEANS),
    "one_step_trmse",
    "one_step_nrmse",
    "one_step_vrmse",
    "crmse",
    "frmse_low",
    "frmse_mid",
    "frmse_high",
    "max_error",
    "correlation_time",
    "num_blown_up",
    "num_diverged",
)
BEST = "best"


def known_metrics() -> tuple[str, ...]:
    """Every name that a condition may have: scores, registered metrics, drift of what is conserved, cost."""
    return tuple(dict.fromkeys((*SCORES, *METRICS.names(), DRIFT, COST)))


class GateCondition(Section):
    """One condition: a metric of the model on held-out data, and its limit."""

    metric: str = setting(
        REQUIRED,
        "Score of the model on the test split, such as one_step_trmse; drift: of conserved integrals, at its worst "
        "step; step_milliseconds: CPU time of a rollout step of one trajectory.",
    )
    at_most: float | None = setting(None, "The condition holds up to this value.")
    at_least: float | None = setting(None, "The condition holds from this value on.")
    relative_to: Literal["persistence", "training mean", "linear extrapolation", "best"] | None = setting(
        None, "Limits count times the same score of this reference; best: the best baseline."
    )
    tasks: list[str] | None = setting(
        None, "Tasks that it holds for; default every task that has such a score.", min_length=1, max_length=1000
    )

    @field_validator("metric")
    @classmethod
    def _known_metric(cls, value: str) -> str:
        if value not in known_metrics():
            raise ValueError(f"there is no metric of this name; known here: {', '.join(known_metrics())}")
        return value

    @model_validator(mode="after")
    def _has_a_limit(self) -> Self:
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("a condition has one limit: at_most or at_least")
        if self.relative_to is not None and self.metric in (DRIFT, COST):
            raise ValueError(f"{self.metric} is not compared with references: leave relative_to out")
        return self

    def words(self) -> str:
        """The condition in words: 'one_step_trmse at most 0.5 times persistence'."""
        limit = f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"
        other = {None: "", BEST: " times the best reference"}.get(self.relative_to, f" times {self.relative_to}")
        return f"{self.metric} {limit}{other}"


# As `ups.data.validate` names them; a test holds the two together.
FindingKind = Literal[
    "unreadable",
    "damaged",
    "not_finite",
    "constant_frame",
    "repeated_frame",
    "duplicate",
    "leakage",
    "not_conserved",
    "negative",
    "divergence",
    "boundary_value",
]


class RunConfig(Section):
    """Identity of the run."""

    name: str = setting(
        REQUIRED, "Name of the run; its directory is runs/<name> unless dir says otherwise.", may_change=True
    )
    dir: str | None = setting(None, "Directory of the run; default runs/<name>.", may_change=True)
    seed: int = setting(0, "Key of every random draw: weights, order of windows, noise.", ge=0, lt=2**63)

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", value):
            raise ValueError("must start with a letter or digit, then letters, digits, '_', '.', '-' (at most 128)")
        return value

    @field_validator("dir")
    @classmethod
    def _plain_dir(cls, value: str | None) -> str | None:
        # It stands in scripts, where a line break begins a command, and in what is printed.
        if value is not None and not value.isprintable():
            raise ValueError("must not hold line breaks or other control characters")
        return value


def _scheme(address: str) -> str:
    try:
        return parse_bucket_url(address).scheme
    except ConfigError as error:
        raise ValueError(f"{error.message}; {error.hint}") from None


class TaskConfig(Section):
    """One data source: a store, a file, or several files of one task."""

    name: str = setting(REQUIRED, "Name of the task in metrics and reports.")
    path: str | list[str] = setting(
        REQUIRED,
        "Store (.zarr), a file, a folder of files, a directory of The Well, a pattern (runs/*.npz), or a list of these "
        "of one task; on this host, or an address: s3://, gs://, https://.",
        may_change=True,
    )
    problem: str | None = setting(
        None,
        "Problem of PDEBench that the files hold, such as burgers1d, where they do not say so; taken on your word.",
    )
    description: TaskDescription | str | None = setting(
        None,
        "What the arrays of the path mean, where it does not say so: a task.yaml (relative to this file), or its "
        "content; default the task.yaml next to the data.",
    )
    format: str = setting("auto", "Which reader opens the path; auto recognizes it by its name and first bytes.")
    batch_size: int | None = setting(
        None,
        "Windows of this task in a step, over all ranks together; default data.batch_size.",
        unit="windows",
        formerly="block_size",
        ge=1,
    )
    weight: float = setting(1.0, "Share of this task's blocks when data.mixture is 'weights'.", gt=0, le=1e6)
    first_frame: int = setting(
        0,
        "Stored frames before this one are left out, as of data that are ill-posed where they begin.",
        unit="frames",
        ge=0,
        le=10**6,
    )
    time_stride: int = setting(1, "Use every n-th stored frame.", unit="frames", ge=1, le=10_000)
    space_stride: int = setting(1, "Use every n-th grid point along each axis.", unit="points", ge=1, le=1024)
    antialias: bool = setting(False, "Average over space_stride points instead of picking one.")
    valid_fraction: float = setting(0.1, "Part held out for validation where the file has no splits.", ge=0, lt=1)
    test_fraction: float = setting(
        0.1,
        "Part held out for the test where the file has no splits; at least 6 trajectories where there are 24.",
        ge=0,
        lt=1,
    )
    calibration_fraction: float = setting(
        0.0,
        "Part of the train split that is set aside for error bars, and that nothing else may read; at least 9 "
        "trajectories where there are 36.",
        ge=0,
        le=0.9,
    )
    source: SourceConfig | None = setting(
        None, "How `ups run` makes the path, a store, if it is not there.", may_change=True
    )
    allow: list[FindingKind] = setting(
        [], "Findings of `ups data validate` that are right for this data; `ups run` passes them.", may_change=True
    )

    @field_validator("path")
    @classmethod
    def _usable_addresses(cls, value: str | list[str]) -> str | list[str]:
        for address in filter(is_address, [value] if isinstance(value, str) else value):
            _scheme(address)
        return value

    @property
    def paths(self) -> list[str]:
        """The files, folders or stores, with those that a pattern means."""
        return matching_paths(self.path)

    @field_validator("format")
    @classmethod
    def _known_format(cls, value: str) -> str:
        if value != "auto" and value not in READERS.names():
            raise ValueError(f"there is no reader of this name; known here: auto, {', '.join(READERS.names())}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.valid_fraction + self.test_fraction >= 1:
            raise ValueError("valid_fraction + test_fraction must stay below 1: nothing would be left to train on")
        if self.source is not None and any(map(is_address, [self.path] if isinstance(self.path, str) else self.path)):
            raise ValueError("source: data is made on this host, and the path is an address")
        solver = None if self.source is None or self.source.type != "generate" else self.source.task or self.name
        if solver is not None and solver not in TASKS.names():
            raise ValueError(f"source: there is no solver '{solver}'; known here: {', '.join(TASKS.names())}")
        return self


class LoaderConfig(Section):
    """How batches are read."""

    workers: int = setting(0, "Reader processes of a rank; 0 reads in the loop.", unit="processes", ge=0, le=256)
    prefetch: int = setting(4, "Batches that a worker keeps ready.", unit="batches", ge=1, le=1024)
    timeout_seconds: float = setting(
        120.0, "A worker that delivers nothing for so long is reported as stuck.", unit="seconds", gt=0
    )


class DataConfig(Section):
    """Tasks and how they are mixed into the global batch of a step."""

    tasks: list[TaskConfig] = setting(REQUIRED, "The data sources.", min_length=1, max_length=1000)
    context_frames: int = setting(1, "Frames that a model sees before it predicts.", unit="frames", ge=1, le=64)
    batch_size: int = setting(
        32,
        "Windows of one task in a step, over all ranks together.",
        unit="windows",
        formerly="block_size",
        ge=1,
        le=10**6,
    )
    tasks_per_step: int | None = setting(
        None, "Task blocks in a step; default all tasks, at most 4.", unit="blocks", ge=1, le=1000
    )
    mixture: Literal["uniform", "proportional", "temperature", "weights"] = setting(
        "uniform", "Share of each task: equal, by size, by size^(1/temperature), or by its weight."
    )
    temperature: float = setting(2.0, "Flattens the mixture when it is 'temperature'; 1 is by size.", ge=1, le=1000)
    loader: LoaderConfig = section(LoaderConfig, "How batches are read.", may_change=True)
    cache_dir: str | None = setting(
        None,
        "Directory for blocks of data that is read from an object store, shared by all ranks of a host; default "
        "objects in the cache directory of the person.",
        may_change=True,
    )
    cache_bytes: int | None = setting(
        None,
        "What these blocks may take; default half of what the disk has left, at most 64 GiB.",
        unit="bytes",
        ge=16 << 20,
        may_change=True,
    )

    @model_validator(mode="after")
    def _distinct_names(self) -> Self:
        names = [t.name for t in self.tasks]
        twice = sorted({n for n in names if names.count(n) > 1})
        if twice:
            raise ValueError(f"two tasks are called '{twice[0]}'; give each its own name")
        return self

    @property
    def batch_sizes(self) -> list[int]:
        """Windows of each task in a step."""
        return [task.batch_size or self.batch_size for task in self.tasks]

    @property
    def blocks_per_step(self) -> int:
        return self.tasks_per_step if self.tasks_per_step is not None else min(4, len(self.tasks))


class EmaConfig(Section):
    """Exponential moving average of the weights; evaluation and bundle use it when it is on."""

    enabled: bool = setting(True, "Keep the average.")
    decay: float = setting(0.999, "Memory per step, after a warm-up.", ge=0, lt=1)


class EngineConfig(Section):
    """How the one training loop runs. The global batch is what `data` says, whatever stands here."""

    strategy: Literal["auto", "single", "ddp", "fsdp"] = setting(
        "auto",
        "Copies of the model per rank (ddp) or shards of it (fsdp); auto: single on one rank, else ddp.",
        may_change=True,
    )
    shard_ranks: int | None = setting(
        None,
        "Ranks over which fsdp spreads one copy of the model, such as those of a host; default all.",
        unit="ranks",
        ge=1,
        may_change=True,
    )
    offload: bool = setting(
        False,
        "Keep weights, gradients and optimizer of fsdp in CPU memory: less memory of the GPU, more time.",
        may_change=True,
    )
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "auto takes CUDA where there is one.", may_change=True)
    backend: Literal["auto", "gloo", "nccl"] = setting(
        "auto",
        "What sends tensors between ranks; auto: nccl for CUDA, else gloo. gloo with CUDA is slow; use it to test "
        "whether NCCL causes a failure.",
        may_change=True,
    )
    precision: Literal["float32", "bfloat16", "float64"] = setting(
        "float32", "Arithmetic of the model; bfloat16 keeps float32 weights."
    )
    float32_fraction: float = setting(
        0.0, "Last part of each stage that runs in float32 when precision is 'bfloat16'.", ge=0, le=1
    )
    micro_batch_size: Annotated[int, Field(ge=1)] | Literal["auto"] | None = setting(
        None,
        "Most windows of a task in one forward pass of a rank, which takes equal parts; auto: as many as fit into "
        "memory; default its share of a batch.",
        unit="windows",
        may_change=True,
        formerly="micro_batch",
    )
    activation_checkpointing: bool = setting(
        False, "Recompute blocks in the backward pass: less memory, more time.", may_change=True
    )
    compile: bool = setting(False, "Compile each block of the model.", may_change=True)
    hooks: list[Annotated[str, PartName(HOOKS)]] = setting(
        [], "Callbacks of plugins around steps and checkpoints, by name, in this order.", may_change=True
    )
    ema: EmaConfig = section(EmaConfig, "Moving average of the weights.")
    max_skipped_steps: int = setting(
        20, "Non-finite steps in a row after which the run stops.", unit="steps", ge=1, le=10**6
    )
    timeout_seconds: float = setting(
        600.0, "A collective that takes longer is an error.", unit="seconds", gt=0, may_change=True
    )
    max_seconds: float | None = setting(
        None,
        "After so long save and leave, as if SIGTERM had come (the time limit of a job).",
        unit="seconds",
        gt=0,
        may_change=True,
    )
    threads: int | None = setting(
        None,
        "CPU threads of a rank; default 1 with several ranks on a host.",
        unit="threads",
        ge=1,
        le=1024,
        may_change=True,
    )

    def strategy_on(self, ranks: int) -> str:
        """The strategy on this number of ranks."""
        return self.strategy if self.strategy != "auto" else "ddp" if ranks > 1 else "single"

    @property
    def fixed_micro_batch_size(self) -> int | None:
        """The micro-batch size that the recipe fixes; None for `auto`, and for the whole share of a rank."""
        return self.micro_batch_size if isinstance(self.micro_batch_size, int) else None

    @model_validator(mode="after")
    def _only_fsdp_has_shards(self) -> Self:
        settings = [name for name in ("shard_ranks", "offload") if getattr(self, name)]
        if settings and self.strategy != "fsdp":
            raise ValueError(f"{settings[0]} is about the shards of strategy 'fsdp', and strategy is '{self.strategy}'")
        return self


class CheckpointConfig(Section):
    """When the state is saved and how many copies stay."""

    interval_steps: int = setting(500, "Steps between checkpoints; the last step is always saved.", unit="steps", ge=1)
    keep: int = setting(3, "Checkpoints that stay.", unit="checkpoints", ge=1, le=10_000)
    asynchronous: bool = setting(True, "Write while training continues; the loop waits only for the copy.")
    mirror: str | None = setting(
        None, "Place in a bucket that gets a copy of the run while it is running: s3://BUCKET/PREFIX, one for each run."
    )

    @field_validator("mirror")
    @classmethod
    def _is_bucket(cls, value: str | None) -> str | None:
        if value is not None and _scheme(value) not in ("s3", "gs"):
            raise ValueError("a mirror is written and listed: use s3://BUCKET/PREFIX or gs://BUCKET/PREFIX")
        return value


class EvaluateConfig(Section):
    """Validation during training."""

    interval_steps: int | None = setting(
        None, "Steps between validations; default only at the end of a stage.", unit="steps", ge=1
    )
    max_trajectories: int = setting(64, "Held-out trajectories scored for each task.", unit="trajectories", ge=1)


class TrackingConfig(Section):
    """Where metrics go, in addition to metrics.jsonl in the run directory, which is always written."""

    log_interval_steps: int = setting(10, "Steps between rows of metrics.", unit="steps", ge=1)
    trackers: list[TrackerConfig] = setting([], "Other places that get the same rows, by type.", max_length=16)


class SuperviseConfig(Section):
    """What happens when a rank dies or stands still."""

    max_restarts: int = setting(3, "Restarts without a new checkpoint in between.", unit="restarts", ge=0, le=1000)


class NetworksConfig(Section):
    """Networks next to the operator, which `model` describes: what later stages train."""

    flow: ModelConfig | None = setting(
        None, "Draws what the operator's step leaves over: for a corrector of kind 'flow'; default: as model."
    )
    student: ModelConfig | None = setting(None, "Draws it in one evaluation: for stage distill; default: as flow.")
    steady: ModelConfig | None = setting(
        None, "Solves the steady tasks, for stage steady; default: the model itself learns them, next to others."
    )


class Recipe(Section):
    """A complete run."""

    version: Literal[1] = setting(1, "Version of the recipe format.")
    run: RunConfig = setting(REQUIRED, "Identity of the run.")
    data: DataConfig = setting(REQUIRED, "Tasks and how they are mixed.")
    model: ModelConfig = section(dict, "The model.")
    networks: NetworksConfig = section(NetworksConfig, "Networks next to the model, for the stages that train them.")
    stages: list[StageConfig] = setting(REQUIRED, "What is trained, in this order.", min_length=1, max_length=32)
    engine: EngineConfig = section(EngineConfig, "How the training loop runs.")
    checkpoint: CheckpointConfig = section(CheckpointConfig, "When the state is saved.", may_change=True)
    evaluate: EvaluateConfig = section(EvaluateConfig, "Validation during training.", may_change=True)
    tracking: TrackingConfig = section(TrackingConfig, "Where metrics go.", may_change=True)
    supervise: SuperviseConfig = section(SuperviseConfig, "Restarts and deadlines.", may_change=True)
    gate: list[GateCondition] = setting(
        [], "What the scores must reach before `ups run` makes a bundle.", may_change=True, max_length=256
    )

    @model_validator(mode="after")
    def _model_learns_all_tasks(self) -> Self:
        if not self.model.many_tasks and len(self.data.tasks) > 1:
            able = [name for name, kind in ModelConfig.kinds().items() if kind.many_tasks]
            raise ValueError(
                f"model.type '{self.model.type}' learns one task, and data.tasks has {len(self.data.tasks)}; "
                f"use {' or '.join(able)} to learn them together"
            )
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        for number, stage in enumerate(self.stages):
            earlier = self.stages[:number]
            problem = (
                stage.problem_with_model(self.model)
                or stage.problem_with_order(earlier)
                or self._stale_corrector(number)
            )
            if problem:
                raise ValueError(f"stages.{number}: {problem}")
        return self

    @model_validator(mode="after")
    def _named_tasks_exist(self) -> Self:
        named = {f"stages.{number}": stage.tasks for number, stage in enumerate(self.stages)}
        named |= {f"gate.{number}": condition.tasks for number, condition in enumerate(self.gate)}
        for path, tasks in named.items():
            unknown = sorted(set(tasks or ()) - set(self._task_names))
            if unknown:
                raise ValueError(f"{path}.tasks: data has no task '{unknown[0]}'")
        return self

    def _stale_corrector(self, number: int) -> str:
        """Why stage `number` makes an earlier corrector of kind flow wrong: it retrains the network that the corrector
        was fitted to; '' if it does not.
        """
        stage = self.stages[number]
        if stage.networks:
            return ""  # trains another network than those that predict
        again = [later for later in self.stages[number + 1 :] if later.networks == ("flow",)]
        renewed = {name for later in again for name in later.tasks or self._task_names}
        for before, earlier in enumerate(self.stages[:number]):
            if earlier.networks != ("flow",):
                continue
            tasks = sorted(set(earlier.tasks or self._task_names) - renewed)
            if self.networks.steady is not None:
                # Which tasks are steady is not known here: a stage for all of those has no other. What passes is
                # forgotten when the stage begins, if it has become wrong.
                whole = stage.type == "steady" and stage.tasks is None and earlier.tasks is not None
                tasks = [] if whole else [name for name in tasks if stage.trains(name)]
            if tasks:
                other = ", or give steady tasks their own network: networks.steady" if stage.type == "steady" else ""
                return (
                    f"'{stage.type}' retrains the network that the corrector of stages.{before} was fitted to "
                    f"(task '{tasks[0]}'); move it before the corrector{other}"
                )
        return ""

    @property
    def _task_names(self) -> list[str]:
        return [task.name for task in self.data.tasks]

    @property
    def network_configs(self) -> dict[str, ModelConfig]:
        """The settings of every network that the stages need, by name; the one that makes the step is `operator`."""
        needed = {name for stage in self.stages for name in stage.networks}
        configs = {"operator": self.model}
        if "flow" in needed:
            configs["flow"] = self.networks.flow or self.model
        if self.networks.steady is not None:
            configs["steady"] = self.networks.steady
        if "student" in needed:
            configs["student"] = self.networks.student or configs["flow"]
        return configs

    def data_of(self, index: int) -> DataConfig:
        """What stage `index` trains on: its tasks in the order of `data`, with its blocks."""
        stage = self.stages[index]
        if stage.tasks is None and stage.batch_size is None:
            return self.data
        tasks = [task for task in self.data.tasks if stage.trains(task.name)]
        if stage.batch_size is not None:
            tasks = [task.model_copy(update={"batch_size": stage.batch_size}) for task in tasks]
        per_step = self.data.tasks_per_step
        return self.data.model_copy(
            update={"tasks": tasks, "tasks_per_step": None if per_step is None else min(per_step, len(tasks))}
        )
