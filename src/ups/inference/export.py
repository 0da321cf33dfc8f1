"""One step of a task as a graph for other programs: ONNX files that share their weights, or .pt2 files of torch.export.

    state, static, parameters, dt -> frame                   physical units, any number of samples, the trained grid
    step, components_before       -> numbers, distance, log_error, components     of a task that was calibrated

Normalization, constraints and conserved integrals are inside of the step; the loop of a rollout is outside. Every graph
is rolled out beside eager torch before its directory appears, and is refused where the two differ.

B samples, T context frames, C channels, S space, P parameters, F numbers, K components, M fields, L leads.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import warnings
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ups import __version__
from ups.config.schema import TaskConfig
from ups.errors import BundleError, IntegrityError, MissingExtraError, errors_as
from ups.inference.bundle import Bundle
from ups.inference.calibration import Calibration
from ups.models.error_model import Watched, period_ends
from ups.models.stepper import rollout
from ups.record.files import load_object
from ups.record.manifest import commit_directory, make_temporary, verify
from ups.record.run_dir import is_shipped, states_beside
from ups.spec.batch import Batch
from ups.spec.descriptors import DivergenceLimits
from ups.spec.task import Role, TaskSpec

FORMAT, VERSION = "ups-export", 1
DOCUMENT_NAME, WEIGHTS_NAME = "export.json", "weights.bin"
SUFFIXES = {"onnx": ".onnx", "torch": ".pt2"}
# Of the comparison. The largest difference that passes is relative to the RMS of a rollout; of statements it is that of
# log errors, and of distances relative to themselves.
STEPS, SAMPLES, MOST_DIFFERENCE, MOST_STATED = 40, 2, 1e-4, 0.05
_LEVELS = (0.5, 0.8, 0.9, 0.95)
# Smaller tensors stay in the file of the graph. Offsets of the others are multiples, so that they can be mapped.
_SMALL, _ALIGNMENT = 128, 64
# Inputs by name, and the first of `GraphStep.outputs` that are wanted -> these.
Graph = Callable[[Mapping[str, Tensor], Sequence[str]], Sequence[Tensor]]


class GraphStep(nn.Module):
    """The step of one task, with tensors by name as inputs and outputs: what becomes a graph."""

    def __init__(self, bundle: Bundle, task: TaskSpec) -> None:
        super().__init__()
        self.stepper, self.task = bundle.stepper, task
        stated = bundle.calibrations.get(task.name)
        self.error_model = None if stated is None else stated.model
        self.watched = Watched(bundle.stepper)
        self.limits = DivergenceLimits.of(task, bundle.info.statistics[task.name])
        self._points = [torch.from_numpy(c.copy()) for c in bundle.info.coordinates[task.name]]
        leads = [] if stated is None else stated.document.leads
        # Steps beyond the last period, or beyond the last lead, count as that one.
        self.leads, self.ends = leads, period_ends(leads[-1])[:-1] if leads else []
        outputs = ("frame", "numbers", "distance", "log_error", "components")
        self.outputs = outputs[: 1 if stated is None else 4 if task.steady else 5]

    def forward(
        self,
        state: Tensor | None = None,
        static: Tensor | None = None,
        parameters: Tensor | None = None,
        dt: Tensor | None = None,
        step: Tensor | None = None,
        components_before: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """state (B, C, *S), or (B, T, C, *S) of several context frames; step (1,) counts from 1; components_before
        (B, K): the `components` that the step before gave, zeros at first."""
        batch = Batch.of(
            self.task,
            state=state if state is None or self.stepper.context_frames > 1 else state[:, None],
            static=static,
            parameters=parameters,
            dt=self.task.dt if dt is None else dt,
            coordinates=self._points,
        )
        if self.error_model is None:
            return (self.stepper(batch),)
        frame, numbers, model = self.watched(batch), self.watched.numbers, self.error_model
        components = model.components(numbers)
        if step is None or components_before is None:
            return frame, numbers, model.distance(numbers, 0), model.log_error(components, 0)
        components = components + components_before
        period = (torch.tensor(self.ends) < step).sum(0, keepdim=True)
        lead = (torch.tensor(self.leads[:-1]) < step).sum(0, keepdim=True)
        errors = model.log_error(components / step, lead)
        return frame, numbers, model.distance(numbers, period)[0], errors, components

    def inputs(self, batch: Batch, components: Tensor | None) -> dict[str, Tensor]:
        """What the graph is given for a batch of a rollout."""
        task = self.task
        named = {}
        if not task.steady:
            named["state"] = batch.state if self.stepper.context_frames > 1 else batch.state[:, 0]
        if task.num_channels("static"):
            named["static"] = batch.static
        if task.parameters:
            named["parameters"] = batch.parameters
        if task.dt_range:
            named["dt"] = batch.dt
        if self.error_model is not None and not task.steady:
            zeros = batch.dt.new_zeros(batch.num_samples, self.error_model.basis.shape[1])
            named["step"] = torch.tensor([batch.stage_step + 1])
            named["components_before"] = zeros if components is None or batch.stage_step == 0 else components
        return named


class GraphPredictor:
    """A predictor (`ups.models.stepper.Predictor`) by a graph.

    wanted: the outputs that are computed; `last` keeps them, and `numbers` (B, F) are those of `Watched`.
    """

    def __init__(self, graph: Graph, step: GraphStep, wanted: Sequence[str]) -> None:
        self._graph, self._step, self._wanted = graph, step, wanted
        self.last: dict[str, Tensor] = {}

    def __call__(self, batch: Batch) -> Tensor:
        given = self._step.inputs(batch, self.last.get("components"))
        self.last = dict(zip(self._wanted, self._graph(given, self._wanted), strict=True))
        return self.last["frame"]

    @property
    def numbers(self) -> Tensor | None:
        return self.last.get("numbers")


def export(
    bundle: Bundle,
    directory: Path,
    kind: str = "onnx",
    tasks: Sequence[str] | None = None,
    progress: Callable[[str, float], None] = lambda task, difference: None,
) -> Path:
    """Write the graphs of tasks (default all) in one instant; an older export of that name is replaced.

    progress: called with each task and its difference. Raises BundleError where a graph differs from torch.
    """
    if kind == "onnx":
        _require("onnxruntime", "onnxscript")
    known = [task.name for task in bundle.info.tasks]
    if unknown := [name for name in tasks or () if name not in known]:
        raise BundleError(f"the bundle has no task '{unknown[0]}'", hint=f"it has {', '.join(known)}")
    head = {
        "format": FORMAT,
        "version": VERSION,
        "kind": kind,
        "written_by": f"universal-simulator {__version__}, torch {torch.__version__}",
        "bundle": bundle.hash,
    }
    temporary = make_temporary(directory)
    try:
        entries: dict[str, Any] = {}
        shared = _SharedWeights(temporary / WEIGHTS_NAME)
        with torch.no_grad():
            for task in bundle.info.tasks:
                if tasks is None or task.name in tasks:
                    entries[task.name] = _export_task(bundle, task, kind, temporary, shared, head)
                    progress(task.name, entries[task.name]["compared"]["difference"])
        text = json.dumps(head | {"tasks": entries}, indent=1, allow_nan=False)
        (temporary / DOCUMENT_NAME).write_text(text + "\n", encoding="utf-8")
        commit_directory(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return directory


def export_path(bundle: Path, kind: str) -> Path:
    """Where the export of a bundle is written to, and looked for: beside it; of a shipped one in this directory."""
    if is_shipped(bundle):
        return Path(f"{bundle.parent.name}-{kind}")
    return bundle.absolute().with_name(f"{bundle.absolute().name}-{kind}")


def exported_file(directory: Path, bundle: Bundle, task: str) -> Path | None:
    """The ONNX file of a task in a directory that was made of this bundle; None where there is none.

    Raises BundleError for an export that is damaged.
    """
    if not (directory / DOCUMENT_NAME).is_file():
        return None
    with errors_as(BundleError, f"{directory} is no sound export", IntegrityError, OSError, ValueError):
        verify(directory)
        document = load_object(directory / DOCUMENT_NAME)
    fits = {"format": FORMAT, "version": VERSION, "kind": "onnx", "bundle": bundle.hash}.items() <= document.items()
    path = directory / f"{task}{SUFFIXES['onnx']}"
    return path if fits and path.is_file() else None


def onnx_graph(path: Path) -> Graph:
    """A session of onnxruntime on the CPU, with as many threads as torch has."""
    _require("onnxruntime")
    import onnxruntime

    options, partly = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = torch.get_num_threads(), 1
    partly.only_execute_path_to_fetches = True
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    names, every = [one.name for one in session.get_inputs()], len(session.get_outputs())

    def run(given: Mapping[str, Tensor], wanted: Sequence[str]) -> list[Tensor]:
        arrays = {name: given[name].numpy() for name in names}
        found = session.run(list(wanted), arrays, partly if len(wanted) < every else None)
        return [torch.from_numpy(array) for array in found]

    return run


def torch_graph(path: Path) -> Graph:
    """A stored program of torch.export."""
    module = torch.export.load(path).module()
    return lambda given, wanted: module(**given)[: len(wanted)]


def typical_batch(bundle: Bundle, task: TaskSpec, samples: int, seed: int = 0) -> Batch:
    """States and given fields as far as the statistics of the training data know them: smooth fields with the mean and
    the deviation of each channel, within its range, and parameters from all of theirs."""
    draw, statistics = np.random.default_rng(seed), bundle.info.statistics[task.name]
    space = bundle.info.space(task.name)
    waves = np.meshgrid(*(np.fft.fftfreq(n, 1 / n) for n in space), indexing="ij")
    decay = (1 + sum(k * k for k in waves) / 4) ** -2

    def fields(role: Role) -> npt.NDArray[np.float32]:
        axes = tuple(range(2, 2 + len(space)))
        noise = draw.standard_normal((samples, task.num_channels(role), *space))
        smooth = np.fft.ifftn(np.fft.fftn(noise, axes=axes) * decay, axes=axes).real
        smooth /= smooth.std(axis=axes, keepdims=True)
        shape = (2, -1, *[1] * len(space))
        pairs = [getattr(statistics, f"{role}_{name}") for name in ("mean", "std")]
        mean, std = np.array(pairs).reshape(shape)
        smooth = smooth * std + mean
        if ranges := statistics.ranges.get(role):  # of the smallest and the largest value
            smooth = smooth.clip(*np.array([(channel[1][0], channel[2][1]) for channel in ranges]).T.reshape(shape))
        return np.asarray(smooth, np.float32)

    count = len(task.parameters)
    means, widths = np.array(statistics.parameter_mean), 1.7 * np.array(statistics.parameter_std)  # ends of a range
    values = means + widths * draw.uniform(-1, 1, (samples, count))
    values = np.where([p.scale == "log" for p in task.parameters], np.exp(values), values) if count else values
    frames = np.repeat(fields("state")[:, None], bundle.info.context_frames, 1)
    return Batch.of(
        task,
        state=None if task.steady else frames,
        static=fields("static"),
        parameters=values.astype(np.float32),
        dt=task.dt,
        coordinates=bundle.info.coordinates[task.name],
    )


def first_batch(bundle: Bundle, task: TaskSpec, samples: int) -> Batch:
    """Test states that came with the bundle, at most so many; `typical_batch` where there are none."""
    store = states_beside(bundle.path, task.name)
    if store is None:
        return typical_batch(bundle, task, samples)
    from ups.data.open import open_task  # a simulator loads without readers

    reader = open_task(TaskConfig(name=task.name, path=str(store)))
    chosen, frames = range(min(samples, reader.splits["test"])), 0 if task.steady else bundle.info.context_frames
    block = reader.read_block("test", chosen, [0 for _ in chosen], frames)
    reader.close()
    return Batch.of(
        task,
        state=None if task.steady else block.state,
        static=block.static,
        parameters=block.parameters,
        dt=task.dt,
        coordinates=block.coordinates,
    )


def checked_difference(step: GraphStep, graph: Graph, batch: Batch, steps: int) -> float:
    """What graph and eager torch differ by over a rollout, relative to the RMS of each channel.

    Both make each step of the eager rollout from the same frames, and what they differ by adds up: a chaotic task
    amplifies the last digit, in torch alone as well. Frames that have diverged are no prediction, and are left out.
    Raises BundleError where it is too large.
    """
    model, name = step.error_model, step.task.name
    eager, exported = Watched(step.stepper), GraphPredictor(graph, step, step.outputs)

    def both(given: Batch) -> Tensor:
        exported(given)
        return eager(given)

    differences: list[Tensor] = []
    squares: list[Tensor] = []
    total, stated = torch.zeros(()), torch.zeros(())
    for number, frame in enumerate(rollout(both, batch, steps), start=1):
        if not frame.isfinite().all() or (differences and step.limits.exceeded(frame).any()):
            break
        differences.append((frame - exported.last["frame"]).abs().movedim(1, 0).flatten(1).amax(1).double())
        squares.append(frame.double().square().movedim(1, 0).flatten(1).mean(1))
        if model is not None:
            total = total + model.components(eager.numbers)
            period, lead = bisect_left(step.ends, number), min(bisect_left(step.leads, number), len(step.leads) - 1)
            distance, errors = model.distance(eager.numbers, period), model.log_error(total / number, lead)
            apart = (exported.last["distance"] - distance).abs() / (1 + distance.abs())
            stated = torch.stack([stated, apart.max(), (exported.last["log_error"] - errors).abs().max()]).max()
    if not squares:
        raise BundleError(f"the bundle itself gives no finite frame of task '{name}'; nothing was exported")
    rms = torch.stack(squares).mean(0).sqrt()
    # A channel that is nearly 0 everywhere counts by the size of the others.
    largest = float((torch.stack(differences).sum(0) / rms.clamp_min(1e-3 * float(rms.max()) + 1e-30)).max())
    if not (largest <= MOST_DIFFERENCE and stated <= MOST_STATED):
        raise BundleError(
            f"the exported step of task '{name}' is {largest:.2g} of the RMS apart from torch in {len(squares)} steps, "
            f"and {stated:.2g} in what it states about errors; {MOST_DIFFERENCE:g} and {MOST_STATED:g} pass",
            hint="nothing was written; use the bundle with ups itself, or other versions of torch and onnx",
        )
    return largest


def _export_task(
    bundle: Bundle, task: TaskSpec, kind: str, directory: Path, shared: _SharedWeights, head: Mapping[str, Any]
) -> dict[str, Any]:
    """Write the file of one task, compare it with eager torch, and say what it holds."""
    step, batch = GraphStep(bundle, task).eval(), first_batch(bundle, task, SAMPLES)
    path = directory / f"{task.name}{SUFFIXES[kind]}"
    given = step.inputs(batch, None)
    step(**given)  # constants of the graph are made now, with numbers, and not while it is traced
    sizes = {name: None if name == "step" else {0: torch.export.Dim("samples")} for name in given}
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.export.export(step, (), given, dynamic_shapes=sizes, strict=False)
            for node in program.graph.nodes:
                node.meta.pop("stack_trace", None)  # paths of this machine
            save = _torch_writer(program, path) if kind == "torch" else _onnx_writer(program, path, step, shared)
    except Exception as error:  # a layer that no graph can hold fails in any way
        root: BaseException = error
        while root.__cause__ is not None:
            root = root.__cause__
        lines = str(root).strip().splitlines() or [""]
        raise BundleError(
            f"task '{task.name}' cannot be exported: {type(root).__name__}: {lines[0][:200]}",
            hint="its network has an operation that such graphs do not know; use the bundle with ups itself",
        ) from error
    save({})
    steps = 1 if task.steady else STEPS
    graph = torch_graph(path) if kind == "torch" else onnx_graph(path)
    difference = checked_difference(step, graph, batch, steps)
    compared = {"steps": steps, "samples": batch.num_samples, "difference": difference}
    entry = describe_task(bundle, step, given) | {"file": path.name, "compared": compared}
    save({**head, **entry})
    return entry


def describe_task(bundle: Bundle, step: GraphStep, given: Mapping[str, Tensor]) -> dict[str, Any]:
    """What a program must know to use the graph of a task."""
    task, stated = step.task, bundle.calibrations.get(step.task.name)
    grid = zip(task.axes, bundle.info.coordinates[task.name], strict=True)
    return {
        "task": task.to_json(),
        "grid": {axis.name: points.tolist() for axis, points in grid},
        "context_frames": 0 if task.steady else bundle.info.context_frames,
        "channels": {role: task.channel_names(role) for role in ("state", "static", task.predicted)},
        "parameters": [p.name for p in task.parameters],
        "inputs": {n: [1 if n == "step" else "samples", *tensor.shape[1:]] for n, tensor in given.items()},
        "outputs": step.outputs,
        "calibration": None if stated is None else _statements(stated),
    }


def _statements(stated: Calibration) -> dict[str, Any]:
    """How to read `distance` and `log_error`: error bars are factors (L, M) times exp(log_error) of that lead."""
    document, spread = stated.document, stated.model.spread.double().cpu().numpy()
    levels = [level for level in _LEVELS if level <= document.count / (document.count + 1)]
    bounds = {level: (stated.bound("fields", level), stated.bound("trajectory", level) * spread) for level in levels}
    kept, count = stated.scores["distance"]
    return {
        "trajectories": document.count,
        "data": document.data,
        "leads": document.leads,
        "levels": {f"{level:g}": {"error": _plain(e), "band": _plain(b)} for level, (e, b) in bounds.items()},
        "distances": {"sorted": _plain(kept), "count": int(count), "alarm": stated.alarm},
    }


def _plain(numbers: npt.NDArray[np.float64]) -> Any:
    """Lists with null for what is not known."""
    rounded = numbers.astype(np.float32).astype(object)
    rounded[~np.isfinite(numbers)] = None
    return rounded.tolist()


class _SharedWeights:
    """The file of all weights and constants of several graphs, each tensor once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[bytes, int] = {}

    def take(self, model: Any) -> None:
        """Move the tensors of a graph that are not small here."""
        from onnx_ir import ExternalTensor

        with open(self._path, "ab") as file:
            for value in model.graph.initializers.values():
                tensor = value.const_value
                data = tensor.tobytes()
                if len(data) < _SMALL:
                    continue
                digest = hashlib.sha256(data).digest()
                if digest not in self._offsets:
                    file.write(bytes(-file.tell() % _ALIGNMENT))
                    self._offsets[digest] = file.tell()
                    file.write(data)
                where = (self._path.name, self._offsets[digest], len(data), tensor.dtype)
                names = {"shape": tensor.shape, "name": value.name, "base_dir": self._path.parent}
                value.const_value = ExternalTensor(*where, **names)


def _onnx_writer(
    program: Any, path: Path, step: GraphStep, shared: _SharedWeights
) -> Callable[[Mapping[str, Any]], None]:
    import onnx_ir

    for name in ("torch.onnx", "onnxscript"):  # which speak of packages that are not there
        logging.getLogger(name).setLevel(logging.ERROR)
    exported = torch.onnx.export(program, dynamo=True, verbose=False, output_names=list(step.outputs))
    assert exported is not None  # it is None for exporters before dynamo
    model = exported.model
    for node in model.graph.all_nodes():  # eight times the size of the graph, for whoever debugs an exporter
        node.metadata_props.clear()
    model.graph.metadata_props.clear()
    shared.take(model)

    def save(facts: Mapping[str, Any]) -> None:
        model.metadata_props["ups"] = json.dumps(facts, allow_nan=False)
        onnx_ir.save(model, path)

    return save


def _torch_writer(program: Any, path: Path) -> Callable[[Mapping[str, Any]], None]:
    return lambda facts: torch.export.save(program, path, extra_files={"ups.json": json.dumps(facts, allow_nan=False)})


def _require(*packages: str) -> None:
    for package in packages:
        if find_spec(package) is None:
            raise MissingExtraError.of("export", package, "an ONNX file")
