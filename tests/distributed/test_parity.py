"""The same global batch gives the same weights, whoever computes it: on real tasks of 1D, 2D and steady kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.latents import prepare_latents
from tests.support.mixture import write_mixture
from tests.support.parity import BATCH_SIZE, LIMITS, Arrangement, distance, global_windows, run_variants
from ups.config.schema import EngineConfig
from ups.distributed.runtime import Runtime
from ups.testing.ranks import launch
from ups.training.averages import Meters

pytestmark = [pytest.mark.processes, pytest.mark.timeout(2400)]

STEPS = 8
# A larger rate than that of the benchmark: as far as 20 steps of that go.
RATE = 4.0
# A representative part; `benchmarks/engine/parity.py --full` runs every combination.
KINDS: list[dict[str, Any]] = [
    {"precision": "float64", "optimizer": "adamw", "rate": RATE},
    {"precision": "float32", "optimizer": "sgd"},
    {"precision": "float64", "optimizer": "adamw", "joint": True, "rate": RATE},
    {
        "precision": "float64",
        "optimizer": "adamw",
        "joint": True,
        "stage": "corrector",
        "steps": 8,
        "settings": {"kind": "ensemble"},
    },
    {"precision": "float64", "optimizer": "adamw", "joint": True, "stage": "corrector", "steps": 4},
    {"precision": "float64", "optimizer": "adamw", "joint": True, "stage": "distill", "steps": 4},
    {"precision": "float64", "optimizer": "adamw", "joint": True, "stage": "steady", "rate": RATE},
    {"precision": "float64", "optimizer": "adamw", "model": "deep_encoder", "latents": True, "rate": RATE},
]
ARRANGEMENTS = [Arrangement(2, "ddp", 1), Arrangement(2, "fsdp", 2)]
# Slower by far on two cores: every kind with the tests that take long, else the plain stage on one task and on all.
LARGE = [Arrangement(2, "ddp", 4), Arrangement(4, "fsdp", 1)]
PLAIN = [0, 1, 2]


def variants(latents: dict[str, Any], *micro_batches: int) -> list[dict[str, Any]]:
    kinds = [kind | ({"settings": latents} if kind.get("latents") else {}) for kind in KINDS]
    return [kind | {"micro_batch_size": m} for m in micro_batches for kind in kinds]


def limit_of(kind: dict[str, Any]) -> float:
    return LIMITS[kind["precision"], kind["optimizer"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def tasks(folder: Path) -> list[dict[str, Any]]:
    return write_mixture(folder)


@pytest.fixture(scope="module")
def latents(folder: Path, tasks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a stage needs to read latents of a frozen encoder."""
    return prepare_latents(folder, tasks)


def trained(
    folder: Path,
    tasks: list[dict[str, Any]],
    ranks: int,
    strategy: str,
    label: str,
    chosen: list[dict[str, Any]],
    engine: dict[str, Any] | None = None,
) -> list[Any]:
    """What `run_variants` returns on each rank. label: of the files with weights, so one for each call."""
    arguments = {
        "tasks": tasks,
        "folder": str(folder),
        "strategy": strategy,
        "engine": engine or {},
        "steps": STEPS,
        "label": label,
        "variants": chosen,
    }
    return launch(run_variants, ranks, deadline=900, arguments=arguments)


@pytest.fixture(scope="module")
def alone(folder: Path, tasks: list[dict[str, Any]], latents: dict[str, Any]) -> list[Any]:
    return trained(folder, tasks, 1, "single", "alone", variants(latents, 8, 2))


def test_micro_batches_on_one_rank_change_nothing(alone: list[Any]) -> None:
    for number, kind in enumerate(KINDS):
        whole, cut = alone[0][number], alone[0][number + len(KINDS)]
        assert distance(whole["weights"], cut["weights"]) <= limit_of(kind)


