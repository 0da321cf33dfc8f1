"""Which dataset of a file of The Well is which field, and along which axes it lies.

The flags of a dataset (`sample_varying`, `time_varying`, `dim_varying`) say which axes it has. Where they are missing
the shape decides, and where both speak they must agree. Letters: N trajectory, T time, X Y Z space, C component.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ups.errors import DataError
from ups.formats.hdf5_survey import ArraySurvey
from ups.formats.the_well_survey import FIELD_GROUPS, WellSurvey
from ups.spec.task import FieldSpec, Role

SPACE = "XYZ"
MAX_COMPONENTS = 16


@dataclass(frozen=True, slots=True)
class WellField:
    """A dataset, what its axes are, and the number of channels it gives. mask: of a boundary, true and false."""

    role: Role
    array: ArraySurvey
    axes: str
    channels: int
    specs: tuple[FieldSpec, ...]
    mask: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a file: trajectories, frames, and points along each axis."""

    trajectories: int
    frames: int
    space: tuple[int, ...]


def flag(attributes: Mapping[str, Sequence[float | str]], name: str) -> bool | None:
    """A truth value among attributes; None where it is missing or something else."""
    values = attributes.get(name)
    if not values or isinstance(values[0], str):
        return None
    return bool(values[0])


def plain(text: str, fallback: str) -> str:
    """A name that a task may have."""
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", text.strip())[:60]
    return name if re.match(r"[A-Za-z_]", name) else f"{fallback}_{name}" if name else fallback


def fields_of(path: str, survey: WellSurvey, sizes: Sizes) -> list[WellField]:
    """All fields in the order of the format: scalars, vectors, tensors, each as `field_names` lists them."""
    found: list[WellField] = []
    for rank, group in enumerate(FIELD_GROUPS):
        listed = survey.attributes.get(group, {}).get("field_names")
        present = [name.split("/")[1] for name in survey.arrays if name.startswith(f"{group}/")]
        names = [str(name) for name in listed] if listed is not None else sorted(present)
        for name in names:
            if name not in present:
                raise DataError(f"{path}: '{group}' lists a field '{name[:80]}' that it does not have")
            found.append(_field(path, survey, f"{group}/{name}", rank, sizes))
        survey.left_out.extend(f"'{group}/{n}', which is not listed" for n in sorted(set(present) - set(names)))
    return found


def _field(path: str, survey: WellSurvey, key: str, rank: int, sizes: Sizes) -> WellField:
    array, attributes = survey.arrays[key], survey.attributes.get(key, {})
    axes = axes_of(path, array, attributes, rank, sizes)
    counts = [n for letter, n in zip(axes, array.shape, strict=True) if letter == "C"]
    channels = 1
    for count in counts:
        channels *= count
    if channels > MAX_COMPONENTS:
        raise DataError(f"{path}: '{key}' has {channels} components, more than {MAX_COMPONENTS}")
    role: Role = "state" if "T" in axes else "static"
    name = plain(key.split("/")[1], "field")
    if channels == len(sizes.space) ** rank:
        specs: tuple[FieldSpec, ...] = (FieldSpec(name, role, tensor_rank=rank),)
    else:  # as of a flow in the plane with three components
        specs = tuple(FieldSpec(f"{name}_{i}", role) for i in range(channels))
    return WellField(role, array, axes, channels, specs)


def axes_of(
    path: str, array: ArraySurvey, attributes: Mapping[str, Sequence[float | str]], rank: int, sizes: Sizes
) -> str:
    """The letters of the axes of a dataset; an axis of space of length 1 has a small letter, and is broadcast."""
    varying = [bool(v) for v in attributes.get("dim_varying", ()) if not isinstance(v, str)]
    if len(varying) != len(sizes.space):
        varying = [True] * len(sizes.space)
    sample, time = flag(attributes, "sample_varying"), flag(attributes, "time_varying")
    for letters in _possible(rank, len(sizes.space), varying, sample, time):
        if len(letters) == len(array.shape) and _fits(letters, array.shape, sizes):
            return "".join(
                letter.lower() if letter in SPACE and n == 1 != sizes.space[SPACE.index(letter)] else letter
                for letter, n in zip(letters, array.shape, strict=True)
            )
    raise DataError(
        f"{path}: dataset '{array.name}' of shape {array.shape} does not fit {sizes.trajectories} trajectories of "
        f"{sizes.frames} frames on {' x '.join(map(str, sizes.space))} points, and what its attributes say of its axes"
    )


def _possible(rank: int, dims: int, varying: list[bool], sample: bool | None, time: bool | None) -> list[str]:
    """Arrangements of axes from the likeliest on: an axis along which nothing varies is absent, or has length 1."""
    leads = [
        ("N" if has_sample else "") + ("T" if has_time else "")
        for has_time in ((True, False) if time is None else (time,))
        for has_sample in ((True, False) if sample is None else (sample,))
    ]
    there = "".join(letter for letter, varies in zip(SPACE, varying, strict=False) if varies)
    spaces = list(dict.fromkeys((there, SPACE[:dims])))
    tails = ([""], ["C"], ["CC", "C"])[rank]  # a tensor has rows and columns, or lies flat
    return [lead + space + tail for space in spaces for lead in leads for tail in tails]


def _fits(letters: str, shape: tuple[int, ...], sizes: Sizes) -> bool:
    for letter, n in zip(letters, shape, strict=True):
        if letter == "N" and n != sizes.trajectories:
            return False
        if letter == "T" and n != sizes.frames:
            return False
        if letter in SPACE and n not in (1, sizes.space[SPACE.index(letter)]):
            return False
    return True
