"""The problems of PDEBench, and what makes a file one of them.

PDEBench files say nothing about boundaries, conserved fields or the equation; that knowledge is the table here. A shape
and an attribute called `Nu` are no evidence: other equations have them, too. A file is taken for a problem only if it
says so (its name, or the output path in its embedded configuration, is a published one) and nothing else in it
contradicts, or if its user states it. Everything else is data of an unknown equation. A description that a user writes
would be one more source of a `Problem`, next to this table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ups.errors import DataError
from ups.spec.task import MAX_PARAMETERS, Boundary, FieldSpec

_NUMBER = r"\d+(?:\.\d*)?(?:[eE][-+]?\d+)?"
PLAIN_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
# Attributes that belong to no problem: the configuration, a counter of the incompressible files, our generator's mark.
BOOKKEEPING = frozenset({"config", "latestindex", "ups_generator"})
# Numbers of the embedded configurations that say how, not what: resolution, domain, initial state, plots.
_HOW = frozenset(
    {"t", "t_end", "tdim", "n_time_steps", "n", "seed", "xdim", "ydim", "x_left", "x_right", "y_bottom", "y_top"}
    | {"sol", "dam_radius", "inner_height", "t_idx", "dim", "channel_idx"}
)


@dataclass(frozen=True, slots=True)
class Problem:
    """What is known about a problem beyond its file.

    form: the arrangement of datasets (`pdebench._Form`). published: pattern of its file names.
    extents: lengths of its axes, empty where they are not checked.
    """

    name: str
    form: str
    fields: tuple[FieldSpec, ...]
    boundary: Boundary
    equation: str
    parameters: tuple[str, ...]
    published: str
    log_parameters: tuple[str, ...] = ()
    conserved: tuple[str, ...] = ()
    translation: bool = False
    steady: bool = False
    extents: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a file says about itself. attributes: all their names.

    settings: numbers of the part of the embedded configuration that describes the simulation, by lower-case key.
    """

    file_name: str
    output_path: str
    form: str
    attributes: Sequence[str]
    settings: Mapping[str, float]
    extents: Sequence[float]


_U = (FieldSpec("u"),)


def _flow(dims: int) -> Problem:
    mach = rf"_M{_NUMBER}" if dims > 1 else rf"(?:_M{_NUMBER})?"
    return Problem(
        f"cfd{dims}d",
        f"flow{dims}d",
        (FieldSpec("density"), FieldSpec("pressure"), FieldSpec("velocity", tensor_rank=1)),
        "unknown",  # stands in the file name, see `_bounded`
        "compressible Navier-Stokes",
        ("eta", "zeta", "M") if dims > 1 else ("eta", "zeta"),
        rf"{dims}D_CFD_(?:Rand|Shock|Turb){mach}_Eta{_NUMBER}_Zeta{_NUMBER}_(?:periodic|trans)(?:_\d+)?_Train\.hdf5",
        ("eta", "zeta"),
    )


PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        Problem(
            "advection1d",
            "tensor",
            _U,
            "periodic",
            "u_t + beta u_x = 0",
            ("beta",),
            rf"1D_Advection_Sols_beta{_NUMBER}\.hdf5",
            conserved=("u",),
            translation=True,
            extents=(1.0,),
        ),
        Problem(
            "burgers1d",
            "tensor",
            _U,
            "periodic",
            "u_t + (u^2/2)_x = (Nu/pi) u_xx",
            ("Nu",),
            rf"1D_Burgers_Sols_Nu{_NUMBER}\.hdf5",
            ("Nu",),
            conserved=("u",),
            translation=True,
            extents=(1.0, 2.0),
        ),
        Problem(
            "reacdiff1d",
            "tensor",
            _U,
            "periodic",
            "u_t = Nu u_xx + rho u (1 - u)",
            ("Nu", "rho"),
            rf"ReacDiff(?:_react)?_Nu{_NUMBER}_Rho{_NUMBER}\.hdf5",
            ("Nu", "rho"),
            translation=True,
            extents=(1.0,),
        ),
        Problem(
            "diffsorp1d",
            "groups1d1",
            _U,
            "dirichlet",
            "u_t = D / R(u) u_xx; u(0) = 1, u(1) = D u_x",
            ("D", "por", "rho_s", "k_f", "n_f"),
            r"1D_diff-sorp_NA_NA\.h5",
        ),
        Problem(
            "diffreact2d",
            "groups2d2",
            (FieldSpec("u"), FieldSpec("v")),
            "neumann",
            "u_t = Du lap u + u - u^3 - k - v; v_t = Dv lap v + u - v",
            ("Du", "Dv", "k"),
            r"2D_diff-react_NA_NA\.h5",
        ),
        Problem(
            "swe2d",
            "groups2d1",
            (FieldSpec("height"),),
            "open",
            "shallow water, radial dam break, height only",
            ("gravity",),
            r"2D_rdb_NA_NA\.h5",
        ),
        Problem(
            "darcy2d",
            "darcy",
            (FieldSpec("a", role="static"), FieldSpec("u", role="target")),
            "dirichlet",
            "-div(a grad u) = beta",
            ("beta",),
            rf"2D_DarcyFlow_beta{_NUMBER}_Train\.hdf5",
            ("beta",),
            steady=True,
        ),
        _flow(1),
        _flow(2),
        _flow(3),
        Problem(
            "ns_incompressible2d",
            "incompressible",
            (
                FieldSpec("velocity", tensor_rank=1),
                FieldSpec("particles"),
                FieldSpec("force", role="static", tensor_rank=1),
            ),
            "wall",
            "incompressible Navier-Stokes with a force and passive particles",
            ("NU",),
            r"ns_incom_inhom_2d_\d+-\d+\.h5",
        ),
    )
}


