"""Settings under the names that they had in an earlier version, in a recipe or in `--set`.

`Section` reads former names anywhere, for stored runs and bundles. Here they become present names before files are
merged and fields set, so that a new file can override an old one, and the author of a recipe is warned.
"""

from __future__ import annotations

import functools
import logging
import types
from typing import Annotated, Any, Union, get_args, get_origin

from ups.config.part import PartSection
from ups.config.setting import Section, former_name
from ups.config.yaml_subset import Document, FieldPath, Value, dotted
from ups.errors import PluginError

logger = logging.getLogger(__name__)


def use_present_names(document: Document, schema: Any, *, warn: bool, above: FieldPath = ()) -> None:
    """Rename in place what `document`, which stands at path `above` of a recipe, says under former names."""
    _rename(document, document.value, schema, (), above, warn)


def present_path(parts: list[str], schema: type[Section], data: Value) -> tuple[list[str], Any]:
    """The parts of a field path of `--set` under present names, and the annotation of the field; warns."""
    annotation: Any = schema
    present: list[str] = []
    for part in parts:
        if part.isdigit():
            data = data[int(part)] if isinstance(data, list) and int(part) < len(data) else None
            present.append(part)
            continue
        section = _section_for(annotation, data if isinstance(data, dict) else {})
        present.append(_former_names(section).get(part, part))
        field = section.model_fields.get(present[-1]) if section is not None else None
        annotation = field.annotation if field is not None else None
        data = data.get(present[-1]) if isinstance(data, dict) else None
    if present != parts:
        _warn("--set", ".".join(parts), ".".join(present))
    return present, annotation


def _rename(document: Document, value: Value, annotation: Any, path: FieldPath, above: FieldPath, warn: bool) -> None:
    if isinstance(value, list):
        for number, item in enumerate(value):
            _rename(document, item, annotation, (*path, number), above, warn)
    section = _section_for(annotation, value) if isinstance(value, dict) else None
    if section is None:
        return
    # A setting under both names stays: `Section` refuses it.
    renamed = {old: new for old, new in _former_names(section).items() if old in value and new not in value}
    for old, new in renamed.items():
        if warn:
            _warn(str(document.origins[(*path, old)]), dotted((*above, *path, old)), dotted((*above, *path, new)))
        _move_origins(document, (*path, old), (*path, new))
    if renamed:
        entries = {renamed.get(name, name): item for name, item in value.items()}
        value.clear()
        value.update(entries)
    for name, item in value.items():
        if name in section.model_fields:
            _rename(document, item, section.model_fields[name].annotation, (*path, name), above, warn)


def _move_origins(document: Document, old: FieldPath, new: FieldPath) -> None:
    moved = [path for path in document.origins if path[: len(old)] == old]
    for path in moved:
        document.origins[(*new, *path[len(old) :])] = document.origins.pop(path)


def _former_names(section: type[Section] | None) -> dict[str, str]:
    """Former name -> present name of the settings of a section."""
    fields = section.model_fields.items() if section is not None else ()
    return {former: name for name, field in fields if (former := former_name(field))}


def _section_for(annotation: Any, value: dict[str, Value]) -> type[Section] | None:
    """The section that a mapping is, by its `type` where several are possible; None if it is not known."""
    if isinstance(annotation, type) and issubclass(annotation, PartSection) and annotation.is_base():
        name = annotation.type_of(value)
        try:
            known = isinstance(name, str) and name in annotation.registry.names()
            return annotation.settings_of(name) if known else annotation
        except PluginError:  # reported when the recipe is validated
            return None
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Annotated, Union, types.UnionType, list):
        return next((s for part in get_args(annotation) if (s := _section_for(part, value)) is not None), None)
    return None


@functools.cache  # a command may read a recipe more than once
def _warn(where: str, old: str, new: str) -> None:
    logger.warning("%s: %s is now called %s: rename it; the next version does not know the old name", where, old, new)
