"""Periodic problems in Fourier space: advection (exact), Burgers, Kuramoto-Sivashinsky, Fisher-KPP, Navier-Stokes 2D.

The time steppers in 1D and 2D are exponax's fourth-order exponential Runge-Kutta ones, in float64, dealiased by the
2/3 rule and batched over trajectories. The draw of the problems, the step sizes and the reduction to the stored grid
are ours. float64 is switched on inside a context, so this module changes nothing for other JAX users.

Shapes: n trajectories, T frames, N solver points per axis, R stored points per axis.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.solvers.problem import (
    Complex128,
    Draws,
    Float64,
    Solution,
    average_periodic_1d,
    block_mean,
    cell_centers,
    solver_points,
    steps_of,
    stored,
    truncate_periodic_1d,
    truncate_periodic_2d,
)
from ups.spec.task import TaskSpec

# Steep Burgers fronts are 4 (nu/pi) / jump wide, at least 0.003: 341 dealiased modes resolve them to about 1e-5.
BURGERS_MIN_POINTS = 1024
KS_MIN_POINTS = 256
KS_STEP = 0.05
KS_SKIPPED_FRAMES = 50
REACDIFF_MIN_POINTS = 256
REACDIFF_STEP = 0.005
NS_MIN_POINTS = 64
NS_DRAG = 0.1
NS_VISCOSITY = 0.02
NS_FORCING_MODE = 4
NS_SPIN_UP_FRAMES = 40

Rollout = Callable[[Complex128, Float64, float, int, int], Complex128]


def advection1d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """Exact: two sines that move with speed beta, evaluated at the cell centers."""
    parameters = draws.parameters(spec)
    amplitude, mode, phase = two_sines(draws)
    extent = spec.axes[0].extent
    x = cell_centers(resolution, extent)
    time = spec.dt * np.arange(num_frames)
    moved = x[None, None, :] - parameters[:, 0, None, None] * time[None, :, None]  # (n, T, R)
    wave = amplitude[:, :, None, None] * np.sin(
        2 * np.pi / extent * mode[:, :, None, None] * moved[:, None] + phase[:, :, None, None]
    )
    return stored(spec, resolution, parameters, state=wave.sum(axis=1)[:, :, None])


def burgers1d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """Viscous Burgers from two sines; stored as cell averages, since fronts may be thinner than a stored cell."""
    parameters = draws.parameters(spec)
    points = solver_points(resolution, BURGERS_MIN_POINTS)
    amplitude, mode, phase = two_sines(draws)
    waves = np.sin(2 * np.pi * mode[:, :, None] * (np.arange(points) / points) + phase[:, :, None])
    start = (amplitude[:, :, None] * waves).sum(axis=1)
    coefficients = burgers(start, parameters[:, 0] / np.pi, spec.dt, num_frames)
    return stored(spec, resolution, parameters, state=average_periodic_1d(coefficients, points, resolution)[:, :, None])


def burgers(start: Float64, viscosity: Float64, dt: float, num_frames: int, substeps: int | None = None) -> Complex128:
    """u_t + (u^2/2)_x = viscosity u_xx on [0, 1): (n, N) -> (n, T, N // 2 + 1) rfft coefficients, frame 0 included.

    The default time step keeps |u| k dt below 2.1 for |u| <= 2, inside the stability region of the scheme (2.8).
    """
    substeps = substeps or burgers_substeps(start.shape[-1], dt)
    return solve_1d("burgers", start, viscosity[:, None], 1.0, dt, num_frames, substeps)


def burgers_substeps(points: int, dt: float) -> int:
    """Steps per frame that keep the scheme stable on so many points."""
    return max(1, math.ceil(dt * 2.0 * points))


def ks1d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """Kuramoto-Sivashinsky from long waves of order one; the transient toward the attractor is discarded."""
    extent = spec.axes[0].extent
    points = solver_points(resolution, KS_MIN_POINTS)
    x = np.arange(points) * (extent / points)
    modes = np.arange(1, 9)
    amplitude = draws.uniform("amplitude", modes.size, 0.0, 1.0)
    phase = draws.uniform("phase", modes.size, 0.0, 2 * np.pi)
    waves = np.cos(2 * np.pi / extent * modes[:, None] * x + phase[:, :, None])
    start = (amplitude[:, :, None] * waves).sum(axis=1)
    coefficients = kuramoto_sivashinsky(start, extent, spec.dt, num_frames, skipped=KS_SKIPPED_FRAMES)
    state = truncate_periodic_1d(coefficients, points, resolution)[:, :, None]
    return stored(spec, resolution, draws.parameters(spec), state=state)


def kuramoto_sivashinsky(
    start: Float64, extent: float, dt: float, num_frames: int, substeps: int | None = None, *, skipped: int = 0
) -> Complex128:
    """u_t + u u_x + u_xx + u_xxxx = 0: (n, N) -> (n, T, N // 2 + 1) rfft coefficients after `skipped` frames."""
    substeps = substeps or steps_of(dt, KS_STEP)
    return solve_1d("ks", start, np.zeros((start.shape[0], 1)), extent, dt, num_frames, substeps, skipped)


def reacdiff1d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """Fisher-KPP from one to three bumps on an empty background; fronts grow out of them and meet. Stored as
    cell averages, which stay within [0, 1] on any grid.
    """
    parameters = draws.parameters(spec)
    points = solver_points(resolution, REACDIFF_MIN_POINTS)
    x = np.arange(points) / points
    count = draws.integers("number of bumps", 1, 1, 3)
    height = draws.uniform("height", 3, 0.2, 1.0) * (np.arange(3) < count)
    width = draws.uniform("width", 3, 0.02, 0.05)
    center = draws.uniform("center", 3)
    angle = 2 * np.pi * (x - center[:, :, None])
    bumps = height[:, :, None] * np.exp((np.cos(angle) - 1.0) / (2 * np.pi * width[:, :, None]) ** 2)
    start = 1.0 - np.prod(1.0 - bumps, axis=1)  # overlapping bumps stay within [0, 1]
    coefficients = fisher_kpp(start, parameters, 1.0, spec.dt, num_frames)
    return stored(spec, resolution, parameters, state=average_periodic_1d(coefficients, points, resolution)[:, :, None])


def fisher_kpp(
    start: Float64, parameters: Float64, extent: float, dt: float, num_frames: int, substeps: int | None = None
) -> Complex128:
    """u_t = nu u_xx + rho u (1 - u), parameters (n, 2) = nu, rho: (n, N) -> (n, T, N // 2 + 1) rfft coefficients."""
    substeps = substeps or steps_of(dt, REACDIFF_STEP)
    return solve_1d("fisher", start, parameters, extent, dt, num_frames, substeps)


def ns2d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """Vorticity of a Kolmogorov flow with linear drag; the spin-up from large random eddies is discarded."""
    extent = spec.axes[0].extent
    points = solver_points(resolution, NS_MIN_POINTS)
    start = random_vorticity(draws, points)
    coefficients = navier_stokes(
        start, extent, NS_VISCOSITY, NS_DRAG, 1.0, spec.dt, num_frames, skipped=NS_SPIN_UP_FRAMES
    )
    state = truncate_periodic_2d(coefficients, points, resolution)[:, :, None]
    y = cell_centers(resolution, extent)
    curl = -NS_FORCING_MODE * np.cos(NS_FORCING_MODE * y)
    static = np.broadcast_to(curl, (len(draws.numbers), 1, resolution, resolution))
    return stored(spec, resolution, draws.parameters(spec), state=state, static=np.asarray(static))


def navier_stokes(
    start: Float64,
    extent: float,
    viscosity: float,
    drag: float,
    forcing: float,
    dt: float,
    num_frames: int,
    *,
    skipped: int = 0,
    substeps: int | None = None,
    order: int = 4,
    single: bool = False,
) -> Complex128:
    """w_t + v . grad w = viscosity lap w - drag w + curl of (forcing sin(4 y), 0), with curl v = w and div v = 0.

    (n, N, N) -> (n, T, N, N // 2 + 1) rfft2 coefficients. The forcing has 4 periods in the domain; extent must be
    2 pi if it is not zero. The default time step keeps |v| k dt below 2.2 for |v| <= 4.
    """
    substeps = substeps or ns_substeps(start.shape[-1], dt)
    run = _compiled("vorticity", start.shape[-1], extent, num_frames, order, single)
    coefficients = np.broadcast_to(np.array([viscosity, drag, forcing]), (start.shape[0], 3))
    return run(np.fft.rfft2(start)[:, None], np.ascontiguousarray(coefficients), dt, substeps, skipped)[:, :, 0]


def ns_substeps(points: int, dt: float) -> int:
    """Steps per frame that keep the scheme stable on so many points."""
    return max(1, math.ceil(dt * points / 1.6 - 1e-9))


def two_sines(draws: Draws) -> tuple[Float64, npt.NDArray[np.int64], Float64]:
    """Amplitudes in [0, 1), wave numbers 1..8 and phases of two sines, each (n, 2)."""
    phase = draws.uniform("phase", 2, 0.0, 2 * np.pi)
    return draws.uniform("amplitude", 2), draws.integers("wave number", 2, 1, 8), phase


def random_vorticity(draws: Draws, points: int) -> Float64:
    """(n, N, N): random modes with |k| <= 6 and a root mean square of 3, near that of the developed flow."""
    modes = [(i, j) for i in range(-6, 7) for j in range(7) if 0 < i * i + j * j <= 36 and (j > 0 or i > 0)]
    normal = draws.normal("initial modes", 2 * len(modes))
    coefficients = np.zeros((len(draws.numbers), points, points // 2 + 1), dtype=np.complex128)
    for number, (i, j) in enumerate(modes):
        value = normal[:, 2 * number] + 1j * normal[:, 2 * number + 1]
        coefficients[:, i, j] = value
        if j == 0:
            coefficients[:, -i, 0] = np.conj(value)
    field = np.fft.irfft2(coefficients, s=(points, points))
    scaled: Float64 = 3.0 * field / np.sqrt((field**2).mean(axis=(1, 2), keepdims=True))
    return scaled


def _steppers(exponax: Any, order: int) -> dict[str, Callable[[int, float, float, Any], Any]]:
    """Name -> (points, extent, dt, coefficients of one trajectory) -> exponax stepper."""
    make = exponax.stepper
    return {
        "burgers": lambda points, extent, dt, c: make.Burgers(
            1, extent, points, dt, diffusivity=c[0], conservative=True, order=order
        ),
        "ks": lambda points, extent, dt, c: make.KuramotoSivashinskyConservative(
            1, extent, points, dt, conservative=True, order=order
        ),
        "fisher": lambda points, extent, dt, c: make.reaction.FisherKPP(
            1, extent, points, dt, diffusivity=c[0], reactivity=c[1], order=order
        ),
        # exponax takes the velocity (d psi/dy, -d psi/dx) of lap psi = w, whose curl is -w: the scale -1 makes w the
        # vorticity in the usual sense, so that the forcing is the curl of the stated body force.
        "vorticity": lambda points, extent, dt, c: make.KolmogorovFlowVorticity(
            2,
            extent,
            points,
            dt,
            diffusivity=c[0],
            drag=-c[1],
            injection_mode=NS_FORCING_MODE,
            injection_scale=c[2],
            convection_scale=-1.0,
            order=order,
        ),
    }


def solve_1d(
    kind: str,
    start: Float64,
    coefficients: Float64,
    extent: float,
    dt: float,
    num_frames: int,
    substeps: int,
    skipped: int = 0,
    order: int = 4,
    single: bool = False,
) -> Complex128:
    """(n, N), (n, K) coefficients -> (n, T, N // 2 + 1) rfft coefficients after `skipped` frames.

    order: of the time stepper, 1 to 4; single: in float32.
    """
    run = _compiled(kind, start.shape[-1], extent, num_frames, order, single)
    return run(np.fft.rfft(start)[:, None], coefficients, dt, substeps, skipped)[:, :, 0]


@lru_cache(maxsize=16)
def _compiled(kind: str, points: int, extent: float, num_frames: int, order: int, single: bool) -> Rollout:
    """A compiled rollout: (n, 1, *modes), (n, K) coefficients, dt, substeps, skipped frames -> (n, T, 1, *modes)."""
    import exponax
    import jax

    build = _steppers(exponax, order)[kind]

    def trajectory(start: Any, coefficients: Any, dt: Any, substeps: Any, skipped: Any) -> Any:
        stepper = build(points, extent, dt / substeps, coefficients)

        def advance(current: Any, steps: Any) -> Any:
            return jax.lax.fori_loop(0, steps, lambda _, u: stepper.step_fourier(u), current)

        def frame(current: Any, _: None) -> tuple[Any, Any]:
            following = advance(current, substeps)
            return following, following

        first = advance(start, skipped * substeps)
        later = jax.lax.scan(frame, first, None, length=num_frames - 1)[1]
        return jax.numpy.concatenate([first[None], later])

    # Steps and counts are arguments, not constants, so that one compilation serves every step size.
    batched = jax.jit(jax.vmap(trajectory, in_axes=(0, 0, None, None, None)))

    def run(start: Complex128, coefficients: Float64, dt: float, substeps: int, skipped: int) -> Complex128:
        with jax.enable_x64(not single):
            return np.asarray(batched(start, coefficients, dt, substeps, skipped))

    return run


# Fisher-KPP in a periodic box, in NumPy: Strang splitting into diffusion (exact in Fourier space) and growth (exact at
# every point). Values stay between 0 and 1, and the error falls with the square of the step.
# Half of the thinnest front, sqrt(nu / rho) = 0.026, is 1.6 of these cells.
REACDIFF_3D_MIN_POINTS = 64
REACDIFF_3D_STEP = 0.02
REACDIFF_3D_BUMPS = 4


def reacdiff3d(spec: TaskSpec, draws: Draws, resolution: int, num_frames: int) -> Solution:
    """From one to four bumps on an empty background; stored as means over the solver's points in a cell."""
    parameters = draws.parameters(spec)
    points = solver_points(resolution, REACDIFF_3D_MIN_POINTS)
    starts = _bumps(draws, points, spec.axes[0].extent)
    frames = np.stack(
        [
            block_mean(fisher_kpp_3d(start, one, spec.axes[0].extent, spec.dt, num_frames), resolution, 3)
            for start, one in zip(starts, parameters, strict=True)
        ]
    )
    return stored(spec, resolution, parameters, state=frames[:, :, None])


def fisher_kpp_3d(
    start: Float64, parameters: Float64, extent: float, dt: float, num_frames: int, substeps: int | None = None
) -> Float64:
    """u_t = nu lap u + rho u (1 - u), parameters = nu, rho: (N, N, N) -> (T, N, N, N), frame 0 included."""
    nu, rho = (float(value) for value in parameters)
    points = start.shape[-1]
    substeps = substeps or steps_of(dt, REACDIFF_3D_STEP)
    step = dt / substeps
    along = 2 * np.pi / extent * np.fft.fftfreq(points, 1 / points)
    half = 2 * np.pi / extent * np.fft.rfftfreq(points, 1 / points)
    squares = along[:, None, None] ** 2 + along[None, :, None] ** 2 + half[None, None, :] ** 2
    decay = np.exp(-nu * step * squares)
    growth = math.exp(rho * step / 2)

    def react(u: Float64) -> Float64:
        """Half a step of logistic growth, exactly."""
        grown: Float64 = growth * u / (1.0 + (growth - 1.0) * u)
        return grown

    frames = np.empty((num_frames, *start.shape))
    frames[0] = u = start
    for number in range(1, num_frames):
        for _ in range(substeps):
            u = react(np.fft.irfftn(decay * np.fft.rfftn(react(u)), s=start.shape, axes=(0, 1, 2)))
        frames[number] = u
    return frames


def _bumps(draws: Draws, points: int, extent: float) -> Float64:
    """(n, N, N, N): one to four smooth periodic bumps of random position, height and width, together within [0, 1]."""
    count = draws.integers("number of bumps", 1, 1, REACDIFF_3D_BUMPS)
    height = draws.uniform("height", REACDIFF_3D_BUMPS, 0.3, 1.0) * (np.arange(REACDIFF_3D_BUMPS) < count)
    width = draws.uniform("width", REACDIFF_3D_BUMPS, 0.05, 0.12)
    center = draws.uniform("center", 3 * REACDIFF_3D_BUMPS, 0.0, extent).reshape(-1, REACDIFF_3D_BUMPS, 3)
    x = cell_centers(points, extent)
    # A product of one factor for each axis.
    angle = 2 * np.pi / extent * (x - center[..., None])  # (n, bumps, 3, N)
    factor = np.exp((np.cos(angle) - 1.0) / (2 * np.pi / extent * width[:, :, None, None]) ** 2)
    rest = np.ones((len(draws.numbers), points, points, points))
    for bump in range(REACDIFF_3D_BUMPS):
        shape = np.einsum("nx,ny,nz->nxyz", *(factor[:, bump, axis] for axis in range(3)))
        rest *= 1.0 - height[:, bump, None, None, None] * shape
    return 1.0 - rest