def recognize(evidence: Evidence, stated: str | None) -> tuple[Problem | None, str]:
    """The problem of a file, None if it is unknown, and one sentence about what that rests on.

    stated: the name of the problem as its user gives it. Raises DataError if the file cannot be that.
    """
    if stated is not None:
        problem = _stated(evidence, stated)
        return problem, f"stated by the user, not by the file: it holds {stated}. {_assumed(problem)}"
    for problem in PROBLEMS.values():
        by_name = re.fullmatch(problem.published, evidence.file_name)
        in_groups = problem.form.startswith("groups")
        configured = in_groups and re.fullmatch(problem.published, f"{evidence.output_path}.h5")
        if problem.form != evidence.form or not (by_name or configured):
            continue
        contradiction = _contradiction(problem, evidence)
        if contradiction:
            return (
                None,
                f"the equation is unknown: the file is called like PDEBench's {problem.name}, but {contradiction}",
            )
        problem = _bounded(problem, evidence)
        source = "its file name" if by_name else "the output path in its embedded configuration"
        return problem, f"taken for PDEBench's {problem.name} by {source}. {_assumed(problem)}"
    return None, "the equation is unknown: nothing in the file says which one it solves, and its shape is no evidence"


def unknown_problem(form: str, fields: tuple[FieldSpec, ...], numbers: Mapping[str, float], steady: bool) -> Problem:
    """What is left without an equation: fields named as the datasets, the file's own numbers as parameters."""
    names = [name for name in numbers if PLAIN_NAME.fullmatch(name) and name.lower() not in BOOKKEEPING]
    return Problem("unknown", form, fields, "unknown", "", tuple(names[:MAX_PARAMETERS]), "", steady=steady)


def _stated(evidence: Evidence, stated: str) -> Problem:
    problem = PROBLEMS.get(stated)
    if problem is None:
        raise DataError(
            f"'{stated[:80]}' is not a problem that ups knows", hint=f"the known problems are {', '.join(PROBLEMS)}"
        )
    if problem.form != evidence.form:
        fitting = [p.name for p in PROBLEMS.values() if p.form == evidence.form]
        raise DataError(
            f"{evidence.file_name} is stated to hold {stated}, but its datasets are not arranged as those of {stated}",
            hint=f"with these datasets it could be {' or '.join(fitting) or 'none of the known problems'}",
        )
    return _bounded(problem, evidence)


def _bounded(problem: Problem, evidence: Evidence) -> Problem:
    """The problem with the boundary that the file itself gives, if it does."""
    if problem.name == "swe2d" and "ups_generator" in evidence.attributes:
        return replace(problem, boundary="wall")  # our own generator's basin reflects, PDEBench's lets waves leave
    if not problem.form.startswith("flow"):
        return problem
    words = re.split(r"[_.]", evidence.file_name)
    if "periodic" in words:
        return replace(problem, boundary="periodic", conserved=("density",), translation=True)
    return replace(problem, boundary="open") if "trans" in words else problem


def _contradiction(problem: Problem, evidence: Evidence) -> str:
    """What in the file does not belong to the problem; '' if nothing."""
    own = {name.lower() for name in problem.parameters}
    foreign = [name for name in evidence.attributes if name.lower() not in own | BOOKKEEPING]
    if foreign:
        return f"{show_names('attribute', foreign)} do not belong to that problem"
    # The configuration of the incompressible files has dozens of numbers, which differ between their versions.
    if problem.form.startswith("groups") and evidence.settings:
        foreign = [name for name in evidence.settings if name not in own | _HOW]
        if foreign:
            return f"{show_names('configured number', foreign)} do not belong to that problem"
        if not own & set(evidence.settings):
            return f"its configuration has none of {', '.join(problem.parameters)}"
    for extent in evidence.extents if problem.extents else ():
        if not any(math.isclose(extent, known, rel_tol=0.02) for known in problem.extents):
            return f"its domain has the length {extent:.4g}"
    return ""


def _assumed(problem: Problem) -> str:
    text = f"Its equation and its boundary ({problem.boundary}) are those of that problem"
    if problem.conserved:
        text += f", and so is that {', '.join(problem.conserved)} is conserved"
    return text + "; the file does not contain them"


def show_names(kind: str, names: Sequence[str]) -> str:
    """Names from a file in one phrase; those that are not plain names are only counted."""
    plain = [f"'{name}'" for name in names if PLAIN_NAME.fullmatch(name)][:16]
    if len(plain) < len(names):
        plain.append(f"{len(names) - len(plain)} more")
    return f"{kind}s {', '.join(plain)}"
