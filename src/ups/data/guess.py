"""A first description of a file that has none: what its arrays are, which of that is a guess, and the task.yaml of it.

Names, coordinates, units and attributes of the file come first (`guess_dims`), then what the values show
(`guess_physics`). An equation is never guessed. Every number of the file ends as something: a coordinate, the time
step, a length, a parameter, or a line that says that it is not used.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ups.config.description import (
    CHANNEL,
    COMPONENT,
    TIME,
    TRAJECTORY,
    TaskDescription,
    describe_values,
)
from ups.config.yaml_subset import scalar_text
from ups.data.guess_dims import (
    ABOUT_THE_FILE,
    SPACES,
    Dims,
    axis_names,
    given_dims,
    guess_dims,
    is_about_the_file,
    labels_of,
    plain,
    plain_name,
    refuse_mesh,
    refuse_meshgrid,
    refuse_scattered,
    rises,
    role_of_name,
)
from ups.data.guess_physics import guess_boundary, guess_conserved, take_sample
from ups.data.normalize import masked, refuse_mask
from ups.errors import DataError
from ups.formats.container import Container, Variable
from ups.formats.described import (
    END_NAMES,
    STEP_NAMES,
    DescribedReader,
    equal_steps,
    is_stated,
    length_names,
    owned_numbers,
    spacing_names,
    understand,
)
from ups.formats.mesh_grid import OUTSIDE, MeshContainer
from ups.record.text import printable

MAX_COLUMNS = 16
FEW_TRAJECTORIES = 10
WANTED_PIECES = 20
LEAST_PIECE = 8
# What a reader assumes that the user who looks at the guesses should know.
_TOLD = ("the .npy files", "arrays", "attributes", "not read", "dt is", "extent of")


@dataclass
class Guess:
    """description: validated. reasons: path in the description -> why. sure: paths that the file itself says.

    notes: sentences for the user. uncertain: paths that the user has to look at first. num_not_finite: of the sample.
    """

    description: TaskDescription
    reasons: dict[str, str]
    sure: set[str]
    notes: list[str]
    uncertain: list[str] = field(default_factory=list)
    num_not_finite: int = 0


@dataclass(frozen=True)
class _Number:
    """where: in words. same: whether all files have it."""

    where: str
    value: float
    same: bool


def guess_description(containers: Sequence[Container], name: str, dims: Sequence[str] = ()) -> Guess:
    """What a file seems to hold; dims: what the dimensions are, where the user says so.

    Raises DataError if it has no array that could be a field.
    """
    return _Guesser(containers, name, tuple(dims)).guess()


class _Guesser:
    def __init__(self, containers: Sequence[Container], name: str, dims: tuple[str, ...]) -> None:
        self.containers, self.container, self.name, self.dim_names = containers, containers[0], name, dims
        self.reasons: dict[str, str] = {}
        self.sure: set[str] = set()
        self.notes: list[str] = []
        self.uncertain: list[str] = []
        self.num_not_finite = 0
        self.used: set[str] = set()
        self.used_attributes: set[tuple[str, str]] = set()
        self.names: set[str] = set()  # of axes, fields and parameters: no two may be called alike
        self.spacing: dict[str, _Number] = {}
        self.values: dict[str, Any] = {"name": name}

    def guess(self) -> Guess:
        if not self.dim_names:
            refuse_mesh(self.container)
            refuse_meshgrid(self.container)
        main = self._main()
        dims = given_dims(self.container, main, self.dim_names) if self.dim_names else guess_dims(self.container, main)
        if not self.dim_names:
            refuse_scattered(self.container, main, dims)
        names = self._axes(main, dims)
        count = main.shape[dims.role.index(TRAJECTORY)] if TRAJECTORY in dims.role else 1
        times = self._times(main, dims, count) if TIME in dims.role else ""  # before fields: times are none
        self._fields(main, dims, names)
        if not self.values.get("steady"):
            self._time(times, main.shape[dims.role.index(TIME)])
            self._pieces(main, dims, count * len(self.containers))
        self._parameters(count, main, dims)
        self._measure()
        description = describe_values(self.values, "the guessed description")
        reader = DescribedReader(self.containers, description, name=self.name)
        self.notes += [text for text in reader.assumptions if text.startswith(_TOLD)]
        if reader.task.dt_range is not None and "dt" not in self.values:
            low, high = reader.task.dt_range
            self._say("times", f"time steps {low:g} to {high:g}: each file has its own", sure=True)
        for path in self.uncertain:
            self.sure.discard(path)
        return Guess(description, self.reasons, self.sure, self.notes, self.uncertain, self.num_not_finite)

    def _say(self, path: str, why: str, *, sure: bool = False, look: bool = False) -> None:
        self.reasons[path] = why
        if sure:
            self.sure.add(path)
        if look:
            self.uncertain.append(path)

    def _free(self, name: str) -> str:
        """The name, or the next one that nothing else has."""
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def _main(self) -> Variable:
        arrays = [v for v in self.container.variables.values() if len(v.as_row.shape) >= 2 and v.size > 16]
        if not arrays:
            raise DataError(
                f"{self.container.path} has no array with two dimensions or more",
                hint="; ".join(self.container.left_out[:3])
                or "a field needs at least time and one axis of space: (trajectory, time, x)",
            )
        arrays = [v for v in arrays if len(v.shape) == len(self.dim_names)] or arrays
        rank = max(len(v.shape) for v in arrays if v.size * 8 >= max(a.size for a in arrays))
        largest = max((v for v in arrays if len(v.shape) == rank), key=lambda v: v.size)
        if rank > 6:
            raise DataError(f"array '{largest.name}' of {self.container.path} has {rank} dimensions")
        _refuse_numbered(self.container, arrays, largest)
        return largest

    def _axes(self, main: Variable, dims: Dims) -> dict[int, str]:
        """Dimension of the main array -> name of the axis."""
        indices = [i for i, role in enumerate(dims.role) if role == "space"]
        if not 1 <= len(indices) <= 3:
            shown = ", ".join(f"{n}: {role}" for n, role in zip(main.shape, dims.role, strict=True))
            raise DataError(
                f"{self.container.path}: array '{main.name}' would have {len(indices)} axes of space ({shown})",
                hint="describe it by a task.yaml (docs/task-yaml.md): dims says what each dimension is",
            )
        called = [dims.called[i] for i in indices] if dims.called else []
        called = called or axis_names([dims.coordinate[i] or main.dims[i] for i in indices])
        names = dict(zip(indices, called, strict=True))
        order = sorted(indices, key=lambda i: SPACES.get(names[i], 9)) if all(n in SPACES for n in called) else indices
        axes: list[dict[str, Any]] = []
        for number, i in enumerate(order):
            axis: dict[str, Any] = {"name": names[i]}
            path = f"axes.{number}"
            coordinate = dims.coordinate[i]
            if coordinate:
                self.used.add(coordinate)
                axis["dataset"] = coordinate
                self._unit(axis, path, self.container.variables[coordinate])
                self._say(f"{path}.name", f"{main.shape[i]} points of '{coordinate}'", sure=True)
            else:
                self._say(f"{path}.name", f"{main.shape[i]} points: {dims.why[i]}")
                self._extent(axis, path, names[i], main.shape[i])
            if isinstance(self.container, MeshContainer):
                box = self.container.box
                axis |= {"nodes": box.nodes[number], "start": box.start[number], "extent": box.extent[number]}
                self._say(f"{path}.nodes", "of the grid that the network works on, by the number of points")
            axes.append(axis)
        self.values["axes"] = axes
        self.names |= set(called)
        return names

    def _unit(self, entry: dict[str, Any], path: str, variable: Variable) -> None:
        unit = variable.attributes.get("units", variable.attributes.get("unit"))
        if isinstance(unit, str) and 0 < len(unit.strip()) <= 32:
            entry["unit"] = unit.strip()
            self._say(f"{path}.unit", f"units of '{variable.name}'", sure=True)
        elif isinstance(unit, str) and unit.strip():
            self.notes.append(f"the units of '{variable.name}' have more than 32 characters and are left out")

    def _extent(self, axis: dict[str, Any], path: str, name: str, size: int) -> None:
        stated = self._number(length_names(name))
        if stated is not None and stated.value > 0:
            axis["extent"] = stated.value
            self._say_number(f"{path}.extent", "from {}", stated)
            return
        spacing = self._number(spacing_names(name))
        if spacing is not None and spacing.value > 0:
            axis["extent"] = spacing.value * size
            self._say_number(f"{path}.extent", f"{size} points times {{}}", spacing)
            self.spacing[path] = spacing
            return
        last = self._number({f"{name}_max", f"{name}max"})
        first = self._number({f"{name}_min", f"{name}min"})
        if last is not None and last.value > (first.value if first else 0):
            axis["extent"] = last.value - (first.value if first else 0)
            if first is not None:
                both = _Number(f"{first.where} to {last.where}", last.value, first.same and last.same)
                self._say_number(f"{path}.extent", "from {}", both)
            else:
                self._say(f"{path}.extent", f"from {last.where}, if the axis begins at 0", look=True)
            return
        axis["extent"] = 1.0
        self._say(f"{path}.extent", "the file has no coordinates and no length", look=True)

    def _say_number(self, path: str, words: str, number: _Number) -> None:
        """Where a number is from; it stands in the description for all files, so that files must agree on it."""
        other = "" if number.same else "; other files say otherwise"
        self._say(path, words.format(number.where) + other, sure=number.same, look=not number.same)

    def _number(self, names: set[str] | frozenset[str]) -> _Number | None:
        """A number of the first file that is called so."""
        located = _find_number(self.container, names)
        if located is None:
            return None
        owner, key, value = located
        if key:
            self.used_attributes.add((owner, key))
        else:
            self.used.add(owner)
        where = f"attribute '{key}'" + (f" of '{owner}'" if owner else "") if key else f"'{owner}'"
        others = [_find_number(container, names) for container in self.containers[1:]]
        same = all(o is not None and bool(np.isclose(o[2], value, rtol=1e-6, atol=0)) for o in others)
        return _Number(where, value, same)

    def _fields(self, main: Variable, dims: Dims, names: dict[int, str]) -> None:
        labels = [names.get(i, role) for i, role in enumerate(dims.role)]
        steady = TIME not in labels
        fields: list[dict[str, Any]] = []
        for variable in self.container.variables.values():
            its_dims = labels if variable is main else labels_of(variable, main, labels)
            if its_dims is None or variable.name in self.used or any(a not in its_dims for a in names.values()):
                continue
            if variable is not main and self._is_no_field(variable, main, dims):
                continue
            self.used.add(variable.name)
            fields += self._fields_of(variable, its_dims, labels, steady, len(fields), len(names))
        if steady:
            self._steady(fields)
        self.values["fields"] = fields
        self.values["dims"] = labels
        why = "; ".join(f"{label}: {text}" for label, text in zip(labels, dims.why, strict=True))
        why = "as you said" if dims.called else why
        self._say("dims", why, sure=not dims.seen, look=bool(dims.seen))

    def _is_no_field(self, variable: Variable, main: Variable, dims: Dims) -> bool:
        """Whether an array is a row of numbers without names: as long as there are trajectories, so that it may be a
        parameter, or rising or falling, so that it may be a coordinate, which is named as not used."""
        if len(variable.shape) != 1 or variable.dims[0]:
            return False
        count = main.shape[dims.role.index(TRAJECTORY)] if TRAJECTORY in dims.role else 0
        return variable.shape[0] == count or rises(self.container, variable.name)

    def _fields_of(
        self, variable: Variable, dims: list[str], usual: list[str], steady: bool, first: int, num_axes: int
    ) -> list[dict[str, Any]]:
        """The fields of one array: one, or one for each channel."""
        size = variable.shape[dims.index(CHANNEL)] if CHANNEL in dims else 0
        if COMPONENT in dims and variable.shape[dims.index(COMPONENT)] != num_axes:
            dims = [CHANNEL if dim == COMPONENT else dim for dim in dims]
            size = variable.shape[dims.index(CHANNEL)]
        # An .npy names no array: its only one is called as the file.
        nameless = Path(self.container.path).suffix == ".npy" and len(self.container.variables) == 1
        base = "u" if nameless else plain_name(variable.name.split("/")[-1], "u")
        role = "target" if steady else "state" if TIME in dims else "static"
        entries: list[dict[str, Any]] = []
        for channel in range(max(1, size)):
            path = f"fields.{first + len(entries)}"
            entry: dict[str, Any] = {"name": base if size < 2 else f"{base}_{channel}", "role": role}
            entry["name"] = self._free(entry["name"])
            if entry["name"] != variable.name and not nameless:
                entry["dataset"] = variable.name
            if size:
                entry["channel"] = channel
                self._say(f"{path}.name", f"channel {channel} of '{variable.name}'")
            else:
                self._say(f"{path}.name", f"array '{variable.name}' {variable.shape}", sure=True)
            if COMPONENT in dims:
                entry["tensor_rank"] = 1
                self._say(f"{path}.tensor_rank", "it has as many components as there are axes")
            if role == "static":
                self._say(f"{path}.role", "it has no time")
            self._unit(entry, path, variable)
            if dims != usual:
                entry["dims"] = dims
            entries.append(entry)
        return entries

    def _steady(self, fields: list[dict[str, Any]]) -> None:
        if len(fields) < 2 and not self.dim_names:
            raise DataError(
                f"{self.container.label}: no dimension looks like time, and no field is given to predict "
                f"'{fields[0]['name']}' from",
                hint="stack the frames of a trajectory along a dimension, with np.stack; or name it: --dims time,x",
            )
        self.values["steady"] = True
        self._say("steady", "no dimension looks like time", look=True)
        for number, entry in enumerate(fields[:-1]):
            entry["role"] = "static"
            self._say(
                f"fields.{number}.role", "of the arrays without time all but the last are taken as given", look=True
            )

    def _times(self, main: Variable, dims: Dims, count: int) -> str:
        """The array of the times, or ''."""
        index = dims.role.index(TIME)
        frames = main.shape[index]
        name = dims.coordinate[index]
        if not name:
            shapes = {(count, frames), (count, frames + 1), (1, frames)}
            candidates = [
                n
                for n, v in self.container.variables.items()
                if n not in self.used and v.shape in shapes and role_of_name(n.removeprefix("*/")) == TIME
            ]
            name = candidates[0] if candidates else ""
        if name:
            self.used.add(name)
        return name

    def _time(self, name: str, frames: int) -> None:
        if name:
            self.values["times"] = name
            self._say("times", "", sure=True)
            unit = self.container.variables[name].attributes.get("units")
            if isinstance(unit, str) and 0 < len(unit.split(" since ")[0].strip()) <= 32:
                self.values["time_unit"] = unit.split(" since ")[0].strip()
                self._say("time_unit", f"units of '{name}'", sure=True)
            values = self.container.whole(name)
            values = values.reshape(-1, max(self.container.variables[name].as_row.shape[-1], 1))[:, :frames]
            if values.shape[1] > 1 and np.isfinite(values).all():
                # dt is left open, so that each file has that of its own times; the reader says what is wrong with them.
                step = float(np.diff(values, axis=1).mean())
                if step > 0 and equal_steps(values, step):
                    self._say("times", f"time step {_short_float(step):g}: spacing of '{name}'", sure=True)
                return
        number, end = self._number(STEP_NAMES), self._number(END_NAMES)
        by_end = end.value / (frames - 1) if end is not None and end.value > 0 and frames > 1 else None
        if number is not None and number.value > 0:
            self.values["dt"] = number.value
            self._say_number("dt", "from {}", number)
            if end is not None and by_end is not None and not _fits(number.value, end.value, frames):
                words = f"from {number.where}, but {end.where} over {frames - 1} steps is {_short_float(by_end):g}"
                self._say("dt", words, look=True)
            return
        if end is not None and by_end is not None:
            self.values["dt"] = by_end
            self._say("dt", f"{end.where} over {frames - 1} steps, if the first frame is at time 0", look=True)
            return
        self.values["dt"] = 1.0
        self._say("dt", "the file has no times and no time step: time is counted in frames", look=True)

    def _pieces(self, main: Variable, dims: Dims, count: int) -> None:
        index = dims.role.index(TIME)
        known = [container.variables.get(main.name) for container in self.containers]
        frames = min(v.shape[index] for v in known if v and len(v.shape) == len(main.shape))  # of the shortest file
        if count >= FEW_TRAJECTORIES or frames * count < FEW_TRAJECTORIES * LEAST_PIECE:
            return
        piece = max(LEAST_PIECE, frames * count // WANTED_PIECES)
        if piece < frames:
            self.values["cut_frames"] = piece
            self._say(
                "cut_frames",
                f"{count} trajectories of {frames} frames are few: pieces count as trajectories",
                look=True,
            )

    def _parameters(self, count: int, main: Variable, dims: Dims) -> None:
        frames = main.shape[dims.role.index(TIME)] if TIME in dims.role else 0
        entries: list[dict[str, Any]] = []
        layout = understand(self.container, describe_values(self.values, "the guessed description"), self.name)
        for name, variable in self.container.variables.items():
            short = name.split("/")[-1].removeprefix("*@")
            if name in self.used or plain(short) in ABOUT_THE_FILE:
                continue
            if variable.size == 1 and is_stated(short, self.container.number(name), layout):
                continue
            variable = variable.as_row
            per_row = variable.shape[:1] == (count,) and count > 1
            if variable.size == 1 or (len(variable.shape) == 1 and per_row):
                if role_of_name(short) == TRAJECTORY or _counts(self.container, variable):
                    continue  # a number for each trajectory that only counts them; named as not used
                self._parameter(entries, short, {"dataset": name}, self.container.whole(name), variable)
                if variable.size > 1 and not variable.dims[0] and main.shape.count(count) > 1 and entries:
                    path = f"parameters.{len(entries) - 1}.name"
                    self._say(path, f"{self.reasons[path]}; it also fits another dimension of {count}", look=True)
            elif (
                len(variable.shape) == 2
                and per_row
                and variable.shape[1] <= MAX_COLUMNS
                and variable.shape[1] != frames
            ):
                for column in range(variable.shape[1]):
                    values = self.container.whole(name)[:, column]
                    self._parameter(
                        entries, f"{short}_{column}", {"dataset": name, "channel": column}, values, variable
                    )
        sizes = {n for v in self.container.variables.values() for n in v.shape}
        for owner, name, value in owned_numbers(self.container):
            described = (owner, name) in self.used_attributes or is_about_the_file(name, value, sizes)
            if not described and not is_stated(name, value, layout):
                source = {"dataset": owner, "attribute": name} if owner else {"attribute": name}
                self._parameter(entries, name.split("/")[-1], source, np.array([value]), None)
        self.values["parameters"] = entries

    def _parameter(
        self, entries: list[dict[str, Any]], name: str, source: dict[str, Any], values: Any, variable: Variable | None
    ) -> None:
        values = np.asarray(values, np.float64).reshape(-1)
        if not np.isfinite(values).all() or len(entries) == 64:
            self.notes.append(f"'{name}' is no parameter: its values are not finite, or there are more than 64")
            return
        entry: dict[str, Any] = {"name": self._free(plain_name(name, "parameter"))}
        path = f"parameters.{len(entries)}"
        low, high = float(values.min()), float(values.max())
        if variable is not None:
            self._unit(entry, path, variable)
        if low > 0 and high / low >= 20 and self._above_zero(source):
            entry["scale"] = "log"
            self._say(f"{path}.scale", f"from {low:g} to {high:g}")
        entry |= source
        where = f"attribute '{source['attribute']}'" if "attribute" in source else f"'{source['dataset']}'"
        spread = f"{low:g} to {high:g}" if high > low else f"{low:g}"
        self._say(f"{path}.name", f"{where}: {spread}", sure=True)
        entries.append(entry)

    def _above_zero(self, source: dict[str, Any]) -> bool:
        """Whether a parameter of the first file is above 0 in the others, too."""
        for container in self.containers[1:]:
            variable = container.variables.get(source.get("dataset", ""))
            if "attribute" in source:
                value = (variable.attributes if variable else container.attributes).get(source["attribute"])
                if not isinstance(value, float) or value <= 0:
                    return False
            elif variable is None or not (container.whole(variable.name) > 0).all():
                return False
        return True

    def _measure(self) -> None:
        if isinstance(self.container, MeshContainer):
            self.values["mask"] = OUTSIDE
            self._say("mask", "where no point is near", sure=True)
        description = describe_values(self.values, "the guessed description")
        reader = DescribedReader(self.containers, description, name=self.name)
        sample = take_sample(reader)
        if masked(sample.values).any() and not self.values.get("mask"):
            reader.close()
            self.values["mask"] = self._free("mask")
            self._say("mask", "values that are NaN in every frame are taken as holes: obstacles, land")
            description = describe_values(self.values, "the guessed description")
            reader = DescribedReader(self.containers, description, name=self.name)
            sample = take_sample(reader)
        static = reader.read("train", 0, 0, 0 if reader.task.steady else 1).static
        reader.close()
        refuse_mask(sample.values, self.container.label)
        refuse_mask(np.where(np.isfinite(static), 0, static)[None, None], f"{self.container.label}, static fields")
        self.num_not_finite = int((~np.isfinite(sample.values)).sum())
        if self.num_not_finite:
            self.notes.append(f"{self.num_not_finite} of {sample.values.size} sampled values are not finite")
        if isinstance(self.container, MeshContainer):
            return  # the boundary of the domain lies inside, and conserved is what cells say
        uneven = any("not at equal distances" in text for text in reader.assumptions)
        for number, axis in enumerate(self.values["axes"]):
            guess = guess_boundary(sample, number)
            axis["boundary"] = guess.boundary
            if guess.repeated_end:
                axis["repeated_end"] = True
                self._say(f"axes.{number}.repeated_end", guess.why, look=guess.unsure)
                sample = sample.without_last(number)  # as a reader of this description gives it
                if f"axes.{number}" in self.spacing:
                    points, spacing = reader.space[number] - 1, self.spacing[f"axes.{number}"]
                    axis["extent"] = spacing.value * points
                    self._say_number(f"axes.{number}.extent", f"{points} points times {{}}", spacing)
            self._say(f"axes.{number}.boundary", guess.why, look=guess.boundary == "unknown" or guess.unsure)
        if self.values.get("steady") or uneven:
            return
        conserved = guess_conserved(sample)
        task = reader.task
        fields, first = list[str](), 0
        for spec in task.fields_of("state"):
            count = spec.num_channels(task.num_spatial_dims)
            if all(channel in conserved for channel in range(first, first + count)):
                fields.append(spec.name)
            first += count
        if fields:
            self.values["conserved"] = fields
            worst = max(conserved.values())
            self._say("conserved", f"the mean changes by {worst:.1g} of the field's variation at most")


def _refuse_numbered(container: Container, arrays: Sequence[Variable], main: Variable) -> None:
    """Refuse `u0`, `u1`, `u2`, ... of unequal length: they are trajectories, and one of them would be taken alone."""
    stem = re.sub(r"\d+", "0", main.name)
    alike = [v for v in arrays if re.sub(r"\d+", "0", v.name) == stem and len(v.shape) == len(main.shape)]
    sizes = [sorted(set(lengths)) for lengths in zip(*(v.shape for v in alike), strict=True)]
    unequal = [lengths_seen for lengths_seen in sizes if len(lengths_seen) > 1]
    if len(alike) > 2 and len(unequal) == 1:
        raise DataError(
            f"{container.path}: arrays '{alike[0].name}', '{alike[1].name}' and {len(alike) - 2} more have names that "
            f"differ by a number, and {unequal[0][0]} to {unequal[0][-1]} entries in one dimension",
            hint="trajectories of unequal length are read from a file for each: write them with "
            "np.save('run_00.npy', ...), and give --data 'run_*.npy'",
        )


def _find_number(container: Container, names: set[str] | frozenset[str]) -> tuple[str, str, float] | None:
    """(array or '', attribute or '', value) of a number that is called so."""
    for key, value in container.attributes.items():
        if key.split("/")[-1].lower() in names and isinstance(value, float):
            return "", key, value
    for key, variable in container.variables.items():
        if variable.size == 1 and key.split("/")[-1].lower() in names:
            return key, "", container.number(key)
    for owner, variable in container.variables.items():
        for key, value in variable.attributes.items():
            if key.lower() in names and isinstance(value, float):
                return owner, key, value
    return None


def _counts(container: Container, variable: Variable) -> bool:
    """Whether an array only counts its entries: 0, 1, 2, ..."""
    if len(variable.shape) != 1 or variable.size < 2:
        return False
    values = container.whole(variable.name).reshape(-1)
    return bool((np.diff(values) == 1).all() and values[0] in (0, 1))


def _fits(dt: float, end: float, frames: int) -> bool:
    """Whether so many frames end at a time, or one step before it."""
    return any(abs(dt * steps / end - 1) < 0.01 for steps in (frames - 1, frames))


def _short_float(value: float) -> float:
    """Without the noise of float32: 0.05, not 0.05000000074505806."""
    return float(f"{value:.6g}")


_HEAD = """\
# What the arrays of {source} mean. Written by `ups init`; what stands here overrides what the file says.
# A line marked "guess" is not in the file: look at it. "check" marks those that most likely need you.
# All fields: docs/task-yaml.md
"""
_LATER = """\
# Known symmetries are used to show each sample in several positions: translation, reflection, rotation90, galilean.
symmetries: []
# For people; never guessed.
equation: ""
"""


def description_page(guess: Guess, source: str) -> str:
    """The text of a task.yaml."""
    values = guess.description.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    for shown, axis in zip(values["axes"], guess.description.axes, strict=True):
        shown["boundary"] = axis.boundary  # also where it is the default: the user may know better
    lines = [_HEAD.format(source=printable(source))]
    lines.append(f"name: {scalar_text(values['name'])}\n")
    for section in ("fields", "axes"):
        lines += [f"{section}:\n", *_entries(guess, section, values[section]), "\n"]
    lines.append(f"# What each dimension of the arrays is, in their order.\n{_line(guess, 'dims', values.get('dims'))}")
    lines.append("\n")
    for name in ("steady", "dt", "time_unit", "times", "cut_frames", "mask"):
        if name in values:
            lines.append(_line(guess, name, values[name]))
    lines.append("\n")
    if values.get("parameters"):
        lines += ["parameters:\n", *_entries(guess, "parameters", values["parameters"])]
    else:
        lines.append("parameters: [] # the file has no number for each trajectory, or for all\n")
    if guess.notes:
        lines += [f"# {printable(note)}\n" for note in guess.notes]
    lines.append("\n")
    if not values.get("steady"):
        lines.append(_line(guess, "conserved", values.get("conserved", [])))
    lines.append(_LATER)
    return "".join(lines)


def guess_lines(guess: Guess) -> list[tuple[str, str, str]]:
    """(field, value, why) of each line that is a guess or of interest."""
    values = guess.description.model_dump(mode="json")
    rows: list[tuple[str, str, str]] = []
    for path, why in guess.reasons.items():
        if not why:
            continue
        mark = "" if path in guess.sure else "check: " if path in guess.uncertain else "guess: "
        value = "" if path.endswith(".name") else _value_text(_at(values, path))
        rows.append((_shown_path(path, values), value, mark + printable(why)))
    return rows


def _shown_path(path: str, values: dict[str, Any]) -> str:
    parts = path.split(".")
    if len(parts) < 3:
        return path
    kind = {"fields": "field", "axes": "axis", "parameters": "parameter"}[parts[0]]
    name = values[parts[0]][int(parts[1])]["name"]
    return f"{kind} {name}" + ("" if parts[2] == "name" else f" {parts[2]}")


def _at(values: Any, path: str) -> Any:
    for part in path.split("."):
        values = values[int(part)] if part.isdigit() else values.get(part)
    return values


def _value_text(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(_value_text(item) for item in value) + "]"
    if value in ("y", "n"):
        return str(value)  # a name here and to YAML 1.2; only what other programs read too needs quotes
    return scalar_text(value)


def _entries(guess: Guess, section: str, entries: list[dict[str, Any]]) -> list[str]:
    lines = []
    for number, entry in enumerate(entries):
        for index, (name, value) in enumerate(entry.items()):
            lead = "  - " if index == 0 else "    "
            lines.append(lead + _line(guess, name, value, f"{section}.{number}.{name}"))
    return lines


def _line(guess: Guess, name: str, value: Any, path: str = "") -> str:
    path = path or name
    why = guess.reasons.get(path, "")
    mark = "" if path in guess.sure else "check: " if path in guess.uncertain else "guess: "
    comment = f" # {mark}{printable(why)}" if why else ""
    return f"{name}: {_value_text(value)}{comment}\n"
