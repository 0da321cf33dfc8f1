"""Check `rehearsal`: a few real steps of each stage as the run would train them, with every module watched.

Not part of the ladder: `ups doctor RECIPE --bisect` runs it again and again with one part of the recipe changed. What
it finds out about a failure (module, windows, step) are facts of its verdict. A module is to blame if its input was
finite and its output is not, or if it was the last one entered when the rank raised, crashed or stood still. That
position is written to a file on the way, so that a crash in native code leaves it behind.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

from ups.config.schema import Recipe
from ups.distributed.agreement import Status
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.distributed.strategies import local
from ups.doctor.probes.check import Assignment, say_failed
from ups.doctor.probes.parts import StopAfter, open_run_data, quick, run_steps, stage_name
from ups.doctor.trials import PLACE_NAME, SETTINGS_NAME
from ups.record.blackbox import BlackBox, Phase
from ups.record.text import counted
from ups.run.assemble import Assembled, assemble
from ups.run.preflight import CheckFailed, Report
from ups.spec.batch import Batch
from ups.training.engine import Engine
from ups.training.progress import Progress

# Compiling the first pass of a task is silent for so long, at most.
_COMPILE_SECONDS = 900.0
# A task that the mixture has not drawn by then is not waited for.
_MOST_STEPS = 50


class NotFiniteError(CheckFailed):
    """A loss or gradient is NaN or infinite."""

    cause = "not_finite"


def check_rehearsal(assignment: Assignment, report: Report) -> None:
    """The steps that `rehearsal.json` in the work directory asks for. Collective: all ranks."""
    settings = json.loads((assignment.work_dir / SETTINGS_NAME).read_text())
    recipe = quick(assignment.run)
    position = Place(assignment.work_dir / PLACE_NAME.format(RankEnvironment.read().rank))
    with Runtime.start(recipe.engine) as runtime:
        rehearse(assignment, recipe, runtime, settings, position, report)


def rehearse(
    assignment: Assignment, recipe: Recipe, runtime: Runtime, settings: dict[str, Any], position: Place, report: Report
) -> None:
    """Every stage, or the one that is asked for. Collective: all ranks."""
    asked = settings.get("stage")
    indexes = range(len(recipe.stages)) if asked is None else [int(asked)]
    total = 0
    with open_run_data(assignment) as opened:
        for index in indexes:
            position.at(phase="build", stage=index, step=0, module="")
            hook = Steps(position)
            at, box = Progress(stage_index=index), PlaceBox.of(position)
            with assemble(recipe, opened, runtime, at, hooks=[hook], box=box) as parts:
                hook.last = steps_to_take(parts, int(settings["steps"]))
                hook.watch(parts, inside_units=not recipe.engine.compile)
                still = _COMPILE_SECONDS if recipe.engine.compile else float(settings["still_seconds"])
                try:
                    with noticed_standstill(position, still, report):
                        run_steps(parts)
                except Exception as error:
                    report.facts |= hook.known(error, stage_name(recipe, index))
                    raise
            total += hook.last
    report.says = (
        f"{counted(runtime.world_size, 'rank')} ({runtime.strategy}, {recipe.engine.precision}) trained "
        f"{counted(total, 'step')}, all finite"
    )


def steps_to_take(parts: Assembled, wanted: int) -> int:
    """As many as wanted, and more where the mixture needs them to bring every task once."""
    source, step, seen = parts.loader.source, 0, set[int]()
    while len(seen) < len(source.readers) and step < _MOST_STEPS:
        seen |= set(source.sampler.tasks_of_step(step))
        step += 1
    return max(wanted, step)


class Steps(StopAfter):
    """A hook that refuses numbers of a step that are not finite."""

    def __init__(self, position: Place) -> None:
        super().__init__(1)
        self._position = position
        self._losses: list[float] = []
        self._windows: dict[str, Any] = {}

    def watch(self, parts: Assembled, *, inside_units: bool) -> None:
        """Hook on to the stage: modules, and the losses of its samples."""
        self._watch = ModuleWatch(parts.stage, parts.stage.shard_units(), self._position, inside_units=inside_units)
        looked_at(parts, self._windows, self._losses)

    def after_step(self, engine: Engine, agreed: Status) -> None:
        engine.read_gradients()
        norm, step = engine.gradient_norm, engine.progress.stage_step
        if not math.isfinite(norm) or not all(map(math.isfinite, self._losses)):
            raise NotFiniteError(
                f"step {step} has a loss of {sum(self._losses):g} and a gradient norm of {norm:g}",
                means="the weights would be destroyed; a run skips such steps and stops after many in a row",
                hint="see what `ups doctor RECIPE --bisect` says about it",
            )
        self._losses.clear()
        self._position.at(phase="step done", step=step, module="")
        super().after_step(engine, agreed)

    def known(self, error: Exception, stage: str) -> dict[str, Any]:
        """What was seen of a failure: its module and windows, as far as they are known."""
        values, culprit = self._position.values, {}
        if isinstance(error, NotFiniteError):
            culprit = self._watch.fault or self._watch.backward_culprit()
        elif values["phase"] in ("forward", "backward"):
            inside = self._watch.innermost() or str(values["module"])
            culprit = {"pass": values["phase"], **self._watch.describe(inside)}
        seen = {"windows": self._windows.get("bad"), "culprit": culprit}
        facts = {"stage": values["stage"], "stage_name": stage, "step": values["step"] + 1}
        return facts | {name: value for name, value in seen.items() if value}


@contextlib.contextmanager
def noticed_standstill(position: Place, seconds: float, report: Report) -> Iterator[None]:
    """Inside, a rank that enters no module for so long says where it stands and leaves: a hang is a finding, too."""
    done = threading.Event()

    def look() -> None:
        while not done.wait(0.5):
            if time.monotonic() - position.changed > seconds:
                faulthandler.dump_traceback(all_threads=True)
                at = dict(position.values)
                report.facts |= {"standing": at, "stage": at["stage"]}
                says = f"stood still for {seconds:.0f} s in {at['phase']} of step {at['step'] + 1}"
                # Since when: who waits for it stood still later.
                since_ns = int(position.changed * 1e9)
                say_failed(report, RankEnvironment.read().rank, since_ns, says=says, cause="stalled")
                os._exit(1)

    position.at()
    thread = threading.Thread(target=look, name="standstill", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()


_PLACE_BYTES = 1024
_FIELDS = ("state", "static", "target", "parameters", "dt")


class Place:
    """Where this rank is: kept in memory for itself, and in a file for who looks at it when it is gone."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o600)
        self.values: dict[str, Any] = {"phase": "start", "module": "", "step": 0, "stage": 0}
        self.changed = time.monotonic()

    def at(self, **values: Any) -> None:
        """Change some of what is known, in memory and on disk."""
        self.values.update(values)
        self.changed = time.monotonic()
        text = json.dumps(self.values).encode()[: _PLACE_BYTES - 1]
        os.pwrite(self._file, text.ljust(_PLACE_BYTES - 1) + b"\n", 0)


