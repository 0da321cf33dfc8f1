"""What happens at the ends of the axes of a file of The Well, and the walls inside its domain.

The format has a group for each condition, with a mask over the axes that it belongs to. A face of the domain is a wall
if all of it is, open or periodic if any of it is; where nothing is said it is open. A mask that also holds points
inside the domain is a static field of its own: an obstacle.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ups.formats.base import Array
from ups.formats.hdf5_survey import ArraySurvey
from ups.formats.the_well_fields import SPACE, Sizes, WellField, axes_of, flag, plain
from ups.formats.the_well_survey import BOUNDARIES, WellSurvey
from ups.spec.task import Boundary, FieldSpec

MAX_MASK_POINTS = 1 << 26
_WORDS: tuple[tuple[str, Boundary], ...] = (
    ("PERIODIC", "periodic"),
    ("DIRICHLET", "dirichlet"),
    ("NEUMANN", "neumann"),
    ("WALL", "wall"),
    ("OPEN", "open"),
)


@dataclass
class Boundaries:
    """ends: of each axis, at its first and last point. masks: obstacles. assumptions: in words."""

    ends: list[list[Boundary]]
    masks: list[WellField]
    assumptions: list[str]


def boundaries_of(
    path: str, survey: WellSurvey, axes: list[str], sizes: Sizes, read: Callable[[ArraySurvey], Array]
) -> Boundaries:
    """The boundaries of a file. read: the values of a small dataset."""
    groups = sorted(name for name in survey.attributes if name.startswith(f"{BOUNDARIES}/") and name.count("/") == 1)
    if not groups:
        unknown: list[list[Boundary]] = [["unknown", "unknown"] for _ in axes]
        return Boundaries(unknown, [], ["the boundary is unknown: no axis is taken as periodic"])
    found = Boundaries([["open", "open"] for _ in axes], [], [])
    said: set[int] = set()
    for group in groups:
        said |= _take(path, survey, group, axes, sizes, read, found)
    # An axis wraps around or has two ends.
    found.ends = [["periodic", "periodic"] if "periodic" in both else both for both in found.ends]
    left = [axis for number, axis in enumerate(axes) if number not in said]
    if left:
        found.assumptions.append(f"nothing is said about the ends of {', '.join(left)}: taken as open")
    return found


def _take(
    path: str,
    survey: WellSurvey,
    group: str,
    axes: list[str],
    sizes: Sizes,
    read: Callable[[ArraySurvey], Array],
    found: Boundaries,
) -> set[int]:
    """Add one condition to what is found; the numbers of the axes it speaks of."""
    attributes, name = survey.attributes[group], group.split("/")[1]
    kind = _kind(" ".join(map(str, attributes.get("bc_type", []))) or name)
    dims = [str(dim) for dim in attributes.get("associated_dims", [])]
    numbers = [axes.index(dim) for dim in dims if dim in axes]
    mask = survey.arrays.get(f"{group}/mask")
    if not numbers or len(numbers) != len(dims) or numbers != sorted(set(numbers)) or mask is None:
        found.assumptions.append(f"boundary condition '{name}' is not used: it has no mask over axes of the grid")
        return set()
    if f"{group}/values" in survey.arrays:
        found.assumptions.append(f"the values of boundary condition '{name}' are not used")
    space = tuple(sizes.space[n] for n in numbers)
    lead = "N" if len(mask.shape) == len(space) + 1 and flag(attributes, "sample_varying") else ""
    expected = (sizes.trajectories, *space) if lead else space
    if flag(attributes, "time_varying") or mask.shape != expected or int(np.prod(expected)) > MAX_MASK_POINTS:
        found.assumptions.append(f"boundary condition '{name}' is not used: its mask has shape {mask.shape}")
        return set()
    values = read(mask).reshape(-1, *space) != 0  # (N or 1, *axes of the mask)
    if kind == "periodic" and not values.any():
        # Files are about that forget to set the mask of a periodic axis, and nothing else can be meant.
        found.assumptions.append(f"the mask of '{name}' is empty: its axis is taken as periodic")
        values = np.ones_like(values)
    every = kind in ("wall", "dirichlet", "neumann")
    for place, number in enumerate(numbers):
        for end, index in ((0, 0), (1, -1)):
            face = values.take(index, axis=1 + place)
            if face.all() if every else face.any():
                found.ends[number][end] = kind
    inside = values[(slice(None), *(slice(1, -1) for _ in space))]
    if every and inside.any():
        letters = lead + "".join(SPACE[n] for n in numbers)
        label = plain(f"{name}_mask", "mask")
        flags = {
            "dim_varying": [float(n in numbers) for n in range(len(axes))],
            "sample_varying": [float(bool(lead))],
            "time_varying": [0.0],
        }
        if axes_of(path, mask, flags, 0, sizes) == letters:
            found.masks.append(WellField("static", mask, letters, 1, (FieldSpec(label, "static"),), mask=True))
    return set(numbers)


def _kind(text: str) -> Boundary:
    upper = text.upper()
    return next((kind for word, kind in _WORDS if word in upper), "unknown")
