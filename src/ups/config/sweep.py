"""The runs of a sweep: which fields of a recipe get which values, and what each run is called.

A name depends on the values of its own run only, so that a sweep with more values keeps the runs that are there.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ups.config.yaml_subset import Value, parse, shown_value
from ups.errors import ConfigError

MAX_RUNS = 10_000
MAX_NAME = 128  # as `run.name`
MAX_VALUE = 32
Axis = list[dict[str, str]]  # its points: field -> value as YAML
_HINT = "such as --over 'run.seed=[0, 1, 2]' or --over 'A,B=[[1, 2], [3, 4]]'"
# A '-' in a word could be read as the start of the next value.
_WORD = re.compile(rf"[A-Za-z0-9_.]{{1,{MAX_VALUE}}}")
_NUMBER = re.compile(r"-?[0-9.]+(e-?[0-9]+)?")


@dataclass(frozen=True)
class Cell:
    """One run of a sweep. changes: its values, name and directory, as `--set` takes them."""

    name: str
    run_dir: Path
    values: dict[str, Value]
    changes: list[str]

    @property
    def words(self) -> list[str]:
        """The changes as words of a command."""
        return [word for change in self.changes for word in ("--set", change)]


def axes_of(over: Sequence[str]) -> list[Axis]:
    """One axis for each `FIELD=[V1, V2]`, or `A,B=[[1, 2], [3, 4]]` for fields that change together."""
    axes = []
    for text in over:
        names, _, listed = text.partition("=")
        fields = [name.strip() for name in names.split(",")]
        values = parse(listed, f"--over {names.strip()[:80]}", first_line=0).value
        points = [[value] for value in values] if isinstance(values, list) and len(fields) == 1 else values
        if not all(fields) or len({*fields}) < len(fields) or not isinstance(points, list) or not points:
            raise ConfigError(f"--over '{text[:80]}' is not FIELD=[VALUE, ...], with a YAML list", hint=_HINT)
        for point in points:
            if not isinstance(point, list) or len(point) != len(fields):
                raise ConfigError(
                    f"--over {names.strip()[:80]}: expected a list of {len(fields)} values, got {shown_value(point)}",
                    hint=_HINT,
                )
        axes.append([dict(zip(fields, map(shown_value, point), strict=True)) for point in points])
    return axes


def cells(axes: Sequence[Axis], name: str, run_dir: Path, mirror: str | None) -> list[Cell]:
    """A run for each combination, next to `run_dir`; none without axes.

    mirror: the one of the recipe, below which each run gets a place of its own.
    """
    fields = [field for axis in axes for field in axis[0]]
    wrong = {"run", "run.name", "run.dir", *(field for field in fields if fields.count(field) > 1)} & {*fields}
    if wrong:
        raise ConfigError(
            f"'{min(wrong)}' cannot be swept: it is given twice, or each run has its own",
            hint="give each field once, and neither run.name nor run.dir",
        )
    if math.prod(map(len, axes)) > MAX_RUNS:
        raise ConfigError(f"the sweep has {math.prod(map(len, axes)):,} runs: at most {MAX_RUNS:,} are allowed")
    runs: dict[str, Cell] = {}
    for points in itertools.product(*axes) if axes else ():
        texts = {field: text for point in points for field, text in point.items()}
        end = "-".join(f"{_short(field, fields)}_{_safe(texts[field])}" for field in texts)
        own, own_dir = _bounded(f"{name}-{end}"), run_dir.with_name(_bounded(f"{run_dir.name}-{end}"))
        if own in runs:
            raise ConfigError(f"two runs of the sweep have the same values: {own}", hint="give each value once")
        # A section before the fields in it, which would be lost.
        changes = dict(sorted(texts.items(), key=lambda item: item[0].count(".")))
        if mirror and not {"checkpoint", "checkpoint.mirror"} & changes.keys():
            changes["checkpoint.mirror"] = shown_value(f"{mirror.rstrip('/')}/{own}")
        changes |= {"run.name": shown_value(own), "run.dir": shown_value(str(own_dir))}
        values = {field: parse(text, field, first_line=0).value for field, text in texts.items()}
        runs[own] = Cell(own, own_dir, values, [f"{field}={text}" for field, text in changes.items()])
    return list(runs.values())


def _short(field: str, fields: Sequence[str]) -> str:
    """The shortest end of a field's name that no other one has: learning_rate."""
    parts = field.split(".")
    ends = (".".join(parts[-count:]) for count in range(1, len(parts)))
    return next((end for end in ends if sum(f".{other}".endswith(f".{end}") for other in fields) == 1), field)


def _safe(text: str) -> str:
    """A value in a name: as it is, numbers of a list joined by '_', and anything else shortened, with a hash."""
    numbers = text[1:-1].split(", ") if text.startswith("[") and ", " in text else [text]
    if len(text) <= MAX_VALUE and all(map(_NUMBER.fullmatch, numbers)):
        return "_".join(numbers)
    start = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[: MAX_VALUE - 7]
    return text if _WORD.fullmatch(text) else f"{start}-{_hash(text)}"


def _bounded(name: str) -> str:
    return name if len(name) <= MAX_NAME else f"{name[: MAX_NAME - 7]}-{_hash(name)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:6]