class PlaceBox(BlackBox):
    """The black box of a rehearsal: what the engine says about its phases goes to the position, too."""

    position: Place | None = None

    def record(self, phase: Phase, *arguments: Any, **named: Any) -> None:
        super().record(phase, *arguments, **named)
        if self.position is not None:
            self.position.at(phase=phase.label, module="")

    @classmethod
    def of(cls, position: Place) -> PlaceBox:
        """A box that only the position reads."""
        box = cls.unread()
        assert isinstance(box, PlaceBox)
        box.position = position
        return box


class ModuleWatch:
    """Hooks on all modules of a stage. The first bad number becomes `fault`, and nothing after it."""

    def __init__(self, stage: nn.Module, units: Sequence[nn.Module], position: Place, *, inside_units: bool) -> None:
        """inside_units: whether to look into the shard units, too; not if they are compiled, which would be undone."""
        self.position = position
        self.fault: dict[str, Any] = {}
        self._stack: list[str] = []
        self._names = {id(module): name for name, module in stage.named_modules()}
        self._units = [self._names[id(unit)] for unit in units if id(unit) in self._names]
        # gradient hooks that fired on the first bad tensor: (kind, module)
        self._bad_gradient: tuple[int, list[tuple[str, str]]] | None = None
        for name, module in stage.named_modules():
            if not inside_units and any(name.startswith(f"{unit}.") for unit in self._units):
                continue
            # Before other hooks, such as those that gather shards: what goes wrong in them is of this module.
            module.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True)
            module.register_forward_hook(self._leave, with_kwargs=True)

    def innermost(self) -> str | None:
        """The module that was entered last and not left, if any: after an exception, where it was raised."""
        return self._stack[-1] if self._stack else None

    def describe(self, name: str) -> dict[str, Any]:
        """A module with the shard unit and the network that it belongs to."""
        unit = next((u for u in self._units if name == u or name.startswith(f"{u}.")), None)
        parts = name.split(".")
        network = parts[2] if parts[:2] == ["stepper", "networks"] and len(parts) > 2 else None
        return {"module": name, "unit": unit, "network": network}

    def backward_culprit(self) -> dict[str, Any]:
        """The module in whose backward pass the first bad gradient was made; empty if there was none."""
        if self._bad_gradient is None:
            return {}
        _, hooks = self._bad_gradient
        consumers = [module for kind, module in hooks if kind == "input"]
        inner = [m for m in consumers if not any(o != m and o.startswith(f"{m}." if m else "") for o in consumers)]
        if inner:
            return {"pass": "backward", "others": inner[1:], **self.describe(inner[0])}
        producer = hooks[0][1]
        return {"pass": "backward", "after": producer, **self.describe(producer.rpartition(".")[0])}

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        name = self._names[id(module)]
        if torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0:
            return  # recomputed in a backward pass, which has its own position
        self._stack.append(name)
        self.position.at(phase="forward", module=name)
        for tensor in tensors_of((args, kwargs)):
            self._follow(tensor, "input", name)

    def _leave(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        name = self._names[id(module)]
        if not self._stack or self._stack[-1] != name:
            return
        self._stack.pop()
        self.position.at(phase="forward", module=self._stack[-1] if self._stack else "")
        outputs = tensors_of(output)
        for tensor in outputs:
            self._follow(tensor, "output", name)
        if self.fault or all_finite(outputs):
            return
        inputs = tensors_of((args, kwargs))
        own = [n for n, p in module.named_parameters(recurse=False) if not all_finite([p])]
        self.fault = {
            "pass": "forward",
            "inputs_finite": all_finite(inputs),
            "largest_input": largest(inputs),
            "bad_parameters": own,
            "dtype": str(outputs[0].dtype).removeprefix("torch."),
            **self.describe(name),
        }

    def _follow(self, tensor: Tensor, kind: str, name: str) -> None:
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(self._gradient_hook(id(tensor), kind, name))  # type: ignore[no-untyped-call]

    def _gradient_hook(self, key: int, kind: str, name: str) -> Callable[[Tensor], None]:
        def look(gradient: Tensor) -> None:
            if kind == "output":
                self.position.at(phase="backward", module=name)
            bad = self._bad_gradient
            if bad is not None and bad[0] == key:
                bad[1].append((kind, name))
            elif bad is None and not all_finite([gradient]):
                self._bad_gradient = (key, [(kind, name)])

        return look


def tensors_of(values: Any) -> list[Tensor]:
    """All floating point tensors in arguments or results; a batch is looked into as well."""
    tensors: list[Tensor] = []
    for leaf in _pytree.tree_leaves(values):
        inside = [getattr(leaf, name, None) for name in getattr(leaf, "__dataclass_fields__", ())]
        extra = leaf.extra.values() if isinstance(leaf, Batch) else ()
        tensors += [value for value in (leaf, *inside, *extra) if isinstance(value, Tensor)]
    return [tensor for tensor in tensors if tensor.is_floating_point()]


@torch.no_grad()
def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no value is NaN or infinite."""
    return all(bool(torch.isfinite(local(tensor)).all()) for tensor in tensors)


@torch.no_grad()
def largest(tensors: Iterable[Tensor]) -> float | None:
    """The largest magnitude among finite values."""
    sizes = [float(local(t).abs().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0).max()) for t in tensors if t.numel()]
    return max(sizes, default=None)


_MOST_SHOWN = 8


def looked_at(parts: Assembled, windows: dict[str, Any], losses: list[float]) -> None:
    """From now on every pass of the stage leaves its loss in `losses`, and the first bad windows in `windows`."""
    stage, compute = parts.stage, parts.stage.sample_losses

    def sample_losses(batches: Sequence[Batch]) -> list[dict[str, Tensor]]:
        for batch in batches:
            if rows := _bad_rows([getattr(batch, name) for name in _FIELDS]):
                windows.setdefault("bad", described(parts, batch, rows, "values that are not finite"))
        results = compute(batches)
        for batch, result in zip(batches, results, strict=True):
            rows = _bad_rows([result["loss"].detach()])
            # All of them: the windows are not to blame.
            if 0 < len(rows) < batch.num_samples:
                windows.setdefault("bad", described(parts, batch, rows, "a loss that is not finite"))
        return results

    stage.sample_losses = sample_losses  # type: ignore[method-assign]
    stage.register_forward_hook(lambda module, args, output: losses.append(float(output.total.detach())))


def described(parts: Assembled, batch: Batch, rows: Sequence[int], what: str) -> dict[str, Any]:
    """Task and locations of some windows of a batch."""
    source = parts.loader.source
    task = next(n for n, reader in enumerate(source.readers) if reader.task.name == batch.task.name)
    trajectories, starts = source.indexes[task].locate_all(batch.numbers[list(rows)].numpy())
    where = [
        source.readers[task].where(source.split, trajectory) + ("" if batch.task.steady else f", frame {start}")
        for trajectory, start in zip(trajectories, starts, strict=True)
    ]
    return {
        "task": batch.task.name,
        "what": what,
        "of": batch.num_samples,
        "trajectories": sorted(set(trajectories)),
        "where": list(dict.fromkeys(where))[:_MOST_SHOWN],
    }


def _bad_rows(tensors: Sequence[Tensor]) -> list[int]:
    bad: set[int] = set()
    for tensor in tensors:
        if tensor.numel():
            finite = torch.isfinite(tensor).reshape(len(tensor), -1).all(1)
            bad |= set(torch.nonzero(~finite).flatten().tolist())
    return sorted(bad)
