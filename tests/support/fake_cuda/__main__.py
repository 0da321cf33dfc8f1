"""Trains and evaluates recipes on a CUDA device that does not exist, and rolls out the shipped models.

    python -m tests.support.fake_cuda FOLDER RECIPE[,KEY=VALUE...][,plant=NAME] MODEL ...

Prints a JSON object: recipe as given -> stage -> {"step": what a GPU would suffer from in a step, "between": the same
around steps (rows of the log, validation, checkpoint), "module": tensors of the stage that stayed on the host, "error":
what ended the stage}; model -> task -> what its rollouts suffer from; "operators" -> all that the device was asked for.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.fake_cuda import DEVICE, Watch, install, left_on_host, on_device
from ups.config.recipe import resolve
from ups.config.schema import Recipe
from ups.distributed.runtime import Runtime, make_mesh
from ups.distributed.strategies import arrange, weight_dtype
from ups.formats.store_writer import StoreWriter
from ups.inference.simulator import Simulator
from ups.models.ensemble import has_members
from ups.plan.rehearsal import to_fake
from ups.run.assemble import OpenData, bare_stage, build_validation, open_data
from ups.run.planning import kinds_of
from ups.solvers.tasks import TASKS
from ups.spec.batch import Batch, RankInfo
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec
from ups.training.checkpoint import Checkpointer
from ups.training.engine import Engine
from ups.training.hooks import EvaluateHook, LogHook

POINTS = {1: 32, 2: 16, 3: 8}
# The first step (or rollout) makes what stays, such as constants; the second one counts.
STEPS = 2


class Given:
    """A loader of the batches that it got, again and again, in pinned memory as that of a rank with a GPU."""

    def __init__(self, groups: list[tuple[Batch, ...]]) -> None:
        self.groups = groups

    def batches_in_step(self, step: int) -> int:
        return len(self.groups)

    def windows_in_step(self, step: int) -> int:
        return sum(batch.num_samples for group in self.groups for batch in group)

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        while True:
            yield from (tuple(batch.pin_memory() for batch in group) for group in self.groups)

    def load_state_dict(self, state: dict[str, int]) -> None: ...


class Rows:
    def log(self, row: dict[str, Any]) -> None: ...


class Planted(nn.Module):
    """Keeps a tensor that `to` does not move."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(())


def plant(name: str, stage: nn.Module) -> None:
    """Put faults that a CPU does not show into the modules of a stage: a device mix, or all the others."""

    def after(module: nn.Module, inputs: Any, result: Any) -> Any:
        if not isinstance(result, Tensor):
            return None
        if name == "mix":
            return result + torch.zeros(result.shape[-1])
        float(result.detach().sum())
        torch.zeros(result.shape[-1]).to(result.device, non_blocking=True)
        whole = torch.ones(2, 2, dtype=torch.int64, device=result.device)
        torch.mm(whole, whole)
        torch.cumsum(torch.ones(2, device=result.device), 0)
        return None

    for module in list(stage.modules()):
        if not list(module.children()):
            module.register_forward_hook(after)
    stage.add_module("planted", Planted())


def groups_of(recipe: Recipe, opened: OpenData, index: int) -> list[tuple[Batch, ...]]:
    """As few micro-batches as there must be for every task."""
    groups, seen = [], set[str]()
    for kind in kinds_of(recipe, opened, index, 1):
        names = {batch.task.name for batch in kind.batches}
        if not names <= seen:
            seen |= names
            groups.append(kind.batches)
    return groups


def stage_on_device(recipe: Recipe, opened: OpenData, index: int, folder: Path, planted: str) -> dict[str, list[str]]:
    """What stage `index` suffers from, or what ended it."""
    found: dict[str, list[str]] = {"step": [], "between": [], "module": [], "error": []}
    try:
        train_stage(recipe, opened, index, folder, planted, found)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        traceback.print_exc()
        found["error"].append(f"{type(error).__name__}: {error}")
    return {name: sorted(set(rows)) for name, rows in found.items()}


def train_stage(
    recipe: Recipe, opened: OpenData, index: int, folder: Path, planted: str, found: dict[str, list[str]]
) -> None:
    """Train, validate and save for a checkpoint, and add to what was found."""
    groups = groups_of(recipe, opened, index)
    stepper, stage = bare_stage(recipe, opened, index)
    runtime = Runtime(RankInfo(0, 1, device_kind="cuda"), DEVICE, "single", 0, None, None, None)
    if recipe.engine.strategy == "fsdp":
        mesh = make_mesh("cuda", 2, recipe.engine.shard_ranks)
        runtime = Runtime(RankInfo(0, 2, 0, 2, "cuda"), DEVICE, "fsdp", 0, None, None, mesh)
    with on_device() as watch:
        to_fake(stage, weight_dtype(recipe.engine.precision), DEVICE)
        if planted:
            plant(planted, stage)
        readers = opened.readers_of(recipe, recipe.data_of(index))
        members = 2 if any(has_members(stepper, reader.task) for reader in readers) else 0
        validate = build_validation(
            recipe.evaluate.model_copy(update={"max_trajectories": 2}), readers, stepper, members
        )
        hooks = [EvaluateHook(validate, None, Rows()), LogHook(1, "stage", Rows())]
        length = recipe.stages[index].model_copy(update={"steps": STEPS, "budget_seconds": None})
        strategy = arrange(stage, runtime, recipe.engine)
        engine = Engine(runtime, strategy, Given(groups), config=recipe.engine, length=length, hooks=hooks)
        accumulate, update = engine._accumulate, engine._update

        def apart(do: Any, *arguments: Any) -> Any:
            found["between"] += watch.found
            watch.found.clear()
            result = do(*arguments)
            if engine.progress.stage_step + 1 == STEPS:
                found["step"] += watch.found
            watch.found.clear()
            return result

        engine._accumulate = lambda *arguments: apart(accumulate, *arguments)  # type: ignore[method-assign]
        engine._update = lambda *arguments: apart(update, *arguments)  # type: ignore[method-assign]
        engine.run()
        checkpointer = Checkpointer(runtime, folder, asynchronous=False)
        staged = checkpointer._copy(engine.state_tensors())
        assert {tensor.device.type for tensor in staged.values()} == {"cpu"}
        checkpointer.close()
        found["between"] += watch.found
        found["module"] += left_on_host(stage)