@pytest.mark.parametrize(
    ("arrangement", "numbers"),
    [
        *((a, list(range(len(KINDS)))) for a in ARRANGEMENTS),
        (LARGE[1], PLAIN),
        pytest.param(LARGE[0], PLAIN, marks=pytest.mark.long),
        *(pytest.param(a, list(range(len(PLAIN), len(KINDS))), marks=pytest.mark.long) for a in LARGE),
    ],
    ids=lambda value: f"{len(value)} kinds" if isinstance(value, list) else str(value),
)
def test_many_ranks_train_like_one(
    arrangement: Arrangement,
    numbers: list[int],
    alone: list[Any],
    folder: Path,
    tasks: list[dict[str, Any]],
    latents: dict[str, Any],
) -> None:
    every = variants(latents, arrangement.micro_batch_size)
    label = f"{arrangement.strategy}_{arrangement.ranks}_{arrangement.accumulation}_{numbers[0]}"
    chosen = [every[number] for number in numbers]
    results = trained(folder, tasks, arrangement.ranks, arrangement.strategy, label, chosen)
    for found, number in enumerate(numbers):
        assert global_windows(results, found, STEPS) == global_windows(alone, number, STEPS)
        assert alone[0][number]["moved"] > 0.01
        assert distance(alone[0][number]["weights"], results[0][found]["weights"]) <= limit_of(KINDS[number])


@pytest.mark.parametrize(
    ("arrangement", "engine"),
    [
        (Arrangement(4, "fsdp", 1), {"shard_ranks": 2}),
        pytest.param(Arrangement(2, "fsdp", 2), {"offload": True}, marks=pytest.mark.long),
        (Arrangement(2, "ddp", 1), {"backend": "gloo"}),
    ],
    ids=["two copies of two shards", "offload", "backend"],
)
def test_other_ways_to_spread_a_model_change_nothing(
    arrangement: Arrangement, engine: dict[str, Any], alone: list[Any], folder: Path, tasks: list[dict[str, Any]]
) -> None:
    numbers = [0, 2]
    chosen = [KINDS[number] | {"micro_batch_size": arrangement.micro_batch_size} for number in numbers]
    label = "other_" + "_".join(engine)
    results = trained(folder, tasks, arrangement.ranks, arrangement.strategy, label, chosen, engine)
    for found, number in enumerate(numbers):
        assert distance(alone[0][number]["weights"], results[0][found]["weights"]) <= limit_of(KINDS[number])


@pytest.mark.long
def test_compiled_blocks_train_alike(alone: list[Any], folder: Path, tasks: list[dict[str, Any]]) -> None:
    numbers = [0, 2]
    chosen = [KINDS[number] | {"micro_batch_size": BATCH_SIZE, "compile": True} for number in numbers]
    results = trained(folder, tasks, 1, "single", "compiled", chosen)
    for found, number in enumerate(numbers):
        assert distance(alone[0][number]["weights"], results[0][found]["weights"]) <= limit_of(KINDS[number])


# SGD moves weights by the gradients themselves, where AdamW hides their scale; 12 windows can be cut in three.
GRADIENTS: list[dict[str, Any]] = [
    {"precision": "float64", "optimizer": "sgd", "joint": True, "steps": 3, "batch_size": 12} | settings
    for settings in ({}, {"settings": {"balance": 0.0}})
]


def gradients(folder: Path, tasks: list[dict[str, Any]], *arrangements: Arrangement) -> list[Any]:
    """Joint trainings in arrangements of equal ranks and strategy: with and without balance in each."""
    first = arrangements[0]
    chosen = [
        kind | {"micro_batch_size": a.micro_batch_of(kind["batch_size"])} for a in arrangements for kind in GRADIENTS
    ]
    label = f"gradients_{first.strategy}_{first.ranks}_{first.accumulation}"
    return list(trained(folder, tasks, first.ranks, first.strategy, label, chosen)[0])


@pytest.fixture(scope="module")
def gradients_alone(folder: Path, tasks: list[dict[str, Any]]) -> list[Any]:
    return gradients(folder, tasks, *(Arrangement(1, "single", number) for number in (1, 2, 3, 4)))


