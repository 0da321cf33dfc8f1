"""Counts where the host waits for the device in a training step.

    python -m tests.support.device_waits FOLDER RECIPE[,KEY=VALUE...] ...

The device does not exist: its tensors have shapes and no numbers. A program of its own, because a process cannot get
rid of the device again. Prints a JSON object: recipe as given -> stage -> waits of one step.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

from ups.config.recipe import resolve
from ups.config.schema import Recipe
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import Single, weight_dtype
from ups.formats.store_writer import StoreWriter
from ups.models import normalization
from ups.plan.rehearsal import HostNumbers, fake_tensors, make_fake
from ups.run.assemble import OpenData, bare_stage, open_data
from ups.run.planning import kinds_of
from ups.solvers.tasks import TASKS
from ups.spec.batch import Batch, RankInfo
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec
from ups.training.engine import Engine


class Module(_DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend("gpu", backend_module=Module())
DEVICE = torch.device("gpu:0")
POINTS = {1: 32, 2: 16, 3: 8}
# Operations whose result decides what the host does next.
ANSWERS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "_unique2", "unique_dim"}
# The first step makes what stays, such as constants; the second one counts.
STEPS = 2


class Waits(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes reads of the device, and copies between it and the host that the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        on_device = any(t.device.type == DEVICE.type for t in tensors)
        if name in ANSWERS and on_device:
            self.note(name)
            if name == "_local_scalar_dense":
                return 1  # an answer, so that the step goes on
        elif name == "index" and on_device:
            indices = [i for i in args[1] if i is not None]
            if any(i.dtype == torch.bool or i.device != args[0].device for i in indices):
                self.note("index by a mask, or by numbers of the host")
        elif name in ("_to_copy", "copy_"):
            source = args[1] if name == "copy_" else args[0]
            target = args[0].device if name == "copy_" else kwargs.get("device") or source.device
            non_blocking = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
            if source.device.type != target.type and not (non_blocking and target.type == DEVICE.type):
                self.note(f"{name} from {source.device.type} to {target.type}")
        return func(*args, **kwargs)

    def note(self, what: str) -> None:
        """Keep the innermost place in the package."""
        where = [
            f"{f.filename.split('/ups/')[-1]}:{f.lineno}" for f in traceback.extract_stack() if "/ups/" in f.filename
        ]
        self.found.append(f"{what}: {where[-1]}")


class Given:
    """A loader of the batches that it got, again and again."""

    def __init__(self, groups: list[tuple[Batch, ...]]) -> None:
        self.groups = groups

    def batches_in_step(self, step: int) -> int:
        return len(self.groups)

    def __iter__(self) -> Iterator[tuple[Batch, ...]]:
        while True:
            yield from self.groups

    def load_state_dict(self, state: dict[str, int]) -> None: ...


def waits(recipe: Recipe, opened: OpenData, index: int) -> list[str]:
    """What a step of stage `index` waits for."""
    groups: list[tuple[Batch, ...]] = []
    seen: set[str] = set()
    for kind in kinds_of(recipe, opened, index, 1):
        names = {batch.task.name for batch in kind.batches}
        if not names <= seen:  # as few as there must be for every task
            seen |= names
            groups.append(
                tuple(replace(batch, numbers=HostNumbers.of(batch.numbers.numpy())) for batch in kind.batches)
            )
    _, stage = bare_stage(recipe, opened, index, device="meta")
    runtime = Runtime(RankInfo(0, 1), DEVICE, "single", 0, None, None, None)
    with fake_tensors(), Waits() as mode:
        every = [batch for group in groups for batch in group]
        make_fake(stage, every, weight_dtype(recipe.engine.precision), DEVICE)
        del stage.task_factor  # a rehearsal has none
        engine = Engine(
            runtime, Single(stage, runtime), Given(groups), config=recipe.engine, length=recipe.stages[index]
        )
        batches = iter(engine.loader)
        for step in range(STEPS):
            mode.found.clear()
            engine._update(engine._accumulate(batches, step + 1), step + 1)
    return mode.found


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
        frames = 0 if spec.steady else 8
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
    # No value, not even that of a constant, is computed on a device that is not there.
    FakeTensorMode.avoid_device_init = property(lambda self: True)  # type: ignore[assignment,method-assign]
    normalization.is_fake = lambda tensor: False  # type: ignore[attr-defined]  # constants stay, as with numbers
    found: dict[str, dict[str, list[str]]] = {}
    for number, name in enumerate(named):
        path, *changes = name.split(",")
        # Arithmetic changes no wait, and torch casts for a device that is there.
        float32 = ["engine.precision=float32", "engine.float32_fraction=0"]
        plain = resolve(path, [*float32, *changes]).recipe.model_dump(mode="json")
        write_stores(plain, Path(folder) / str(number))
        recipe = Recipe.model_validate(plain)
        with open_data(recipe) as opened:
            found[name] = {f"{n} {stage.type}": waits(recipe, opened, n) for n, stage in enumerate(recipe.stages)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
