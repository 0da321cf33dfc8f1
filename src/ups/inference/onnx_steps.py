"""Which program computes the steps of a rollout: eager torch, or onnxruntime with an exported step (`export.py`).

An export is taken from `BUNDLE-onnx` beside the bundle, where `ups export onnx` writes it, or from the user's cache,
where `runtime="onnx"` writes what it lacks. Its first step is compared with eager torch on the state of the rollout.
"""

from __future__ import annotations

import itertools
import logging
import tempfile
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from ups.errors import BundleError
from ups.inference.bundle import Bundle
from ups.inference.export import (
    MOST_DIFFERENCE,
    SUFFIXES,
    Graph,
    GraphPredictor,
    GraphStep,
    export,
    export_path,
    exported_file,
    onnx_graph,
)
from ups.models.stepper import Predictor
from ups.record.run_dir import cache_directory
from ups.spec.batch import Batch, Memo
from ups.spec.task import TaskSpec

logger = logging.getLogger(__name__)
RUNTIMES = ("eager", "onnx", "auto")


def check_runtime(name: str, device: torch.device) -> torch.device:
    """The device, where this runtime works on it. Raises BundleError where it does not."""
    if name not in RUNTIMES:
        raise BundleError(f"runtime is one of {', '.join(RUNTIMES)}, not {name[:40]!r}")
    if name == "onnx" and device.type != "cpu":
        hint = "leave the device out, or use runtime='eager'"
        raise BundleError(f"runtime 'onnx' works on the CPU, not on '{device}'", hint=hint)
    return device


class OnnxSteps:
    """The exported steps of a bundle.

    choose: take them only where they are there and faster than eager torch, instead of exporting what lacks.
    """

    def __init__(self, bundle: Bundle, *, choose: bool) -> None:
        self._bundle, self._choose = bundle, choose
        self._graphs: dict[str, Graph | None] = {}
        self._better: dict[tuple[str, bool], dict[int, bool]] = {}

    def predictor(self, task: TaskSpec, batch: Batch, eager: Predictor, *, watched: bool) -> Predictor:
        """A predictor for a rollout from this batch: by onnxruntime, or `eager` itself."""
        if batch.dt.device.type != "cpu":
            return eager
        if task.name not in self._graphs:
            self._graphs[task.name] = self._graph(task)
        graph = self._graphs[task.name]
        if graph is None:
            return eager
        step = GraphStep(self._bundle, task)
        exported = GraphPredictor(graph, step, step.outputs[: 1 + watched])
        return Either(eager, exported, self._better.setdefault((task.name, watched), {}), self._choose)

    def _graph(self, task: TaskSpec) -> Graph | None:
        if self._choose and find_spec("onnxruntime") is None:
            return None
        cache = (cache_directory() or Path(tempfile.mkdtemp())) / "onnx" / f"{self._bundle.hash[:32]}-{task.name}"
        for directory in (export_path(self._bundle.path, "onnx"), cache):
            if path := exported_file(directory, self._bundle, task.name):
                return onnx_graph(path)
        if self._choose:
            return None
        logger.warning("task '%s' is exported to %s; this takes a minute, once", task.name, cache)
        cache.parent.mkdir(parents=True, exist_ok=True)
        with torch.inference_mode(False):
            return onnx_graph(export(self._bundle, cache, tasks=[task.name]) / f"{task.name}{SUFFIXES['onnx']}")


class Either:
    """A predictor by onnxruntime, which must agree with eager torch on a batch; with `choose` by the faster of both.

    better: whether onnxruntime is taken, by the size of a batch: sizes up to the same power of two count as one.
    """

    def __init__(self, eager: Predictor, exported: Predictor, better: dict[int, bool], choose: bool) -> None:
        self._eager, self._exported, self._better, self._choose = eager, exported, better, choose
        self.numbers: Tensor | None = None

    def __call__(self, batch: Batch) -> Tensor:
        size = (batch.num_samples - 1).bit_length()
        if size not in self._better:
            self._compare(batch, size)
        predictor = self._exported if self._better.get(size, not self._choose) else self._eager
        frame = predictor(batch)
        self.numbers = getattr(predictor, "numbers", None)
        return frame

    def _compare(self, batch: Batch, size: int) -> None:
        """Decide, if this batch is sound: others do not suffer from a sample that is not."""
        frame, other = self._eager(batch), self._exported(batch)
        if not frame.isfinite().all():
            return
        largest = float((frame - other).abs().max() / frame.double().square().mean().sqrt().clamp_min(1e-30))
        agree = largest <= MOST_DIFFERENCE
        if not agree:
            problem = f"the export of task '{batch.task.name}' is {largest:.2g} of the RMS apart from torch"
            if not self._choose:
                raise BundleError(problem, hint="write it again: ups export onnx BUNDLE")
            logger.warning("%s: it is not used", problem)
        faster = not self._choose or _seconds(self._exported, batch) < _seconds(self._eager, batch)
        self._better[size] = agree and faster


def _seconds(predictor: Predictor, batch: Batch) -> float:
    """The fastest of four steps, with what a rollout makes once."""
    batch, marks = replace(batch, memo=Memo()), [time.perf_counter()]
    for _ in range(4):
        predictor(batch)
        marks.append(time.perf_counter())
    return min(after - before for before, after in itertools.pairwise(marks))
