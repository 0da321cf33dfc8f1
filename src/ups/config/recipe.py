"""How a file becomes a validated run description: include, overrides, checks, one canonical text and its hash.

`resolve` is the only way in. The YAML itself is read in `yaml_subset.py`, the fields are declared in `schema.py`, the
words for mistakes are found in `explain.py`.
"""

from __future__ import annotations

import copy
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ups.config.description import description_text
from ups.config.explain import RecipeError, explain
from ups.config.former_names import present_path, use_present_names
from ups.config.model import FORMER_DEFAULT
from ups.config.schema import Recipe
from ups.config.yaml_subset import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_VALUES,
    Document,
    FieldPath,
    Origin,
    Value,
    dotted,
    dump,
    parse,
    paths_in,
)
from ups.errors import ConfigError
from ups.record.run_dir import BUNDLE_FILE, CONFIG_NAME, RunDir
from ups.registry import use_recorded_scripts

MAX_INCLUDE_DEPTH = 8
MAX_FILES = 64


@dataclass(frozen=True)
class ResolvedRecipe:
    """A validated recipe, its canonical YAML text, and the SHA-256 of that text (`sha256sum config.yaml` agrees)."""

    recipe: Recipe
    text: str
    hash: str
    files: tuple[str, ...]


def resolve(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> ResolvedRecipe:
    """Load a recipe with its includes, apply `a.b=c` overrides in order, and check everything."""
    stored = os.path.basename(path) == CONFIG_NAME
    if stored and not (Path(path).parent / BUNDLE_FILE).exists():
        use_recorded_scripts(RunDir(Path(path).parent).plugins)
    reader = _Reader()
    document = reader.read(os.fspath(path))
    if stored:
        _name_models(document)
    for override in overrides:
        apply_override(document, override)
    described = _take_descriptions(document)
    return _resolved(document, frozenset({*reader.included, *described}), (*reader.files, *described))


def _name_models(document: Document) -> None:
    """Write the type into models of a stored recipe (config.yaml of a run or bundle) that name none: the default of the
    version that stored it."""
    recipe, networks = document.value, document.value.get("networks")
    if recipe.get("model") is None:
        recipe["model"] = {}
    models = {("model",): recipe["model"]}
    if isinstance(networks, dict):
        models |= {("networks", name): model for name, model in networks.items()}
    for path, model in models.items():
        if isinstance(model, dict) and "type" not in model:
            model["type"] = FORMER_DEFAULT
            document.origins |= dict.fromkeys([path, (*path, "type")], document.origins.get(path, document.origins[()]))


def resolve_data(data: Value, overrides: Sequence[str] = (), name: str = "recipe") -> ResolvedRecipe:
    """The same for a recipe made of plain values, as `plain_data` gives it; `name` stands for its file in messages."""
    data = copy.deepcopy(data)
    document = Document(data, dict.fromkeys(paths_in(data), Origin(name, 0)))
    use_present_names(document, Recipe, warn=True)
    for override in overrides:
        apply_override(document, override)
    described = _take_descriptions(document)
    return _resolved(document, frozenset(described), tuple(described))


def _resolved(document: Document, included: frozenset[str], files: tuple[str, ...]) -> ResolvedRecipe:
    recipe = _validate(document, included)
    text = dump_recipe(recipe)
    return ResolvedRecipe(recipe, text, text_hash(text), files)


def dump_recipe(recipe: Recipe) -> str:
    """The canonical YAML of a recipe: every field, in the order of the schema, defaults written out."""
    return dump(plain_data(recipe))


def dump_brief_recipe(recipe: Recipe) -> str:
    """The canonical YAML without fields that are empty and that nobody has set: the same recipe in less text."""
    return dump(_without_empty(plain_data(recipe), recipe.model_dump(mode="json", exclude_defaults=True)))


def _without_empty(value: Value, changed: Value) -> Any:
    """changed: the same without what has its default; a field that is emptied on purpose stays."""
    if isinstance(value, list):
        others = changed if isinstance(changed, list) else [None] * len(value)
        return [_without_empty(item, other) for item, other in zip(value, others, strict=True)]
    if not isinstance(value, dict):
        return value
    names = changed if isinstance(changed, dict) else {}
    kept = {name: item for name, item in value.items() if name in names or (item is not None and item not in ([], {}))}
    return {name: _without_empty(item, names.get(name)) for name, item in kept.items()}


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
    """The recipe a person means: a file, the resolved one of a run directory, or that of `ups init`."""
    given = Path(path)
    inside = (given / name for name in (CONFIG_NAME, "recipe.yaml"))
    return next((file for file in inside if file.is_file()), given)


@dataclass
class _Reader:
    """Reads a file and what it includes, with a bound on everything that an include can multiply."""

    files: list[str] = field(default_factory=list)
    included: set[str] = field(default_factory=set)
    num_values: int = 0

    def read(self, file: str, chain: tuple[str, ...] = (), included_from: str = "") -> Document:
        text = _text_of(file, included_from)  # first: it has words for names that no file can have
        if included_from and not file.endswith((".yaml", ".yml")):
            raise ConfigError(
                f"{included_from}: include: {file}: only files that end in .yaml or .yml are included",
                hint="include recipe files only",
            )
        real = os.path.realpath(file)
        if real in chain:
            loop = " -> ".join(os.path.basename(name) for name in (*chain[chain.index(real) :], real))
            raise ConfigError(f"{included_from}: include: goes round in a loop: {loop}", hint="remove one include")
        if len(chain) >= MAX_INCLUDE_DEPTH:
            raise ConfigError(f"{included_from}: include: more than {MAX_INCLUDE_DEPTH} levels deep")
        if len(self.files) >= MAX_FILES:
            raise ConfigError(f"{included_from}: include: more than {MAX_FILES} files")
        # A recipe from an untrusted source may include a file of ours that is none, such as credentials: errors do not
        # repeat it.
        document = parse(text, file, quote=not chain)
        use_present_names(document, Recipe, warn=os.path.basename(file) != CONFIG_NAME)
        self.files.append(file)
        if chain:
            self.included.add(file)
        self.num_values += len(document.origins)
        if self.num_values > MAX_VALUES:
            raise ConfigError(f"{file}: more than {MAX_VALUES:,} values with all includes")
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
        merged: Document | None = None
        for name in names:
            base = self.read(os.path.normpath(os.path.join(os.path.dirname(file), name)), (*chain, real), where)
            merged = base if merged is None else _merge(merged, base)
        return document if merged is None else _merge(merged, document)


def _take_descriptions(document: Document) -> list[str]:
    """Put the content of each file that a task names as its `description` into the recipe; returns these files.

    So a run keeps what it was told about its data, whatever happens to the file. Relative to the recipe, as `include`.
    """
    data = document.value.get("data") if isinstance(document.value, dict) else None
    tasks = data.get("tasks") if isinstance(data, dict) else None
    listed = enumerate(tasks if isinstance(tasks, list) else ())
    described: list[tuple[FieldPath, Any]] = []
    for number, task in listed:
        described.append((("data", "tasks", number), task))
        if isinstance(task, dict):
            described.append((("data", "tasks", number, "source"), task.get("source")))
    files: list[str] = []
    for above, holder in described:
        name = holder.get("description") if isinstance(holder, dict) else None
        if not isinstance(name, str):
            continue
        path: FieldPath = (*above, "description")
        origin = document.origins[path]
        folder = os.path.dirname(origin.file) if origin.line else ""
        file = os.path.normpath(os.path.join(folder, name))
        if not name.endswith((".yaml", ".yml")) or len(files) >= MAX_FILES:
            raise ConfigError(
                f"{_at(origin)}{dotted(path)}: expected a file that ends in .yaml or .yml, {MAX_FILES} at most",
                hint="`ups init DIR --data FILE` writes a task.yaml",
            )
        # As with an include, the file may have been named by somebody else: errors do not repeat it.
        found = parse(description_text(file), file, quote=False)
        if not isinstance(found.value, dict):
            raise ConfigError(f"{file}: a task description is made of 'name: value' lines", hint="see docs/own-data.md")
        holder["description"] = found.value
        document.origins.update({(*path, *inner): place for inner, place in found.origins.items()})
        files.append(file)
    return files


def _at(origin: Origin) -> str:
    return f"{origin}: " if origin.line else f"{origin} "


def _a(value: Value) -> str:
    kinds = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list", dict: "a section"}
    return kinds.get(type(value), "empty")


def _include_names(document: Document) -> list[str]:
    if "include" not in document.value:
        return []
    given = document.value["include"]
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ConfigError(
            f"{document.origins[('include',)]}: include: expected a file name or a list of file names",
            hint="write 'include: base.yaml', relative to this file",
        )
    return names


def _text_of(file: str, included_from: str) -> str:
    """The text of a recipe file. Only regular files are opened: a pipe would hang."""
    where = f"{included_from}: include: {file}" if included_from else file
    try:
        status = os.stat(file)
        if stat.S_ISDIR(status.st_mode):
            raise ConfigError(
                f"{where}: is a directory", hint="name a recipe file, or a run directory with config.yaml"
            )
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{where}: is not a regular file", hint="save the recipe to a file first")
        with open(file, "rb") as stream:
            content = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        others = "" if included_from else "`ups init` writes one for own data; the sources have some in recipes/"
        raise ConfigError(f"{where}: no such file", hint=_nearest_file(file) or others) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{where}: cannot be read: {reason}") from None
    if len(content) > MAX_BYTES:
        raise ConfigError(
            f"{where}: is larger than {MAX_BYTES:,} bytes", hint="a recipe is a page of text; name data by its path"
        )
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{where}:{line}: is not UTF-8 text (byte 0x{content[error.start]:02x})", hint="save it as UTF-8"
        ) from None


