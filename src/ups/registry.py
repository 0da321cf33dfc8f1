"""Parts that anybody can add: models, stages, losses, optimizers, schedules, hooks, readers, tasks, trackers, metrics.

Standard library only. A package announces a part by entry points; our models, stages, readers and the like do it the
same way (pyproject.toml):

    [project.entry-points."ups.models"]            the factory: what builds the part
    fno = "ups.models.fno:build"
    [project.entry-points."ups.models.config"]     its settings: a class that is imported without torch
    fno = "ups.config.model:FnoConfig"

Names come from the metadata of installed packages, and the code of a part is imported when the part is used, not
before: a broken plugin fails only recipes that use it. Losses, optimizers and schedules of ours are in tables below.

`register` adds a part to this process, for notebooks, tests and scripts. A script (`ups train --plugin FILE`) is a
Python file that registers parts. The run records its path and hash, so that ranks and later commands load it as well.
They do so only where its content was passed to `--plugin` by the user of this machine: a run directory or a bundle from
elsewhere never starts code.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import hashlib
import importlib
import json
import os
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from ups.errors import ConfigError, PluginError

OURS = "universal-simulator"
SCRIPT = "script "
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a part comes from: the distribution ('' for one registered in this process), and `module:attribute`.

    A part of a script has SCRIPT and the name of the file as distribution, and the start of its hash as version.
    """

    kind: str
    name: str
    distribution: str
    version: str
    where: str

    @property
    def is_ours(self) -> bool:
        return self.distribution == OURS

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}" if self.distribution else "this process"


@dataclass(frozen=True, slots=True)
class _Part:
    """A part that was announced. factory and config are what loads them; a conflict says why neither may be used."""

    origin: Origin
    factory: Callable[[], Any]
    config: Callable[[], Any] | None = None
    conflict: str = ""


class Registry:
    """The parts of one kind, by name. `word` is the kind in a message: 'model'.

    ours: parts of this package that have no entry point, name -> `module:attribute`.
    """

    def __init__(self, kind: str, word: str, ours: Mapping[str, str] | None = None) -> None:
        self.kind, self.word = kind, word
        self._ours = ours or {}
        self._added: dict[str, _Part] = {}
        self._removed: set[str] = set()

    def names(self) -> tuple[str, ...]:
        """The names of all parts, ours first. Imports none of them."""
        return tuple(self._parts())

    def factory(self, name: str) -> Any:
        """What builds this part. Raises ConfigError if there is none, PluginError if its code cannot be imported."""
        return self._load(name, "factory")

    def config(self, name: str) -> Any:
        """The class of the part's settings, None if it has none. Raises as `factory` does."""
        return self._load(name, "config")

    def origin(self, name: str) -> Origin:
        """Where a part comes from. Raises ConfigError if there is none of this name."""
        return self._find(name).origin

    def origins(self) -> list[Origin]:
        """Where each part comes from. Imports none of them."""
        return [part.origin for part in self._parts().values()]

    def error(self, name: str) -> str:
        """'' if the part can be used, else why not. Imports it."""
        try:
            self.config(name)
            self.factory(name)
        except PluginError as error:
            return error.message
        return ""

    def register(self, name: str, *, config: Any = None) -> Callable[[F], F]:
        """Decorator: the factory becomes the part of this name, in this process."""

        def add(factory: F) -> F:
            where = f"{getattr(factory, '__module__', '')}:{getattr(factory, '__qualname__', name)}"
            known = self._parts().get(name)
            if known is not None and known.origin.where == where:
                return factory  # the entry point of this very factory is being loaded
            if known is not None:
                raise PluginError(
                    f"{self.word} '{name}' cannot be registered: {known.origin} has one of this name",
                    hint="choose another name",
                )
            script, version = (SCRIPT + Path(_running.path).name, _running.sha256[:12]) if _running else ("", "")
            origin = Origin(self.kind, name, script, version, where)
            self._added[name] = _Part(origin, lambda: factory, lambda: config)
            return factory

        return add

    def unregister(self, name: str) -> None:
        """Remove a part from this process: no recipe finds it, and no schema or list shows it."""
        self._find(name)
        if self._added.pop(name, None) is None:
            self._removed.add(name)

    @contextlib.contextmanager
    def without(self, name: str) -> Iterator[None]:
        """As `unregister`, until the block ends."""
        added = self._added.get(name)
        self.unregister(name)
        try:
            yield
        finally:
            self._removed.discard(name)
            if added is not None:
                self._added[name] = added

    def _parts(self) -> dict[str, _Part]:
        ours = {name: _our_part(self.kind, name, target) for name, target in self._ours.items()}
        announced = {name: part for name, part in (_announced(self.kind) | ours).items() if name not in self._removed}
        return announced | self._added

    def _find(self, name: str) -> _Part:
        parts = self._parts()
        if name in parts:
            return parts[name]
        close = difflib.get_close_matches(str(name), parts, n=1, cutoff=0.6)
        known = f"known here: {', '.join(parts)}" if parts else "no installed package has one"
        raise ConfigError(
            f"there is no {self.word} '{str(name)[:100]}'", hint=f"did you mean '{close[0]}'?" if close else known
        )

    def _load(self, name: str, what: str) -> Any:
        part = self._find(name)
        if part.conflict:
            raise PluginError(part.conflict, hint="uninstall one of them")
        loader = getattr(part, what)
        try:
            return None if loader is None else loader()
        except (Exception, SystemExit) as error:  # whatever foreign code does when it is imported
            if isinstance(error, PluginError):
                raise
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
            raise PluginError(
                f"{self.word} '{name}' of {part.origin} cannot be imported from {part.origin.where}: {reason}",
                hint=f"repair or remove it: pip uninstall {part.origin.distribution}",
            ) from error