def rolled_out(name: str) -> dict[str, list[str]]:
    """What rollouts of a shipped model suffer from, by task."""
    simulator, found = Simulator.load(name), {}
    simulator._device = DEVICE
    with on_device() as watch:
        to_fake(simulator._stepper, None, DEVICE)
        for calibration in simulator._bundle.calibrations.values():
            for part, tensor in vars(calibration.model).items():
                object.__setattr__(calibration.model, part, torch.empty(tensor.shape, device=DEVICE))
        for task, spec in simulator.tasks.items():
            space = simulator._bundle.info.space(task)
            fields: dict[str, Any] = {"static": np.ones((spec.num_channels("static"), *space), np.float32)}
            if not spec.steady:
                fields["state"] = np.ones((spec.num_channels("state"), *space), np.float32)
            numbers = {p.name: (p.minimum + p.maximum) / 2 for p in spec.parameters}
            level = 0.9 if task in simulator._bundle.calibrations else None
            given = {role: values for role, values in fields.items() if len(values)}
            for _ in range(STEPS):
                watch.found.clear()
                simulator.rollout(steps=1 if spec.steady else 4, parameters=numbers, task=task, level=level, **given)
            found[task] = sorted(set(watch.found))
    return found


def spec_of(name: str) -> TaskSpec:
    """That of the benchmark's task of this name; for a published set a scalar with as many dimensions."""
    if name in TASKS:
        return TASKS[name].spec
    axes = tuple(AxisSpec(axis) for axis in "xyz"[: int(name[-2])])
    return TaskSpec(name, (FieldSpec("u"),), axes, dt=0.1, symmetries=("translation", "reflection"))


def write_stores(recipe: dict[str, Any], folder: Path) -> None:
    """Random fields in the place of each task's data."""
    draw = np.random.default_rng(0)
    for entry in recipe["data"]["tasks"]:
        spec = spec_of(entry["name"])
        grid = [POINTS[spec.num_spatial_dims]] * spec.num_spatial_dims
        frames = 0 if spec.steady else 5
        path = folder / f"{spec.name}.zarr"
        entry_of_ours = {"name": spec.name, "path": str(path)}
        for key in set(entry) - {"name", "batch_size", "micro_batch_size"}:
            del entry[key]
        entry |= entry_of_ours
        coordinates = [(np.arange(n) + 0.5) / n * axis.extent for n, axis in zip(grid, spec.axes, strict=True)]
        with StoreWriter(path, spec, coordinates, frames) as writer:
            for split in ("train", "valid", "test"):
                for _ in range(4):
                    roles: dict[str, Any] = {
                        role: draw.uniform(0.5, 1.5, size=(spec.num_channels(role), *grid))
                        for role in ("static", "target")
                        if spec.num_channels(role)
                    }
                    if frames:
                        roles["state"] = draw.uniform(0.5, 1.5, size=(frames, spec.num_channels("state"), *grid))
                    values = [draw.uniform(p.minimum, p.maximum) for p in spec.parameters]
                    writer.append(split, **roles, parameters=values)


def main() -> None:
    folder, *named = sys.argv[1:]
    install()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    found: dict[str, Any] = {}
    asked: set[str] = set()
    for number, name in enumerate(named):
        path, *changes = name.split(",")
        planted = changes.pop().removeprefix("plant=") if "plant=" in name else ""
        if not path.endswith(".yaml"):
            found[name] = rolled_out(name)
            asked |= Watch.operators
            continue
        plain = resolve(path, changes).recipe.model_dump(mode="json")
        write_stores(plain, Path(folder) / str(number))
        recipe = Recipe.model_validate(plain)
        with open_data(recipe) as opened:
            found[name] = {
                f"{n} {stage.type}": stage_on_device(recipe, opened, n, Path(folder) / f"{number}.{n}", planted)
                for n, stage in enumerate(recipe.stages)
            }
        asked |= Watch.operators if not planted else set()
        Watch.operators.clear()
    print(json.dumps(found | {"operators": sorted(asked)}))


if __name__ == "__main__":
    main()