def _nearest_file(file: str) -> str:
    import difflib

    folder = os.path.dirname(file)
    try:
        names = [name for name in os.listdir(folder or ".")[:10_000] if name.endswith((".yaml", ".yml"))]
    except OSError:
        return ""
    # By stem: the shared ending would make every recipe look like every other.
    stems = {os.path.splitext(name)[0]: name for name in names}
    close = difflib.get_close_matches(os.path.splitext(os.path.basename(file))[0], stems, n=1, cutoff=0.6)
    return f"did you mean {os.path.join(folder, stems[close[0]])}?" if close else ""


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
    given = parse(text, where, first_line=0)
    parts, annotation = present_path(parts, Recipe, document.value)
    use_present_names(given, annotation, warn=True, above=tuple(parts))
    here: Any = document.value
    path: FieldPath = ()
    for part in parts[:-1]:
        here, path = _step_into(here, path, part, document.origins, where)
    key = _key_in(here, path, parts[-1], where)
    path = (*path, key)
    _forget(document.origins, here.get(key) if isinstance(here, dict) else here[key], path)
    here[key] = given.value
    origin = Origin("--set", 0)
    document.origins.update(dict.fromkeys(paths_in(given.value, path), origin))


def _step_into(
    here: Any, path: FieldPath, part: str, origins: dict[FieldPath, Origin], where: str
) -> tuple[Any, FieldPath]:
    key = _key_in(here, path, part, where)
    path = (*path, key)
    if isinstance(here, dict) and here.get(key) is None:
        here[key] = {}
        origins.setdefault(path, Origin("--set", 0))
    return here[key], path


def _key_in(here: Any, path: FieldPath, part: str, where: str) -> str | int:
    if isinstance(here, dict):
        return part
    if isinstance(here, list):
        if part.isascii() and part.isdigit() and len(part) < 7 and int(part) < len(here):
            return int(part)
        numbers = "it is empty" if not here else "only 0" if len(here) == 1 else f"0 to {len(here) - 1}"
        raise ConfigError(f"{where}: {dotted(path)} is a list and has no entry '{part}'", hint=f"entries: {numbers}")
    raise ConfigError(f"{where}: {dotted(path)} is {_a(here)} and has no field '{part}'")


def _validate(document: Document, included: frozenset[str]) -> Recipe:
    problems: list[Any] = []
    try:
        # Strict: "96" is not 96 and yes is not true; a guess would be hashed and trained as if it had been meant.
        return Recipe.model_validate(document.value, strict=True)
    except ValidationError as error:
        problems = error.errors(include_url=False)
    # Outside the handler, so that no traceback in a log carries the values that pydantic keeps.
    mistakes = explain(problems, Recipe, document.value, document.origins, included)
    raise RecipeError.of(mistakes)