MODELS = Registry("models", "model")
STAGES = Registry("stages", "stage")
READERS = Registry("readers", "reader")
TASKS = Registry("tasks", "task", {"stokes2d": "ups.solvers.tasks:stokes2d"})
TRACKERS = Registry("trackers", "tracker")
METRICS = Registry("metrics", "metric", {"brmse": "ups.evaluation.metrics:boundary_rmse"})
LOSSES = Registry(
    "losses", "loss", {name: f"ups.training.losses:{name}_loss" for name in ("relative_l2", "nrmse", "mse")}
)
OPTIMIZERS = Registry(
    "optimizers", "optimizer", {name: f"ups.training.optim:{name}" for name in ("adamw", "sgd", "muon")}
)
SCHEDULES = Registry(
    "schedules", "schedule", {name: f"ups.training.optim:{name}" for name in ("cosine", "linear", "constant")}
)
HOOKS = Registry("hooks", "hook")
REGISTRIES = (MODELS, STAGES, LOSSES, OPTIMIZERS, SCHEDULES, HOOKS, READERS, TASKS, TRACKERS, METRICS)


@functools.cache
def _our_part(kind: str, name: str, target: str) -> _Part:
    module, _, attribute = target.partition(":")
    origin = Origin(kind, name, OURS, metadata.version(OURS), target)
    return _Part(origin, lambda: getattr(importlib.import_module(module), attribute))


@functools.cache
def _entry_points() -> metadata.EntryPoints:
    """All entry points of this environment: read once, because that takes as long as a small import."""
    return metadata.entry_points()  # type: ignore[return-value]


