"""The tasks of this package that can be generated: equation, domain, draws, stored grid, frames, solver.

A package adds one by announcing a `SolverTask` in the entry point group `ups.tasks`, as ours are.

What the equations leave open was chosen so that something happens within the stored frames and the stored grid
resolves it; each choice is written next to it here and in docs/benchmark-tasks.md.
"""

from __future__ import annotations

import difflib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ups import registry
from ups.errors import ConfigError, PluginError
from ups.solvers import darcy, diffreact, finite_volume, points, spectral
from ups.solvers.problem import Draws, Solution
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

Solver = Callable[[TaskSpec, Draws, int, int], Solution]
Reduction = Literal["exact values", "spectral truncation", "cell averages"]

# Below this the largest drawn wave numbers do not fit on the stored grid.
MIN_RESOLUTION = 16
MAX_RESOLUTION = {1: 65_536, 2: 2_048}
MAX_FRAMES = 100_000
# Modules that stored data name for a solver, where these are not its module of today.
_FORMER_MODULES = {"euler1d": "euler", "swe2d": "shallow_water", "reacdiff3d": "fisher_3d"}


@dataclass(frozen=True, slots=True)
class SolverTask:
    """One task and what solves it.

    solver: the function; imports of JAX and SciPy belong into it, so that the table is read without.
    resolution, num_frames: the stored size unless another one is asked for (num_frames 0: steady).
    trajectories_per_chunk: solved together and committed together; part of the generator version, since the time
    step of the finite-volume solvers is shared by the trajectories of a chunk.
    reduction: how a stored value follows from the solver's grid.
    start: time of the first stored frame.
    solvable: parameters outside of the task's own range that the solver is as good for, for data of another regime.
    interpolation_errors: by field, of the truth between stored points, relative to its RMS (benchmarks/model/query.py).
    """

    spec: TaskSpec
    solver: Solver
    resolution: int
    num_frames: int
    reduction: Reduction
    choices: str
    trajectories_per_chunk: int = 16
    start: float = 0.0
    solvable: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    interpolation_errors: Mapping[str, float] = field(default_factory=dict)

    def solve(self, draws: Draws, resolution: int, num_frames: int) -> Solution:
        """Solved trajectories, one per row of `draws`. Needs the extra `generate` (`problem.require_solvers`)."""
        return self.solver(self.spec, draws, resolution, num_frames)

    @property
    def solver_name(self) -> str:
        """The solver as it is written into the data: `module:function`."""
        module = self.solver.__module__
        if module.startswith("ups.solvers."):
            module = _FORMER_MODULES.get(self.solver.__qualname__, module.removeprefix("ups.solvers."))
        return f"{module}:{self.solver.__qualname__}"


# What most tasks have; a task names what it has otherwise.
_in_1d = functools.partial(SolverTask, resolution=128, num_frames=41, reduction="cell averages")
_in_2d = functools.partial(SolverTask, resolution=32, num_frames=21, reduction="cell averages")
_scalar_on_a_circle = functools.partial(TaskSpec, fields=(FieldSpec("u"),), axes=(AxisSpec("x", "periodic", 1.0),))

advection1d = _in_1d(
    spec=_scalar_on_a_circle(
        name="advection1d",
        parameters=(ParameterSpec("beta", minimum=0.1, maximum=4.0),),
        dt=0.05,
        conserved=("u",),
        symmetries=("translation",),
        equation="u_t + beta u_x = 0; u0 = sum of two sines, wave numbers 1..8, amplitudes in [0, 1]",
    ),
    solver=spectral.advection1d,
    reduction="exact values",
    choices="nothing was open",
    solvable={"beta": (0.01, 16.0)},  # the solution is a formula
    interpolation_errors={"u": 3.6e-8},
)

burgers1d = _in_1d(
    spec=_scalar_on_a_circle(
        name="burgers1d",
        parameters=(ParameterSpec("nu", minimum=0.01, maximum=0.1, scale="log"),),
        dt=0.05,
        conserved=("u",),
        symmetries=("translation", "galilean"),
        equation="u_t + (u^2/2)_x = (nu/pi) u_xx; u0 as in advection1d",
    ),
    solver=spectral.burgers1d,
    choices="1,024 solver points: the thinnest front is 0.003 wide, thinner than a stored cell",
    solvable={"nu": (0.01, 1.0)},  # a larger viscosity only makes it smoother
    interpolation_errors={"u": 7.5e-5},
)

ks1d = _in_1d(
    spec=_scalar_on_a_circle(
        name="ks1d",
        axes=(AxisSpec("x", "periodic", 64.0),),
        dt=1.0,
        conserved=("u",),
        symmetries=("translation", "galilean"),
        equation="u_t + u u_x + u_xx + u_xxxx = 0",
    ),
    solver=spectral.ks1d,
    reduction="spectral truncation",
    choices="u0 = cosines 1..8 with amplitudes in [0, 1]; zero mean",
    start=50.0,
    interpolation_errors={"u": 4.0e-8},
)

