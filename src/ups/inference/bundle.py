"""A bundle: the trained model of a run. Plain files, no pickle, committed like everything else on disk.

    bundle.json        format version, networks, packages needed, context, tasks, statistics, grids, scores, provenance
    model.safetensors  weights and normalization tables
    calibration.safetensors  what it states about its errors (`ups.inference.calibration`), if it was calibrated
    config.yaml        the resolved recipe of the run
    card.md            what it was trained on, its scores next to references, where not to trust it
    MANIFEST COMMITTED SHA-256 of every file

A bundle may come from an untrusted source: sizes are checked before anything is allocated, weights are compared with
the shapes that the config gives before they are loaded, and every mistake is a `BundleError`. Hashes show damage; they
do not prove who made the bundle.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import jinja2
import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator, model_validator
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ups import __version__
from ups.config.model import FORMER_DEFAULT, ModelConfig, as_stored
from ups.errors import BundleError, DataError, IntegrityError, PluginError, errors_as
from ups.inference.calibration import Stated, read_calibration, write_calibration
from ups.inference.stored_scores import bundle_warnings
from ups.models.build import build_model, wrong_names
from ups.models.stepper import OPERATOR, Stepper, former_name
from ups.record.files import load_object, mode_by_umask
from ups.record.manifest import commit_directory, make_temporary, read_manifest, verify
from ups.record.run_dir import (
    BUNDLE_FILE,
    CALIBRATION_NAME,
    CARD_NAME,
    CONFIG_NAME,
    WEIGHTS_NAME,
    RunDir,
    is_bundle,
    known_models,
)
from ups.record.text import counted, printable
from ups.registry import MODELS, SCRIPT
from ups.spec.batch import Float64
from ups.spec.descriptors import ranges_fit
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
    made_with: what else decides the bits of a training, label -> value (versions, ranks, solvers; `ups.run.trained`);
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
    made_with: Mapping[str, str] = field(default_factory=dict)
    version: int = VERSION

    @property
    def model(self) -> ModelConfig:
        """The settings of the network that makes the step."""
        return self.networks[OPERATOR]

    def space(self, task: str) -> tuple[int, ...]:
        """Grid points per axis of the training grid."""
        return tuple(len(c) for c in self.coordinates[task])

    def needs(self) -> list[dict[str, str]]:
        """The parts of other packages that the bundle needs: kind, name, distribution, version."""
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
            "made_with": dict(self.made_with),
        }


@dataclass(frozen=True)
class Bundle:
    """A bundle in memory. hash: of its manifest, the name of exactly these bytes."""

    info: BundleInfo
    stepper: Stepper
    hash: str
    path: Path
    calibrations: Stated = field(default_factory=dict)


def write_bundle(
    directory: Path, stepper: Stepper, info: BundleInfo, *, config_text: str, card: str, stated: Stated | None = None
) -> Path:
    """Write and commit a bundle in one instant; an older bundle of that name is replaced."""
    temporary = make_temporary(directory)
    tensors = {name: t.detach().to("cpu").contiguous() for name, t in stepper.state_dict().items()}
    # One entry only: safetensors writes several in random order, and equal weights would give different files.
    save_file(tensors, temporary / WEIGHTS_NAME, metadata={"format": FORMAT})
    mode_by_umask(temporary / WEIGHTS_NAME)
    text = json.dumps(info.to_json(), indent=1, sort_keys=True, allow_nan=False)
    (temporary / BUNDLE_FILE).write_text(text + "\n", encoding="utf-8")
    (temporary / CONFIG_NAME).write_text(config_text, encoding="utf-8")
    (temporary / CARD_NAME).write_text(card, encoding="utf-8")
    if stated:
        write_calibration(temporary / CALIBRATION_NAME, stated)
    commit_directory(temporary, directory)
    return directory


def load_bundle(path: str | Path, device: torch.device | None = None, *, stated: bool = True) -> Bundle:
    """Read, check and build a bundle. Raises BundleError for anything that is not a sound bundle.

    stated: with its statements about errors, which `ups calibrate` replaces unread.
    """
    directory = Path(path)
    if not directory.is_dir():
        raise BundleError(
            f"there is no bundle at '{path}'",
            hint=f"give the directory that holds bundle.json, such as runs/NAME/bundle, or {known_models()}",
        )
    if not is_bundle(directory):
        raise BundleError(f"'{path}' is not a bundle: it has no bundle.json", hint=_hint_for(directory))
    try:
        verify(directory)
        digest = read_manifest(directory).sha256
    except IntegrityError as error:
        raise BundleError(f"bundle '{path}' is damaged: {error.message}", hint="copy or export it again") from error
    info, chosen = read_info(directory), device or torch.device("cpu")
    calibrations = read_calibration(directory / CALIBRATION_NAME, info.tasks, chosen) if stated else {}
    return Bundle(info, _build(directory, info, chosen), digest, directory, calibrations)


def _hint_for(directory: Path) -> str:
    if is_bundle(RunDir(directory).bundle):
        return f"this is a run; its bundle is '{RunDir(directory).bundle}'"
    if RunDir(directory).checkpoints.is_dir():
        return f"this is a run without a bundle; make one with: ups export bundle {directory}"
    return "give the directory that holds bundle.json"


def read_info(directory: Path) -> BundleInfo:
    """bundle.json, fully checked."""
    path = directory / BUNDLE_FILE
    with errors_as(BundleError, f"{path} cannot be read", OSError, ValueError):
        data = load_object(path, MAX_JSON_BYTES)
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
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        reason = printable(f"{where}: {first['msg']}"[:200])
        raise BundleError(f"{path} is malformed: {reason}") from error
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, DataError) as error:
        lines = str(error).strip().splitlines()
        raise BundleError(f"{path} is malformed: {lines[0][:200] if lines else type(error).__name__}") from error


class _Document(BaseModel):
    """bundle.json, which may be hostile: types and sizes are checked here, before anything is built from it."""

    model_config = ConfigDict(strict=True, hide_input_in_errors=True)

    version: int
    tasks: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_TASKS)
    context_frames: int = Field(ge=1, le=64)
    networks: dict[str, dict[str, Any]] = Field(max_length=MAX_NETWORKS)
    needs: list[dict[str, Any]] = []
    statistics: dict[str, Any]
    coordinates: dict[str, list[list[float]]]
    scores: dict[str, Any] = {}
    provenance: dict[str, str] = {}
    assumptions: dict[str, list[str]] = {}
    stages: list[dict[str, Any]] = Field([], max_length=MAX_ROWS)
    made_with: dict[str, str] = {}

    @model_validator(mode="before")
    @classmethod
    def _read_one_network(cls, data: dict[str, Any]) -> dict[str, Any]:
        return {**data, "networks": {OPERATOR: data["model"]}} if data["version"] == _ONE_NETWORK else data

    @field_validator("networks")
    @classmethod
    def _check_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        if problem := wrong_names(value):
            raise ValueError(problem)
        return value

    @field_validator("provenance")
    @classmethod
    def _check_step(cls, value: dict[str, str]) -> dict[str, str]:
        if not re.fullmatch(r"[0-9]{1,18}", value.get("step", "0")):
            raise ValueError("the step must be a whole number")
        return value


def _info_from(data: Mapping[str, Any]) -> BundleInfo:
    document = _Document.model_validate(data)
    specs = tuple(TaskSpec.from_json(task) for task in document.tasks)
    rows = sum(
        sum(spec.num_channels(role) for role in get_args(Role))
        * (document.context_frames + 3 * (1 + 2 * len(spec.parameters)))
        for spec in specs
    )
    if rows > MAX_ROWS:
        raise ValueError(f"tasks with {rows} rows of weights, more than {MAX_ROWS}")
    if len({spec.name for spec in specs}) != len(specs):
        raise ValueError("two tasks have the same name")
    for network in document.networks.values():
        _check_needs(network, document.needs)
    reading: TypeAdapter[ModelConfig] = TypeAdapter(ModelConfig)
    statistics = {spec.name: Statistics.from_json(document.statistics[spec.name]) for spec in specs}
    coordinates = {spec.name: _coordinates(spec, document.coordinates[spec.name]) for spec in specs}
    for spec in specs:
        measured, space = statistics[spec.name], [len(axis) for axis in coordinates[spec.name]]
        # Both are empty in bundles from before they were measured.
        if measured.smooth_from and not measured.waves_fit(spec):
            raise ValueError(f"smooth_from of task '{spec.name}' does not fit its channels and axes")
        if measured.ranges and not ranges_fit(measured.ranges, spec, space):
            raise ValueError(f"ranges of task '{spec.name}' do not fit its channels and grid")
    return BundleInfo(
        networks={name: reading.validate_python(as_stored(network)) for name, network in document.networks.items()},
        context_frames=document.context_frames,
        tasks=specs,
        statistics=statistics,
        coordinates=coordinates,
        scores=document.scores,
        provenance=document.provenance,
        assumptions={name: tuple(texts) for name, texts in document.assumptions.items()},
        stages=tuple(map(_stage_row, document.stages)),
        made_with=document.made_with,
        version=document.version,
    )


def _stage_row(row: Mapping[str, Any]) -> dict[str, Any]:
    texts = {name: printable(str(row[name])[:100]) for name in ("stage", "task", "figure", "against")}
    return texts | {name: float(row[name]) for name in ("before", "after")}


def _check_needs(network: Mapping[str, Any], needs: Any) -> None:
    """Raises BundleError if the type of a network is not installed here.

    The type is looked up among the names that installed packages announce: no name in a bundle is ever imported.
    """
    name = network.get("type", FORMER_DEFAULT)
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
            if package.startswith(SCRIPT):
                raise BundleError(
                    f"the bundle needs model '{printable(name[:100])}' of the {package}",
                    hint="if you have that file and trust it: --plugin FILE, or ups.use_script(FILE)",
                )
            raise BundleError(
                f"the bundle needs model '{printable(name[:100])}' of package {package}, which is not installed",
                hint="install that package if you trust it as you trust any program; or ask for a bundle without it",
            )
    raise BundleError(
        f"the bundle needs model '{printable(name[:100])}', which no installed package has",
        hint="ask who made the bundle which package that model comes from",
    )


def _coordinates(task: TaskSpec, axes: list[list[float]]) -> tuple[Float64, ...]:
    if len(axes) != len(task.axes):
        raise ValueError(f"task '{task.name}' needs coordinates for each of its {len(task.axes)} axes")
    coordinates = tuple(np.asarray(values, np.float64) for values in axes)
    for axis, values in zip(task.axes, coordinates, strict=True):
        if len(values) < 2 or not np.isfinite(values).all() or (np.diff(values) <= 0).any():
            raise ValueError(f"coordinate '{axis.name}' of task '{task.name}' is not an increasing list of numbers")
    return coordinates


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
    stepper = build_model(info.networks, info.tasks, info.statistics, info.context_frames, device="meta")
    built = stepper.state_dict()
    names = {former_name(n) if info.version == _ONE_NETWORK else n: n for n in built}  # in the file -> today
    expected = {stored: (tuple(built[n].shape), _DTYPE_NAMES[built[n].dtype]) for stored, n in names.items()}
    path = directory / WEIGHTS_NAME
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            stored = {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in parts.items()}
            if stored != expected:
                wrong = min(name for name in stored.keys() | expected.keys() if stored.get(name) != expected.get(name))
                raise BundleError(
                    f"{path} does not hold the weights that bundle.json describes: '{wrong}' is "
                    f"{_words(stored.get(wrong))}, expected {_words(expected.get(wrong))}",
                    hint="put together from two runs: export it again; of an earlier version: train it again",
                )
            with torch.inference_mode(False):
                tensors = {name: file.get_tensor(stored) for stored, name in names.items()}
    except (SafetensorError, OSError) as error:
        raise BundleError(f"{path} cannot be read: {str(error)[:200]}") from error
    stepper.load_state_dict(tensors, assign=True)
    stepper.requires_grad_(False)
    return stepper.eval()


def plain(text: str) -> str:
    """Text that is shown as it is where Markdown is rendered: no HTML, no links, no control characters."""
    escaped = html.escape(printable(" ".join(text.split())), quote=False)
    return re.sub(r"([\\`\[\]|*])", r"\\\1", escaped)


class _Raw(str):
    """Text of the card that is not escaped again."""


def _code(text: str) -> _Raw:
    """Text in a code span, which no text can end."""
    return _Raw(f"`{printable(' '.join(text.split())).replace('`', chr(39))}`")


def _unit(unit: str) -> _Raw:
    """A unit behind what is measured in it; nothing where there is none."""
    return _Raw("" if unit == "1" else f" in {plain(unit)}")


def _example(info: BundleInfo) -> str:
    task = info.tasks[0]
    values = ", ".join(f'"{p.name}": {(p.minimum + p.maximum) / 2:.4g}' for p in task.parameters)
    inputs = "static=fields" if task.steady else "state, steps=20"
    parameters = f", parameters={{{values}}}" if values else ""
    return f'result = simulator.rollout({inputs}{parameters}, task="{task.name}")  # xarray.Dataset'


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else str(value)


def write_card(name: str, info: BundleInfo, stated: Stated | None = None) -> str:
    """The card as Markdown. Every text in it is escaped, because the texts of a bundle may be untrusted."""
    environment = jinja2.Environment(  # noqa: S701  # `plain` escapes HTML, and Markdown as well
        loader=jinja2.PackageLoader("ups.inference"),
        finalize=lambda value: value if isinstance(value, _Raw) else plain(str(value)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"code": _code, "counted": counted, "number": _number, "raw": _Raw, "unit": _unit}
    template = environment.get_template("card.md.jinja")
    warnings = bundle_warnings(info.scores, info.provenance)
    documents = {task: one.document for task, one in (stated or {}).items()}
    return template.render(name=name, info=info, example=_example(info), warnings=warnings, stated=documents)