@functools.cache
def _announced(kind: str) -> dict[str, _Part]:
    """The parts that installed packages announce, ours first and then by name."""
    group = f"ups.{kind}"
    configs = {(point.name, _distribution(point)): point for point in _entry_points().select(group=f"{group}.config")}
    parts: dict[str, _Part] = {}
    points = _entry_points().select(group=group)
    for point in sorted(points, key=lambda point: (_distribution(point) != OURS, point.name, _distribution(point))):
        owner = _distribution(point)
        version = point.dist.version if point.dist is not None else ""
        origin = Origin(kind, point.name, owner, version, point.value)
        config = configs.get((point.name, owner))
        part = _Part(origin, point.load, config.load if config is not None else None)
        known = parts.get(point.name)
        if known is None:
            parts[point.name] = part
        elif not known.origin.is_ours:  # a name of ours stays ours, so that no plugin can change what a recipe means
            parts[point.name] = _Part(
                known.origin, known.factory, conflict=f"{known.origin} and {origin} both bring {kind} '{point.name}'"
            )
    if kind == "models" and not any(part.origin.is_ours for part in parts.values()):
        raise PluginError(
            "ups is not installed: its package metadata is missing, or older than its code",
            hint="in a checkout: pip install -e .",
        )
    return parts


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


@dataclass(frozen=True, slots=True)
class Script:
    """A Python file that was run to register parts: its absolute path, and the SHA-256 of its content."""

    path: str
    sha256: str


_scripts: dict[str, Script] = {}  # by hash: those that were run in this process
_running: Script | None = None


def use_script(path: str | os.PathLike[str]) -> Script:
    """Run a Python file that registers parts, and remember its content as one that the user of this machine trusts."""
    script, content = _read_script(path)
    known = _trusted()
    if script.sha256 not in known:
        file = _trust_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(sorted({*known, script.sha256}), indent=1))
    return _run_script(script, content)


def record_scripts(file: Path) -> None:
    """Write which scripts this process runs, for ranks and later commands; nothing if there are none."""
    if _scripts:
        file.write_text(json.dumps([asdict(script) for script in _scripts.values()], indent=1))


def use_recorded_scripts(file: Path) -> None:
    """Run the scripts of a record. Raises PluginError for one that changed, or that no user of this machine passed."""
    try:
        recorded = [Script(str(one["path"]), str(one["sha256"])) for one in json.loads(file.read_text())]
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise PluginError(f"{file} cannot be read: {error}", hint="pass the scripts again: --plugin FILE") from error
    for script in recorded:
        if any(script.path == one.path or script.sha256 == one.sha256 for one in _scripts.values()):
            continue  # passed to this command, where it may be a newer one
        if script.sha256 not in _trusted():
            raise PluginError(
                f"the run needs the script {script.path}, which was never passed to ups on this machine",
                hint=f"read it, and if you trust it: --plugin {script.path}",
            )
        now, content = _read_script(script.path)
        if now.sha256 != script.sha256:
            raise PluginError(
                f"{script.path} is not the script that the run was started with: it was edited",
                hint=f"bring the old one back, or use the new one: --plugin {script.path}",
            )
        _run_script(now, content)


def _read_script(path: str | os.PathLike[str]) -> tuple[Script, bytes]:
    file = Path(path).absolute()
    try:
        content = file.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise PluginError(f"the script {path} cannot be read: {reason}", hint="name a Python file") from error
    return Script(str(file), hashlib.sha256(content).hexdigest()), content


def _run_script(script: Script, content: bytes) -> Script:
    global _running
    if script.sha256 in _scripts:
        return script
    module = types.ModuleType(f"ups_script_{script.sha256[:12]}", f"The script {script.path}.")
    module.__file__ = script.path
    sys.modules[module.__name__] = module  # classes of the script are found by their module, as in any import
    before, _running = _running, script
    try:
        exec(compile(content, script.path, "exec"), module.__dict__)  # noqa: S102 - what the user asked for
    except (Exception, SystemExit) as error:
        del sys.modules[module.__name__]
        raise PluginError(f"the script {script.path} failed: {type(error).__name__}: {error}"[:500]) from error
    finally:
        _running = before
    _scripts[script.sha256] = script
    return script


def _trust_file() -> Path:
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".local" / "state") / "ups" / "plugins.json"


def _trusted() -> set[str]:
    """Hashes of the scripts that the user of this machine has passed to ups."""
    try:
        return {str(one) for one in json.loads(_trust_file().read_text())}
    except (OSError, ValueError, TypeError):
        return set()
