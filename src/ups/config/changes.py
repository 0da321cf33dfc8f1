"""The difference of two recipes field by field, for people."""

from __future__ import annotations

from typing import Any

from ups.config.yaml_subset import scalar_text

ABSENT = object()


def changes_between(a: Any, b: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """(field, value in a, value in b) for each leaf of two recipes that differs; ABSENT for what one of them lacks."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = list(a) + [key for key in b if key not in a]
        pairs = [(str(key), a.get(key, ABSENT), b.get(key, ABSENT)) for key in keys]
    elif isinstance(a, list) and isinstance(b, list):
        size = max(len(a), len(b))
        pairs = [(str(i), a[i] if i < len(a) else ABSENT, b[i] if i < len(b) else ABSENT) for i in range(size)]
    else:
        same = type(a) is type(b) and a == b
        return [] if same else [(path, a, b)]
    return [change for key, old, new in pairs for change in changes_between(old, new, f"{path}.{key}" if path else key)]


def shown_value(value: Any) -> str:
    """A value of a recipe as it would be written there, on one line."""
    if value is ABSENT:
        return "(absent)"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {shown_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(shown_value(item) for item in value) + "]"
    return scalar_text(value)