reacdiff1d = _in_1d(
    spec=_scalar_on_a_circle(
        name="reacdiff1d",
        parameters=(
            ParameterSpec("nu", minimum=1e-3, maximum=4e-3, scale="log"),
            ParameterSpec("rho", minimum=1.0, maximum=4.0, scale="log"),
        ),
        dt=0.1,
        symmetries=("translation", "reflection"),
        equation="u_t = nu u_xx + rho u (1 - u); u0 = one to three bumps, 0 <= u <= 1",
    ),
    solver=spectral.reacdiff1d,
    choices=(
        "fronts move at 2 sqrt(nu rho) = 0.063 to 0.253, so in 4 time units the middle one covers the domain "
        "from one bump (0.5 to each side); rho <= 4 keeps round-off on the unstable state 0 below 1e-8"
    ),
    interpolation_errors={"u": 2.6e-8},
)

euler1d = _in_1d(
    spec=TaskSpec(
        name="euler1d",
        fields=(FieldSpec("density"), FieldSpec("pressure"), FieldSpec("velocity", tensor_rank=1)),
        axes=(AxisSpec("x", "open", 1.0),),
        dt=0.01,
        symmetries=("reflection",),
        equation="rho_t + (rho v)_x = 0; (rho v)_t + (rho v^2 + p)_x = 0; E_t + ((E + p) v)_x = 0; gamma = 1.4",
    ),
    solver=finite_volume.euler1d,
    choices=(
        "2 to 5 pieces, density log-uniform in [0.25, 2], pressure log-uniform in [0.2, 2], velocity in "
        "[-0.5, 0.5]; waves of speed 1 to 3 cross a good part of the domain in 0.4 time units; averages are "
        "those of the conserved variables"
    ),
    interpolation_errors={"density": 0.0060, "pressure": 0.0037, "velocity": 0.0098},
)

ns2d = _in_2d(
    spec=TaskSpec(
        name="ns2d",
        fields=(FieldSpec("vorticity"), FieldSpec("forcing", role="static")),
        axes=(AxisSpec("x", "periodic", 2 * math.pi), AxisSpec("y", "periodic", 2 * math.pi)),
        dt=0.3,
        conserved=("vorticity",),
        symmetries=("translation", "rotation90"),
        equation="w_t + v . grad w = 0.02 lap w - 0.1 w + f; curl v = w, div v = 0; f = -4 cos(4 y)",
    ),
    solver=spectral.ns2d,
    reduction="spectral truncation",
    choices=(
        "Reynolds number 50 (viscosity 0.02), 4 forcing waves, drag 0.1: irregular in time, and resolved to "
        "1e-3 by 64 x 64 points; the spin-up lasts 12 time units; the forcing is stored as a "
        "static field, so that shifted and turned copies are solutions too"
    ),
    trajectories_per_chunk=8,
    start=12.0,
    interpolation_errors={"vorticity": 0.0092},
)

swe2d = _in_2d(
    spec=TaskSpec(
        name="swe2d",
        fields=(FieldSpec("height"), FieldSpec("momentum", tensor_rank=1)),
        axes=(AxisSpec("x", "wall", 1.0), AxisSpec("y", "wall", 1.0)),
        dt=0.05,
        conserved=("height",),
        symmetries=("reflection", "rotation90"),
        equation="h_t + div m = 0; m_t + div(m m / h + h^2/2) = 0 (gravity 1); round dam break, walls reflect",
    ),
    solver=finite_volume.swe2d,
    choices=(
        "depth 1 outside, 1.2 to 2.5 inside a disc of radius 0.1 to 0.25 with its centre in [0.3, 0.7]^2; waves "
        "of speed 1 and more reach the walls and return within 1 time unit"
    ),
    trajectories_per_chunk=8,
    interpolation_errors={"height": 0.0027, "momentum": 0.0152},
)

diffreact2d = _in_2d(
    spec=TaskSpec(
        name="diffreact2d",
        fields=(FieldSpec("u"), FieldSpec("v")),
        axes=(AxisSpec("x", "neumann", 2.0), AxisSpec("y", "neumann", 2.0)),
        dt=0.2,
        symmetries=("reflection", "rotation90"),
        equation="u_t = 1e-3 lap u + u - u^3 - 5e-3 - v; v_t = 5e-3 lap v + u - v; no flow through the boundary",
    ),
    solver=diffreact.diffreact2d,
    reduction="spectral truncation",
    choices="u0 and v0: noise of standard deviation 0.5 in the first 16 cosine modes of each axis; t from 1 to 5",
    start=1.0,
    interpolation_errors={"u": 0.016, "v": 0.0018},
)

