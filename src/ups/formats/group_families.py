"""Which groups of a file are trajectories: siblings whose names differ by a number and that hold the same arrays."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ups.buckets.path import natural
from ups.formats.hdf5_tree import TreeSurvey

_DIGITS = re.compile(r"\d+")


def find_families(survey: TreeSurvey) -> dict[str, list[str]]:
    """Parent -> its largest set of at least two such groups, in the order of their numbers. None lies in another."""
    contents: dict[str, set[str]] = {}
    for name in survey.arrays:
        for parent in parents(name):
            contents.setdefault(parent, set()).add(name.removeprefix(f"{parent}/"))
    alike: dict[str, dict[tuple[str, frozenset[str]], list[str]]] = {}
    for group, names in contents.items():
        parent, _, own = group.rpartition("/")
        alike.setdefault(parent, {}).setdefault((_DIGITS.sub("0", own), frozenset(names)), []).append(group)
    found: dict[str, list[str]] = {}
    inside: set[str] = set()
    for parent, sets in sorted(alike.items()):
        largest = max(sets.values(), key=len)
        if len(largest) > 1 and inside.isdisjoint((parent, *parents(parent))):
            found[parent] = sorted(largest, key=natural)
            inside.update(largest)
    return found


def ambiguous(ranks: Mapping[str, int]) -> list[list[str]]:
    """Arrays of the same name in sibling groups, each of which would pass for a field: `a/u` and `b/u`.

    An array of a family stays where its siblings are no family.
    """
    places: dict[tuple[str, str], list[str]] = {}
    for name, rank in ranks.items():
        if rank < 2:
            continue
        for group in parents(name):
            places.setdefault((group.rpartition("/")[0], name.removeprefix(f"{group}/")), []).append(name)
    found: list[list[str]] = []
    seen: set[str] = set()
    for (parent, _), names in places.items():
        start = f"{parent}/*/" if parent else "*/"
        rest = [name for name in names if not name.startswith(start) and name not in seen]
        if len(names) > 1 and rest:
            found.append(rest)
            seen.update(rest)
    return found


def listed(names: list[str]) -> str:
    """The first of many names, for a message."""
    return " and ".join(f"'{name}'" for name in names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def parents(path: str) -> list[str]:
    """The groups that a path leads through, the outermost first."""
    parts = path.split("/")
    return ["/".join(parts[:depth]) for depth in range(1, len(parts))]