def test_balanced_gradients_do_not_depend_on_micro_batches(gradients_alone: list[Any]) -> None:
    for number, found in enumerate(gradients_alone):
        whole = gradients_alone[number % len(GRADIENTS)]
        assert distance(whole["weights"], found["weights"]) <= 1e-10 * whole["moved"]
    balanced, plain = gradients_alone[: len(GRADIENTS)]
    assert distance(balanced["weights"], plain["weights"]) > 0.01 * plain["moved"]


@pytest.mark.parametrize(
    "arrangement",
    [
        Arrangement(2, "ddp", 1),
        Arrangement(2, "ddp", 3),
        Arrangement(2, "fsdp", 2),
        Arrangement(2, "fsdp", 3),
        Arrangement(4, "ddp", 3),
        Arrangement(4, "fsdp", 1),
    ],
    ids=str,
)
def test_balanced_gradients_do_not_depend_on_ranks(
    arrangement: Arrangement, gradients_alone: list[Any], folder: Path, tasks: list[dict[str, Any]]
) -> None:
    results = gradients(folder, tasks, arrangement)
    for whole, found in zip(gradients_alone[: len(GRADIENTS)], results, strict=True):
        assert whole["moved"] > 1e-4
        assert distance(whole["weights"], found["weights"]) <= 1e-10 * whole["moved"]


# Joint: 7 or 1 windows of the first task and 4 of each other one, so that some ranks have none of a task.
UNEVEN: list[dict[str, Any]] = [
    {"precision": "float64", "optimizer": "sgd", "joint": True, "steps": 3, "batch_size": 7, "micro_batch_size": 2},
    {"precision": "float64", "optimizer": "sgd", "joint": True, "steps": 2, "batch_size": 1, "micro_batch_size": 2}
    | {"stage": "corrector"},
    {"precision": "float64", "optimizer": "sgd", "steps": 3, "batch_size": 3, "micro_batch_size": 3},
]


@pytest.fixture(scope="module")
def uneven_alone(folder: Path, tasks: list[dict[str, Any]]) -> list[Any]:
    return trained(folder, tasks, 1, "single", "uneven", UNEVEN)


@pytest.mark.parametrize(
    ("ranks", "strategy"),
    [
        (2, "ddp"),
        (3, "fsdp"),
        (4, "ddp"),
        pytest.param(2, "fsdp", marks=pytest.mark.long),
        pytest.param(3, "ddp", marks=pytest.mark.long),
        pytest.param(4, "fsdp", marks=pytest.mark.long),
    ],
)
def test_batches_that_ranks_cannot_share_equally_train_like_on_one(
    ranks: int, strategy: str, uneven_alone: list[Any], folder: Path, tasks: list[dict[str, Any]]
) -> None:
    results = trained(folder, tasks, ranks, strategy, f"uneven_{strategy}_{ranks}", UNEVEN)
    for number, whole in enumerate(uneven_alone[0]):
        assert global_windows(results, number, STEPS) == global_windows(uneven_alone, number, STEPS)
        assert distance(whole["weights"], results[0][number]["weights"]) <= 1e-10 * whole["moved"]


def means_of_rank(arguments: dict[str, Any]) -> dict[str, float]:
    """What a rank reports that has seen a task of its own, and one that all have; a second time after nothing."""
    with Runtime.start(EngineConfig(device="cpu")) as runtime:
        meters = Meters(runtime.device, distributed=True)
        meters.add({"loss": torch.tensor([2.0, 1.0]), f"train/{runtime.rank}/loss": torch.tensor([6.0, 2.0])})
        means = meters.reduce()
        assert meters.reduce() == {}
        return means


def test_means_count_tasks_that_only_some_ranks_have_seen() -> None:
    means = {"loss": 2.0, "train/0/loss": 3.0, "train/1/loss": 3.0}
    assert launch(means_of_rank, 2, deadline=300, arguments={}) == [means, means]