darcy2d = _in_2d(
    spec=TaskSpec(
        name="darcy2d",
        fields=(FieldSpec("a", role="static"), FieldSpec("u", role="target")),
        axes=(AxisSpec("x", "dirichlet", 1.0), AxisSpec("y", "dirichlet", 1.0)),
        parameters=(ParameterSpec("beta", minimum=0.5, maximum=2.0),),
        steady=True,
        symmetries=("reflection", "rotation90"),
        equation="-div(a grad u) = beta, u = 0 on the boundary; a = 3 or 12",
        residual="darcy",
    ),
    solver=darcy.darcy2d,
    num_frames=0,
    choices=(
        "a is constant in each stored cell: 12 where a Gaussian random field of covariance (9 - lap)^-2 and mean "
        "zero is positive, else 3"
    ),
    interpolation_errors={"u": 0.0017},
)

# Not part of the benchmark: three dimensions.
reacdiff3d = SolverTask(
    spec=TaskSpec(
        name="reacdiff3d",
        fields=(FieldSpec("u"),),
        axes=(AxisSpec("x"), AxisSpec("y"), AxisSpec("z")),
        parameters=(
            ParameterSpec("nu", minimum=2e-3, maximum=6e-3, scale="log"),
            ParameterSpec("rho", minimum=1.0, maximum=3.0, scale="log"),
        ),
        dt=0.2,
        symmetries=("translation", "reflection"),
        equation="u_t = nu lap u + rho u (1 - u); u0 = one to four bumps, 0 <= u <= 1",
    ),
    solver=spectral.reacdiff3d,
    resolution=32,
    num_frames=16,
    reduction="cell averages",
    choices=(
        "fronts move at 2 sqrt(nu rho) = 0.09 to 0.27, so in 3 time units they meet from most starts; the thinnest "
        "one is about three stored cells wide"
    ),
    trajectories_per_chunk=4,
)

# Not part of the benchmark either: holes.
stokes2d = _in_2d(
    spec=TaskSpec(
        name="stokes2d",
        fields=(
            FieldSpec("obstacle", role="static"),
            FieldSpec("velocity", role="target", tensor_rank=1),
            FieldSpec("pressure", role="target"),
        ),
        axes=(AxisSpec("x", "open", 1.0), AxisSpec("y", "wall", 1.0)),
        parameters=(ParameterSpec("skew", minimum=-0.8, maximum=0.8),),
        steady=True,
        equation="-lap v + grad p = 0, div v = 0; v = 0 at walls and obstacles, no traction at the outflow x = 1",
        mask="obstacle",
    ),
    solver=points.stokes2d,
    resolution=48,
    num_frames=0,
    reduction="exact values",
    choices="inflow 4 y (1 - y) (1 + skew (2 y - 1)); one to four elliptic obstacles with radii 0.03 to 0.15",
    trajectories_per_chunk=8,
)

# The tasks of ups-bench v1 in its order: a constant of the benchmark. A tenth solver is registered and changes nothing.
TASKS = {
    task.spec.name: task
    for task in (advection1d, burgers1d, ks1d, reacdiff1d, euler1d, ns2d, swe2d, diffreact2d, darcy2d)
}
BENCH_TASKS = tuple(TASKS)


def find_task(name: str) -> SolverTask:
    """The registered task of this name. Raises ConfigError with the nearest names, PluginError for a broken one."""
    names = registry.TASKS.names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
        hint = f"did you mean '{near[0]}'?" if near else f"the tasks are {', '.join(names)}"
        raise ConfigError(f"there is no task '{name}' to generate", hint=hint)
    task = registry.TASKS.factory(name)
    if not isinstance(task, SolverTask) or task.spec.name != name:
        raise PluginError(
            f"task '{name}' of {registry.TASKS.origin(name)} is not a SolverTask whose specification has this name",
            hint="announce a module-level ups.solvers.tasks.SolverTask in the entry point group ups.tasks",
        )
    return task


def check_size(task: SolverTask, resolution: int, num_frames: int) -> None:
    """Raises ConfigError for a stored grid or a number of frames that the task cannot have."""
    name = task.spec.name
    most = MAX_RESOLUTION.get(task.spec.num_spatial_dims, 256)
    if not MIN_RESOLUTION <= resolution <= most or resolution % 2:
        raise ConfigError(
            f"resolution {resolution} is not possible for task '{name}'",
            hint=f"choose an even number of points per axis from {MIN_RESOLUTION} to {most}",
        )
    if task.spec.steady and num_frames:
        raise ConfigError(f"task '{name}' is steady and has no frames", hint="leave --frames out for it")
    if not task.spec.steady and not 2 <= num_frames <= MAX_FRAMES:
        raise ConfigError(f"{num_frames} frames are not possible for task '{name}'", hint=f"2 to {MAX_FRAMES}")
