"""Parts that anybody can add: models, stages, readers, tasks, trackers, metrics (standard library only).

A package announces a part by entry points, ours do it the same way (pyproject.toml):

    [project.entry-points."ups.models"]            the factory: what builds the part
    fno = "ups.models.fno:build"
    [project.entry-points."ups.models.config"]     its settings: a class that is imported without torch
    fno = "ups.config.model:FnoConfig"

Names come from the metadata of installed packages; the code of a part is imported when the part is used, not before. So
a package that cannot be imported disturbs only who asks for one of its parts. `register` is the other way in, for
notebooks and tests: it holds for this process, and ranks and reader processes do not see it.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Any, TypeVar

from ups.errors import ConfigError, PluginError

OURS = "universal-simulator"
F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a part comes from: the distribution ('' for one registered in this process), and `module:attribute`."""

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
class _Found:
    """A part that was announced. factory and config are what loads them; a conflict says why neither may be used."""

    origin: Origin
    factory: Callable[[], Any]
    config: Callable[[], Any] | None = None
    conflict: str = ""


class Registry:
    """The parts of one kind, by name. `word` is the kind in a message: 'model'."""

    def __init__(self, kind: str, word: str) -> None:
        self.kind, self.word = kind, word
        self._added: dict[str, _Found] = {}
        self._removed: set[str] = set()
        self._loaded: dict[tuple[str, str], Any] = {}

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
        return [found.origin for found in self._parts().values()]

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
            self._forget(name)
            self._added[name] = _Found(Origin(self.kind, name, "", "", where), lambda: factory, lambda: config)
            return factory

        return add

    def unregister(self, name: str) -> None:
        """Remove a part from this process: no recipe finds it, and no schema or list shows it."""
        self._find(name)
        if self._added.pop(name, None) is None:
            self._removed.add(name)
        self._forget(name)

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

    def _forget(self, name: str) -> None:
        self._loaded.pop((name, "factory"), None)
        self._loaded.pop((name, "config"), None)

    def _parts(self) -> dict[str, _Found]:
        announced = {name: found for name, found in _announced(self.kind).items() if name not in self._removed}
        return announced | self._added

    def _find(self, name: str) -> _Found:
        parts = self._parts()
        if name in parts:
            return parts[name]
        close = difflib.get_close_matches(str(name), parts, n=1, cutoff=0.6)
        known = f"known here: {', '.join(parts)}" if parts else "no installed package has one"
        raise ConfigError(
            f"there is no {self.word} '{str(name)[:100]}'", hint=f"did you mean '{close[0]}'?" if close else known
        )

    def _load(self, name: str, what: str) -> Any:
        if (name, what) in self._loaded:
            return self._loaded[name, what]
        found = self._find(name)
        if found.conflict:
            raise PluginError(found.conflict, hint="uninstall one of them")
        loader = getattr(found, what)
        try:
            loaded = None if loader is None else loader()
        except (Exception, SystemExit) as error:  # whatever the code of somebody else does when it is imported
            if isinstance(error, PluginError):
                raise
            lines = str(error).strip().splitlines()
            reason = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
            raise PluginError(
                f"{self.word} '{name}' of {found.origin} cannot be imported from {found.origin.where}: {reason}",
                hint=f"repair or remove it: pip uninstall {found.origin.distribution}",
            ) from error
        self._loaded[name, what] = loaded
        return loaded


MODELS = Registry("models", "model")
STAGES = Registry("stages", "stage")
READERS = Registry("readers", "reader")
TASKS = Registry("tasks", "task")
TRACKERS = Registry("trackers", "tracker")
METRICS = Registry("metrics", "metric")
REGISTRIES = (MODELS, STAGES, READERS, TASKS, TRACKERS, METRICS)


@functools.cache
def _entry_points() -> metadata.EntryPoints:
    """All entry points of this environment: read once, because that takes as long as a small import."""
    return metadata.entry_points()  # type: ignore[return-value]


@functools.cache
def _announced(kind: str) -> dict[str, _Found]:
    """The parts that installed packages announce, ours first and then by name."""
    group = f"ups.{kind}"
    configs = {(point.name, _distribution(point)): point for point in _entry_points().select(group=f"{group}.config")}
    found: dict[str, _Found] = {}
    points = _entry_points().select(group=group)
    for point in sorted(points, key=lambda point: (_distribution(point) != OURS, point.name, _distribution(point))):
        owner = _distribution(point)
        version = point.dist.version if point.dist is not None else ""
        origin = Origin(kind, point.name, owner, version, point.value)
        config = configs.get((point.name, owner))
        part = _Found(origin, point.load, config.load if config is not None else None)
        known = found.get(point.name)
        if known is None:
            found[point.name] = part
        elif not known.origin.is_ours:  # a name of ours stays ours, so that no plugin can change what a recipe means
            found[point.name] = _Found(
                known.origin, known.factory, conflict=f"{known.origin} and {origin} both bring {kind} '{point.name}'"
            )
    if kind == "models" and not any(part.origin.is_ours for part in found.values()):
        raise PluginError(
            "ups is not installed: its package metadata is missing, or older than its code",
            hint="in a checkout: pip install -e .",
        )
    return found


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""
