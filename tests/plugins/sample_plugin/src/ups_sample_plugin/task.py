"""The task `heat1d` with its solver: the heat equation around a periodic line, solved exactly in waves.

n trajectories, T frames, K waves, X points.
"""

from __future__ import annotations

import numpy as np

from ups.solvers.problem import Draws, Solution, cell_centers, stored
from ups.solvers.tasks import SolverTask
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

WAVES = 4


def solve(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """A sum of sines, each of which decays at its own rate."""
    nu = draws.parameters(spec)  # (n, 1)
    amplitude = draws.uniform("amplitude", WAVES, -1.0, 1.0)  # (n, K)
    phase = draws.uniform("phase", WAVES, 0.0, 2 * np.pi)  # (n, K)
    wave = 2 * np.pi * np.arange(1, WAVES + 1)
    x = cell_centers(resolution, spec.axes[0].extent)
    t = spec.dt * np.arange(num_frames)
    decay = np.exp(-nu[:, :, None] * wave**2 * t[None, :, None])  # (n, T, K)
    sines = np.sin(wave[:, None] * x + phase[:, :, None])  # (n, K, X)
    state = np.einsum("nk,ntk,nkx->ntx", amplitude, decay, sines)
    return stored(spec, resolution, nu, state=state[:, :, None])


heat1d = SolverTask(
    spec=TaskSpec(
        name="heat1d",
        fields=(FieldSpec("u"),),
        axes=(AxisSpec("x", "periodic", 1.0),),
        parameters=(ParameterSpec("nu", minimum=1e-3, maximum=1e-2, scale="log"),),
        dt=0.1,
        conserved=("u",),
        symmetries=("translation", "reflection"),
        equation="u_t = nu u_xx; u0 = four sines",
    ),
    solver=solve,
    resolution=64,
    num_frames=11,
    reduction="exact values",
    choices="the slowest wave loses a third of its size at the smallest nu",
)
