"""A bundle: what a person takes away from a run. Plain files, no pickle, committed like everything else on disk.

    bundle.json        format version, networks, packages needed, context, tasks, statistics, grids, scores, provenance
    model.safetensors  weights and normalization tables
    config.yaml        the resolved recipe of the run
    card.md            what it was trained on, its scores next to references, where not to trust it
    MANIFEST COMMITTED SHA-256 of every file

A bundle may come from an untrusted source: sizes are checked before anything is allocated, weights are compared with
the shapes that the config gives before they are loaded, and every mistake is a `BundleError`. Hashes show damage; they
do not prove who made the bundle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from ups import __version__
from ups.config.model import ModelConfig
from ups.errors import BundleError, DataError, IntegrityError, PluginError
from ups.models.build import build_model, wrong_names
from ups.models.former_names import former_name
from ups.models.stepper import OPERATOR, Stepper
from ups.record.files import is_whole, load_object, mode_by_umask
from ups.record.manifest import commit_directory, make_temporary, read_manifest, verify
from ups.record.run_dir import BUNDLE_FILE, CONFIG_NAME, RunDir, is_bundle
from ups.record.text import printable
from ups.registry import MODELS
from ups.spec.batch import Float64
from ups.spec.statistics import Statistics
from ups.spec.task import Role, TaskSpec

FORMAT = "ups-bundle"
VERSION = 2
_ONE_NETWORK = 1  # the version that had `model` where `networks` are now
MAX_JSON_BYTES = 16 * 2**20
MAX_TASKS = 1000
MAX_NETWORKS = 16
# Of the tables that have rows for channels, frames and parameters of tasks.
MAX_ROWS = 10**6


@dataclass(frozen=True)
class BundleInfo:
    """Everything in a bundle but the weights.

    networks: name -> its settings, as a `Stepper` has them; coordinates: task -> one (n,) array per axis of the grid it
    was trained on; scores: task -> predictor -> metric -> value, with the protocol they were measured by; provenance:
    label -> value (recipe hash, steps, data identities); assumptions: task -> what was assumed about its data, a
    sentence each; stages: what each stage of the run brought, as rows (stage, task, figure, against, before, after);
    version: of the format that it was read from.
    """

    networks: Mapping[str, ModelConfig]
    context_frames: int
    tasks: tuple[TaskSpec, ...]
    statistics: Mapping[str, Statistics]
    coordinates: Mapping[str, tuple[Float64, ...]]
    scores: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    assumptions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    stages: tuple[Mapping[str, Any], ...] = ()
    version: int = VERSION

    @property
    def model(self) -> ModelConfig:
        """The settings of the network that makes the step."""
        return self.networks[OPERATOR]

    def space(self, task: str) -> tuple[int, ...]:
        """Grid points per axis of the training grid."""
        return tuple(len(c) for c in self.coordinates[task])

    def needs(self) -> list[dict[str, str]]:
        """The parts of other packages without which nobody can use the bundle: kind, name, distribution, version."""
        origins = {network.type: MODELS.origin(network.type) for network in self.networks.values()}
        return [
            {"kind": one.kind, "name": one.name, "distribution": one.distribution, "version": one.version}
            for one in origins.values()
            if not one.is_ours
        ]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "written_by": f"universal-simulator {__version__}",
            "networks": {name: network.model_dump(mode="json") for name, network in self.networks.items()},
            "needs": self.needs(),
            "context_frames": self.context_frames,
            "tasks": [t.to_json() for t in self.tasks],
            "statistics": {name: s.to_json() for name, s in self.statistics.items()},
            "coordinates": {name: [c.tolist() for c in axes] for name, axes in self.coordinates.items()},
            "scores": dict(self.scores),
            "provenance": dict(self.provenance),
            "assumptions": {name: list(texts) for name, texts in self.assumptions.items()},
            "stages": [dict(row) for row in self.stages],
        }


@dataclass(frozen=True)
class Bundle:
    """A bundle in memory. hash: of its manifest, the name of exactly these bytes."""

    info: BundleInfo
    stepper: Stepper
    hash: str
    path: Path


def write_bundle(directory: Path, stepper: Stepper, info: BundleInfo, *, config_text: str, card: str) -> Path:
    """Write and commit a bundle in one instant; an older bundle of that name is replaced."""
    from safetensors.torch import save_file

    temporary = make_temporary(directory)
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in stepper.state_dict().items()}
    # One entry only: safetensors writes several in random order, and equal weights would give different files.
    save_file(tensors, temporary / "model.safetensors", metadata={"format": FORMAT})
    mode_by_umask(temporary / "model.safetensors")
    text = json.dumps(info.to_json(), indent=1, sort_keys=True, allow_nan=False)
    (temporary / BUNDLE_FILE).write_text(text + "\n", encoding="utf-8")
    (temporary / CONFIG_NAME).write_text(config_text, encoding="utf-8")
    (temporary / "card.md").write_text(card, encoding="utf-8")
    commit_directory(temporary, directory)
    return directory


def load_bundle(path: str | Path, device: torch.device | None = None) -> Bundle:
    """Read, check and build a bundle. Raises BundleError for anything that is not a sound bundle."""
    directory = Path(path)
    if not directory.is_dir():
        raise BundleError(
            f"there is no bundle at '{path}'",
            hint="give the directory that holds bundle.json, for instance runs/NAME/bundle",
        )
    if not is_bundle(directory):
        raise BundleError(f"'{path}' is not a bundle: it has no bundle.json", hint=_hint_for(directory))
    try:
        verify(directory)
        digest = read_manifest(directory).sha256
    except IntegrityError as error:
        raise BundleError(f"bundle '{path}' is damaged: {error.message}", hint="copy or export it again") from error
    info = read_info(directory)
    return Bundle(info, _build(directory, info, device or torch.device("cpu")), digest, directory)


def _hint_for(directory: Path) -> str:
    if is_bundle(RunDir(directory).bundle):
        return f"this is a run; its bundle is '{RunDir(directory).bundle}'"
    if RunDir(directory).checkpoints.is_dir():
        return f"this is a run without a bundle; make one with: ups export bundle {directory}"
    return "give the directory that holds bundle.json"


def read_info(directory: Path) -> BundleInfo:
    """bundle.json, fully checked."""
    path = directory / BUNDLE_FILE
    try:
        data = load_object(path, MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read: {error}") from error
    if data.get("format") != FORMAT:
        raise BundleError(f"{path} does not describe a bundle")
    version = data.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        raise BundleError(
            f"bundle format version {str(version)[:20]} is not known to this program, which reads up to {VERSION}",
            hint="install a newer universal-simulator",
        )
    try:
        return _info_from(data)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, DataError) as error:
        reason = str(error).strip().splitlines()
        raise BundleError(f"{path} is malformed: {reason[0][:200] if reason else type(error).__name__}") from error


def _info_from(data: Mapping[str, Any]) -> BundleInfo:
    from pydantic import TypeAdapter

    tasks = data["tasks"]
    if not isinstance(tasks, list) or not 1 <= len(tasks) <= MAX_TASKS:
        raise ValueError(f"a bundle has 1 to {MAX_TASKS} tasks")
    context = data["context_frames"]
    if not is_whole(context) or not 1 <= context <= 64:
        raise ValueError("context_frames must be a whole number between 1 and 64")
    specs = tuple(TaskSpec.from_json(t) for t in tasks)
    rows = sum(
        sum(spec.num_channels(role) for role in get_args(Role)) * (context + 3 * (1 + 2 * len(spec.parameters)))
        for spec in specs
    )
    if rows > MAX_ROWS:
        raise ValueError(f"tasks with {rows} rows of weights, more than {MAX_ROWS}")
    given = {OPERATOR: data["model"]} if data["version"] == _ONE_NETWORK else data["networks"]
    if not isinstance(given, dict) or len(given) > MAX_NETWORKS:
        raise ValueError(f"networks must be a table of at most {MAX_NETWORKS} by name")
    problem = wrong_names(given)
    if problem:
        raise ValueError(problem)
    for network in given.values():
        _check_needs(network, data.get("needs", []))
    reading: TypeAdapter[ModelConfig] = TypeAdapter(ModelConfig)
    names = [spec.name for spec in specs]
    if len(set(names)) != len(names):
        raise ValueError("two tasks have the same name")
    provenance, scores = data.get("provenance", {}), data.get("scores", {})
    if not isinstance(provenance, dict) or not all(isinstance(value, str) for value in provenance.values()):
        raise ValueError("provenance must be texts by name")
    if not re.fullmatch(r"[0-9]{1,18}", provenance.get("step", "0")):
        raise ValueError("the step in provenance must be a whole number")
    if not isinstance(scores, dict):
        raise ValueError("scores must be a table by task")
    stages = data.get("stages", [])
    if not isinstance(stages, list) or len(stages) > MAX_ROWS:
        raise ValueError("stages must be a list")
    statistics = {t.name: Statistics.from_json(data["statistics"][t.name]) for t in specs}
    for spec in specs:
        # Empty in bundles from before it was measured.
        if statistics[spec.name].smooth_from and not statistics[spec.name].waves_fit(spec):
            raise ValueError(f"smooth_from of task '{spec.name}' does not fit its channels and axes")
    coordinates = {t.name: _coordinates(t, data["coordinates"][t.name]) for t in specs}
    for spec in specs:
        space = [len(axis) for axis in coordinates[spec.name]]
        if statistics[spec.name].ranges and not statistics[spec.name].ranges_fit(spec, space):
            raise ValueError(f"ranges of task '{spec.name}' do not fit its channels and grid")
    return BundleInfo(
        networks={name: reading.validate_python(network) for name, network in given.items()},
        context_frames=context,
        tasks=specs,
        statistics=statistics,
        coordinates=coordinates,
        scores=scores,
        provenance=provenance,
        assumptions={str(k): tuple(map(str, v)) for k, v in dict(data.get("assumptions", {})).items()},
        stages=tuple(_stage_row(row) for row in stages),
        version=data["version"],
    )


def _stage_row(row: Any) -> dict[str, Any]:
    texts = {name: printable(str(row[name])[:100]) for name in ("stage", "task", "figure", "against")}
    return texts | {name: float(row[name]) for name in ("before", "after")}


def _check_needs(network: Mapping[str, Any], needs: Any) -> None:
    """Raises BundleError if the type of a network is not installed here.

    The type is looked up among the names that installed packages announce: no name in a bundle is ever imported.
    """
    name = network.get("type", ModelConfig.default_type)
    if not isinstance(name, str):
        raise ValueError("the type of the model must be a text")
    if name in MODELS.names():
        try:
            MODELS.config(name)
        except PluginError as error:
            raise BundleError(f"the bundle cannot be used: {error.message}", hint=error.hint) from error
        return
    for part in needs:
        if part.get("kind") == MODELS.kind and part.get("name") == name:
            package = f"{printable(str(part['distribution'])[:100])} {printable(str(part['version'])[:40])}"
            raise BundleError(
                f"the bundle needs model '{printable(name[:100])}' of package {package}, which is not installed",
                hint="install that package if you trust it as you trust any program; or ask for a bundle without it",
            )
    raise BundleError(
        f"the bundle needs model '{printable(name[:100])}', which no installed package has",
        hint="ask who made the bundle which package that model comes from",
    )


def _coordinates(task: TaskSpec, axes: Any) -> tuple[Float64, ...]:
    if not isinstance(axes, list) or len(axes) != len(task.axes):
        raise ValueError(f"task '{task.name}' needs coordinates for each of its {len(task.axes)} axes")
    found = tuple(np.asarray(values, np.float64) for values in axes)
    for axis, values in zip(task.axes, found, strict=True):
        if values.ndim != 1 or len(values) < 2 or not np.isfinite(values).all() or (np.diff(values) <= 0).any():
            raise ValueError(f"coordinate '{axis.name}' of task '{task.name}' is not an increasing list of numbers")
    return found


# As safetensors writes them; everything that a model of ups has.
_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def _words(tensor: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if tensor is None else f"{tensor[1]} {list(tensor[0])}"


def _build(directory: Path, info: BundleInfo, device: torch.device) -> Stepper:
    """The stepper with the bundle's weights: built without memory first, so that a wrong size allocates nothing."""
    from safetensors import SafetensorError, safe_open

    stepper = build_model(info.networks, info.tasks, info.statistics, info.context_frames, device="meta")
    built = stepper.state_dict()
    names = {former_name(n) if info.version == _ONE_NETWORK else n: n for n in built}  # in the file -> today
    expected = {stored: (tuple(built[n].shape), _DTYPE_NAMES[built[n].dtype]) for stored, n in names.items()}
    path = directory / "model.safetensors"
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()}
            if found != expected:
                wrong = min(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
                raise BundleError(
                    f"{path} does not hold the weights that bundle.json describes: '{wrong}' is "
                    f"{_words(found.get(wrong))}, expected {_words(expected.get(wrong))}",
                    hint="put together from two runs: export it again; of an earlier version: train it again",
                )
            with torch.inference_mode(False):
                tensors = {name: file.get_tensor(stored) for stored, name in names.items()}
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{path} cannot be read: {str(error)[:200]}") from error
    stepper.load_state_dict(tensors, assign=True)
    stepper.requires_grad_(False)
    return stepper.eval()
