"""The run directory: every name in it and the paths below it; and which run or bundle a name means.

The only module that knows where a run keeps what. Formats belong to those who write the files. Standard library only.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, overload

from ups.errors import ConfigError

# Below the working directory: a run without `run.dir` is RUNS/NAME.
RUNS = "runs"
# A run and a bundle both hold their resolved recipe under this name.
CALIBRATION_NAME = "calibration.safetensors"
CARD_NAME = "card.md"
CONFIG_NAME = "config.yaml"
WEIGHTS_NAME = "model.safetensors"
# By this file a bundle is recognized.
BUNDLE_FILE = "bundle.json"
# All that a bundle may hold, besides the marks of its commit.
BUNDLE_FILES = frozenset({BUNDLE_FILE, WEIGHTS_NAME, CALIBRATION_NAME, CARD_NAME, CONFIG_NAME})
SCORES_NAME = "scores.json"
# Models that come with the package: SHIPPED/NAME/bundle, and data to start from in SHIPPED/NAME/states/TASK.zarr.
SHIPPED = Path(__file__).resolve().parents[1] / "shipped"
STATES = "states"


class Entry:
    """A file or folder with a fixed name: `RunDir(path).metrics` is its path, `RunDir.metrics.name` its name."""

    def __init__(self, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, run: None, owner: type) -> Self: ...
    @overload
    def __get__(self, run: RunDir, owner: type) -> Path: ...
    def __get__(self, run: RunDir | None, owner: type) -> Any:
        return self if run is None else run.path / self.name


@dataclass(frozen=True)
class RunDir:
    """A run directory, on a disk or in a bucket (`ups.buckets.path`). Building a path touches no file."""

    path: Path

    # Written before a rank starts.
    config = Entry(CONFIG_NAME)
    environment = Entry("env.json")
    statistics = Entry("statistics.json")
    starts = Entry("start")
    plugins = Entry("plugins.json")
    # Written by the supervisor: state and verdict; locks; the secret of a run over several hosts and their notes.
    run_json = Entry("run.json")
    supervisor_lock = Entry(".supervisor.lock")
    link_secret = Entry(".link-secret")
    hosts = Entry("hosts")
    # Written by ranks.
    checkpoints = Entry("checkpoints")
    metrics = Entry("metrics.jsonl")
    logs = Entry("logs")
    failures = Entry("failures")
    blackbox = Entry("blackbox")
    # Written by processes that copy or forward what ranks wrote.
    mirror_note = Entry("mirror.json")
    tracking = Entry("tracking")
    tensorboard = Entry("tensorboard")
    # Written by `ups run` and its steps. Its lock is held from the first step on, long before there is a run.json.
    steps_lock = Entry(".steps.lock")
    steps = Entry("steps.json")
    plan = Entry("plan.json")
    report = Entry("report")
    scores = Entry(f"report/{SCORES_NAME}")
    report_page = Entry("report/index.html")
    bundle = Entry("bundle")
    # Written by launchers on the host that started a run elsewhere.
    launch = Entry("launch")

    @property
    def has_run_json(self) -> bool:
        """Whether there is a `run.json`, readable or not."""
        return os.path.lexists(self.run_json)

    def start(self, stage: int) -> Path:
        """The copy of the weights from outside that a stage starts from."""
        return self.starts / str(stage)

    def checkpoint(self, step: int) -> Path:
        """The checkpoint after `step` steps of the run."""
        return self.checkpoints / f"step_{step:08d}"

    @staticmethod
    def log_name(attempt: int, rank: int, stream: str = "err") -> str:
        """The log of a rank relative to the run directory, as it stands in records; stream: err or out."""
        return f"{RunDir.logs.name}/attempt_{attempt}/{rank_name(rank)}.{stream}"

    def log(self, attempt: int, rank: int, stream: str = "err") -> Path:
        """The log of a rank in one attempt."""
        return self.path / self.log_name(attempt, rank, stream)

    def failures_of(self, attempt: int) -> Path:
        """The folder of failure records and evidence of one attempt."""
        return self.failures / f"attempt_{attempt}"

    def failure_stem(self, attempt: int, rank: int) -> Path:
        """The common beginning of the failure files of a rank in one attempt."""
        return self.failures_of(attempt) / rank_name(rank)

    def host_note(self, number: int) -> Path:
        """What the supervisor of a host notes for readers on other hosts."""
        return self.hosts / f"{number:05d}.json"

    def host_notes(self) -> list[Path]:
        """The notes of all hosts, in their order."""
        return sorted(self.hosts.glob("[0-9]*.json"))

    def tracker_note(self, name: str) -> Path:
        """How far a tracker has come."""
        return self.tracking / f"{name}.json"


def rank_name(rank: int) -> str:
    """The beginning of the names of all files of a rank."""
    return f"rank_{rank:05d}"


def home_directory() -> Path | None:
    """The user's home; None where there is none: a container may run under a user number without a name."""
    home = os.path.expanduser("~")
    return Path(home) if os.path.isabs(home) else None


def cache_directory() -> Path | None:
    """What can be made or fetched again, kept for this user; None where there is no home."""
    home = home_directory()
    root = os.environ.get("XDG_CACHE_HOME") or (home and home / ".cache")
    return Path(root) / "ups" if root else None


def meant_by(name: str, base: Path | None = None) -> tuple[Path, Path]:
    """What a name on the command line may mean: a path, or a run under runs/."""
    base = base or Path()
    return base / name, base / RUNS / name


def is_bundle(path: Path) -> bool:
    """Whether a directory is a bundle; a run with a bundle inside is not."""
    return (path / BUNDLE_FILE).is_file()


def shipped_models() -> dict[str, Path]:
    """Name -> bundle of each model that comes with the package."""
    return {path.parent.name: path for path in sorted(SHIPPED.glob("*/bundle")) if is_bundle(path)}


def is_shipped(bundle: Path) -> bool:
    """Whether a bundle lies in the package, where nothing may be written."""
    return bundle.resolve() in shipped_models().values()


def states_beside(bundle: Path, task: str) -> Path | None:
    """The store of a task that came along with a bundle; None if there is none."""
    path = bundle.parent / STATES / f"{task}.zarr"
    return path if path.is_dir() else None


def _by_name(name: str) -> Path | None:
    """The bundle that a name means where no directory does. Those on the hub are directories by now."""
    if "://" in name:
        raise ConfigError(
            f"'{name}' is an address, and a bundle is a directory", hint="download it first: ups hub pull"
        )
    return None if any(path.exists() for path in meant_by(name)) else shipped_models().get(name)


def find_model(name: str) -> Path:
    """A run or bundle by path, a run by its name under runs/, or a shipped model: a directory of that name wins."""
    for path in meant_by(name):
        if (path / CONFIG_NAME).is_file():
            return path
    if (bundle := _by_name(name)) is not None:
        return bundle
    raise ConfigError(
        f"there is no run or bundle '{name}'",
        hint=f"give a run directory such as runs/NAME, a bundle directory, or {known_models()}",
    )


def find_bundle(name: str) -> Path:
    """A bundle by path, that of a run by path or name, or a shipped one: a directory wins. Else the path itself."""
    by_path, by_name = meant_by(name)
    candidates = (by_path, RunDir(by_path).bundle, RunDir(by_name).bundle)
    return next((path for path in candidates if is_bundle(path)), None) or _by_name(name) or by_path


def known_models() -> str:
    """The names that a user may give besides directories, for hints."""
    return f"the name of a model: {', '.join(shipped_models()) or 'this copy has none'} (`ups models`)"
