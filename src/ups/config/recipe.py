"""How a file becomes a validated run description: include, overrides, checks, one canonical text and its hash.

`resolve` is the only way in. The YAML itself is read in `yaml_subset.py`, the fields are declared in `schema.py`, the
words for mistakes are found in `explain.py`.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ups.config.explain import lookup, sections_at, validated
from ups.config.model import as_stored
from ups.config.schema import Recipe
from ups.config.yaml_subset import (
    MAX_DEPTH,
    Document,
    FieldPath,
    Origin,
    Value,
    dotted,
    dump,
    parse,
    paths_in,
    yaml_text,
)
from ups.errors import ConfigError
from ups.record.run_dir import BUNDLE_FILE, CONFIG_NAME, RunDir
from ups.registry import use_recorded_scripts

MAX_FILES = 64
_SET = Origin("--set", 0)
_NO_RECIPE = "`ups init` writes one for own data; the sources have some in recipes/"


@dataclass(frozen=True)
class ResolvedRecipe:
    """A validated recipe, its canonical YAML text, and the SHA-256 of that text (`sha256sum config.yaml` agrees)."""

    recipe: Recipe
    text: str
    hash: str
    files: tuple[str, ...]


def resolve(path: str | os.PathLike[str], overrides: Sequence[str] = (), *, other_files: bool = True) -> ResolvedRecipe:
    """Load a recipe with its includes, apply `a.b=c` overrides in order, and check everything.

    other_files: whether it may name others, by `include` and `description`; a recipe that ups wrote names none.
    """
    stored = os.path.basename(path) == CONFIG_NAME
    if stored and not (Path(path).parent / BUNDLE_FILE).exists():
        use_recorded_scripts(RunDir(Path(path).parent).plugins)
    reader = _Reader(other_files)
    document = reader.read(os.fspath(path))
    if stored:
        _complete_models(document)
        _use_present_names(document)
    return _resolved(document, overrides, reader)


def _complete_models(document: Document) -> None:
    """Write into models of a stored recipe (config.yaml of a run or bundle) what its version left unsaid: the type, and
    settings that it did not have. Settings get their present names."""
    recipe, networks = document.value, document.value.get("networks")
    if recipe.get("model") is None:
        recipe["model"] = {}
    models: dict[FieldPath, Value] = {("model",): recipe["model"]}
    if isinstance(networks, dict):
        models |= {("networks", name): model for name, model in networks.items()}
    for path, model in models.items():
        if isinstance(model, dict):
            complete = as_stored(model)
            origin = document.origins.get(path, document.origins[()])
            document.origins = dict.fromkeys([path, *((*path, name) for name in complete)], origin) | document.origins
            model.clear()
            model.update(complete)


def resolve_data(data: Value, overrides: Sequence[str] = (), name: str = "recipe") -> ResolvedRecipe:
    """The same for a recipe made of plain values, as `plain_data` gives it; `name` stands for its file in messages."""
    return _resolved(Document.of(copy.deepcopy(data), name), overrides, _Reader())


def _resolved(document: Document, overrides: Sequence[str], reader: _Reader) -> ResolvedRecipe:
    for override in overrides:
        apply_override(document, override)
    reader.take_descriptions(document)
    recipe = validated(Recipe, document)
    text = dump_recipe(recipe)
    return ResolvedRecipe(recipe, text, text_hash(text), tuple(reader.files))


def dump_recipe(recipe: Recipe) -> str:
    """The canonical YAML of a recipe: every field, in the order of the schema, defaults written out."""
    return dump(plain_data(recipe))


def dump_brief_recipe(recipe: Recipe) -> str:
    """The canonical YAML without fields that are empty and were not set: the same recipe in less text."""
    return dump(_without_empty(plain_data(recipe), recipe.model_dump(mode="json", exclude_defaults=True)))


def _without_empty(value: Value, changed: Value) -> Any:
    """changed: the same without what has its default; a field that is emptied on purpose stays."""
    if isinstance(value, list):
        others = changed if isinstance(changed, list) else [None] * len(value)
        return [_without_empty(item, other) for item, other in zip(value, others, strict=True)]
    if not isinstance(value, dict):
        return value
    names = changed if isinstance(changed, dict) else {}
    items = {name: item for name, item in value.items() if name in names or (item is not None and item not in ([], {}))}
    return {name: _without_empty(item, names.get(name)) for name, item in items.items()}


def plain_data(recipe: Recipe) -> dict[str, Value]:
    """A recipe as plain values: every field, in the order of the canonical text."""
    data: dict[str, Value] = _kind_first(recipe.model_dump(mode="json"))
    return data


def _kind_first(value: Value) -> Value:
    """A section begins with its `type`: inheritance would put it after the fields of the base."""
    if isinstance(value, list):
        return [_kind_first(item) for item in value]
    if not isinstance(value, dict):
        return value
    names = sorted(value, key=lambda name: name != "type")
    return {name: _kind_first(value[name]) for name in names}


def text_hash(text: str) -> str:
    """SHA-256 of a canonical text, in hexadecimal."""
    return hashlib.sha256(text.encode()).hexdigest()


def recipe_file(path: str | os.PathLike[str]) -> Path:
    """The recipe that a path means: a file, the resolved one of a run directory, or that of `ups init`."""
    named = Path(path)
    inside = (named / name for name in (CONFIG_NAME, "recipe.yaml"))
    return next((file for file in inside if file.is_file()), named)


@dataclass
class _Reader:
    """Reads a file and the files that it names; `files` are those that it has read."""

    other_files: bool = True
    files: list[str] = field(default_factory=list)

    def read(self, file: str, chain: tuple[str, ...] = (), included_from: str = "") -> Document:
        text = self._text_of(file, f"{included_from}: include: " if included_from else "")
        real = os.path.realpath(file)
        if real in chain:
            loop = " -> ".join(os.path.basename(name) for name in (*chain[chain.index(real) :], real))
            raise ConfigError(f"{included_from}: include: goes round in a loop: {loop}", hint="remove one include")
        document = parse(text, file)
        if document.value is None:
            raise ConfigError(f"{file}: is empty", hint="start from recipes/tiny.yaml")
        if not isinstance(document.value, dict):
            kind = _a(document.value)
            raise ConfigError(
                f"{document.origins[()]}: a recipe is made of sections (run:, data:, ...), this is {kind}",
                hint="start from recipes/tiny.yaml",
            )
        names = _include_names(document)
        if not names:
            return document
        where = str(document.origins[("include",)])
        del document.value["include"]
        folder = os.path.dirname(file)
        paths = [os.path.normpath(os.path.join(folder, name)) for name in names]
        return functools.reduce(_merge, [*(self.read(path, (*chain, real), where) for path in paths), document])

    def take_descriptions(self, document: Document) -> None:
        """Put the content of each file that a task names as its `description` into the recipe.

        So a run keeps what it was told about its data, whatever happens to the file. Relative to the recipe, as
        `include`.
        """
        for path in list(paths_in(document.value)):
            if path[:2] == ("data", "tasks") and path[3:] in (("description",), ("source", "description")):
                self._take_description(document, path)

    def _take_description(self, document: Document, path: FieldPath) -> None:
        section = lookup(document.value, path[:-1])
        name = section["description"]
        if not isinstance(name, str):
            return
        origin = document.origins[path]
        folder = os.path.dirname(origin.file) if origin.line else ""
        file = os.path.normpath(os.path.join(folder, name))
        described = parse(self._text_of(file, f"{origin.before}{dotted(path)}: "), file)
        if not isinstance(described.value, dict):
            raise ConfigError(f"{file}: a task description is made of 'name: value' lines", hint="docs/task-yaml.md")
        section["description"] = described.value
        document.origins.update({(*path, *inner): origin for inner, origin in described.origins.items()})

    def _text_of(self, file: str, named_by: str) -> str:
        """The text of a file that is read first (named_by is empty), or that another one names."""
        if named_by and not self.other_files:
            raise ConfigError(f"{named_by}{file}: a recipe that ups wrote names no other file", hint="it was edited")
        # First: it has words for names that no file can have.
        text = yaml_text(file, named_by, missing="" if named_by else _NO_RECIPE)
        if named_by and not file.endswith((".yaml", ".yml")):
            raise ConfigError(f"{named_by}{file}: expected a file that ends in .yaml or .yml")
        if len(self.files) >= MAX_FILES:
            raise ConfigError(f"{named_by}{file}: more than {MAX_FILES} files", hint="include fewer")
        self.files.append(file)
        return text


def _a(value: Value) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a section"}
    return kinds.get(type(value), "empty")


def _include_names(document: Document) -> list[str]:
    if "include" not in document.value:
        return []
    include = document.value["include"]
    names = include if isinstance(include, list) else [include]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"{document.origins[('include',)]}: include: expected a file name or a list of file names",
            hint="write 'include: base.yaml', relative to this file",
        )
    return names


def _merge(base: Document, over: Document) -> Document:
    """Sections merge field by field; anything else, lists too, is replaced as a whole."""
    origins = dict(base.origins)

    def merged(low: Value, high: Value, path: FieldPath) -> Value:
        if isinstance(low, dict) and isinstance(high, dict):
            origins[path] = over.origins[path]
            return low | {key: merged(low.get(key), value, (*path, key)) for key, value in high.items()}
        _forget(origins, low, path)
        origins.update({inner: over.origins[inner] for inner in paths_in(high, path)})
        return high

    return Document(merged(base.value, over.value, ()), origins)


def _forget(origins: dict[FieldPath, Origin], value: Value, path: FieldPath) -> None:
    for known in paths_in(value, path):
        origins.pop(known, None)


def apply_override(document: Document, override: str) -> None:
    """Apply one `a.b=c` (or `a.0.b=c`) to a document, exactly as if the file had been edited there."""
    name, sign, text = override.partition("=")
    # The name alone: a value given on the command line may be what a secret field was meant to keep out of sight.
    where = f"--set {name.strip()[:80]}"
    parts = name.strip().split(".")
    if not sign or not all(parts) or len(parts) > MAX_DEPTH:
        raise ConfigError(f"{where}: expected field=value", hint="for example --set engine.precision=bfloat16")
    if parts[0] == "include":
        raise ConfigError(f"{where}: 'include' cannot be set", hint="write it into the recipe")
    parsed = parse(text, where, first_line=0)
    here: Any = document.value
    path: FieldPath = ()
    for part in parts[:-1]:
        key = _key_in(here, path, part, where)
        path = (*path, key)
        if isinstance(here, dict) and here.get(part) is None:
            here[part] = {}
            document.origins.setdefault(path, _SET)
        here = here[key]
    key = _key_in(here, path, parts[-1], where)
    path = (*path, key)
    _forget(document.origins, here.get(key) if isinstance(here, dict) else here[key], path)
    here[key] = parsed.value
    document.origins.update(dict.fromkeys(paths_in(parsed.value, path), _SET))


def _key_in(here: Any, path: FieldPath, part: str, where: str) -> str | int:
    if isinstance(here, dict):
        return part
    if isinstance(here, list):
        if part.isascii() and part.isdigit() and len(part) < 7 and int(part) < len(here):
            return int(part)
        numbers = "it is empty" if not here else "only 0" if len(here) == 1 else f"0 to {len(here) - 1}"
        raise ConfigError(f"{where}: {dotted(path)} is a list and has no entry '{part}'", hint=f"entries: {numbers}")
    raise ConfigError(f"{where}: {dotted(path)} is {_a(here)} and has no field '{part}'")


def _use_present_names(document: Document) -> None:
    """Rename the settings of a stored recipe that had another name in an earlier version."""
    for path in list(document.origins):
        for kind in sections_at(Recipe, document.value, path[:-1]) if path else ():
            name, section = kind.former_names().get(str(path[-1])), lookup(document.value, path[:-1])
            if name and path[-1] in section:  # settings of models have their present names already
                section[name] = section.pop(path[-1])
                document.origins[(*path[:-1], name)] = document.origins.pop(path)
