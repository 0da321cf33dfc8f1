"""Equations on triangulations: quadratic finite elements by scikit-fem, values at the corners of the triangles.

Linear systems are solved directly. Boundaries are the edges of the triangulation, so a curved one is a polygon.
Shapes: N points, M triangles, T frames.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ups.errors import DataError
from ups.solvers.problem import Float64, Integers

YOUNG, POISSON = 1.0, 0.3
# Of a vector field at points (2, ...), with the outward normal (2, ...) where it acts on a boundary.
Traction = Callable[[Float64, Float64], Float64]
_EDGE = 1e-9


def plate_stress(points: Float64, triangles: Integers, traction: Traction) -> Float64:
    """(N,): von Mises stress of a plate in plane stress that slides along x = 0 and y = 0 (rollers).

    traction: on the rest of the boundary, where it is zero too if nothing pulls.
    """
    import skfem as fem
    from scipy.sparse.linalg import splu
    from skfem.models.elasticity import linear_elasticity, plane_stress
    from skfem.models.poisson import mass

    mesh = _mesh(points, triangles)
    element = fem.ElementVector(fem.ElementTriP2())
    basis, edges = fem.Basis(mesh, element, intorder=2), fem.FacetBasis(mesh, element)
    first, second = plane_stress(YOUNG, POISSON)

    def pulled(v: Any, w: Any) -> Any:
        pull = traction(w.x, w.n)
        return pull[0] * v[0] + pull[1] * v[1]

    rollers = [basis.get_dofs(lambda x, i=i: np.abs(x[i]) < _EDGE).all(f"u^{i + 1}") for i in range(2)]
    stiffness = linear_elasticity(first, second).assemble(basis)
    moved = _solved(stiffness, fem.LinearForm(pulled).assemble(edges), np.concatenate(rollers), np.zeros(basis.N))
    slope = basis.interpolate(moved).grad
    spread = slope[0, 0] + slope[1, 1]
    stress = [*(first * spread + 2 * second * slope[i, i] for i in range(2)), second * (slope[0, 1] + slope[1, 0])]
    linear = basis.with_element(fem.ElementTriP1())
    loads = [fem.LinearForm(lambda v, w: w.s * v).assemble(linear, s=values) for values in stress]
    x, y, shear = splu(mass.assemble(linear).tocsc()).solve(np.stack(loads, axis=1)).T
    return np.asarray(np.sqrt(x**2 - x * y + y**2 + 3 * shear**2))


def poisson(
    points: Float64, triangles: Integers, conductivity: Float64, source: Callable[[Float64], Float64] | None = None
) -> Float64:
    """(N,): u of -div(a grad u) = source with u = 0 on the boundary, a (M,) in each triangle. source: default 1."""
    import skfem as fem
    from skfem.helpers import dot, grad

    mesh = _mesh(points, triangles)
    basis = fem.Basis(mesh, fem.ElementTriP2(), intorder=3)
    inner = basis.with_element(fem.ElementTriP0()).interpolate(conductivity)
    matrix = fem.BilinearForm(lambda u, v, w: w.a * dot(grad(u), grad(v))).assemble(basis, a=inner)
    load = fem.LinearForm(lambda v, w: (1.0 if source is None else source(w.x)) * v).assemble(basis)
    u = _solved(matrix, load, basis.get_dofs().all(), np.zeros(basis.N))
    return np.asarray(u[basis.nodal_dofs[0]])


def heat(
    points: Float64,
    triangles: Integers,
    start: Callable[[Float64], Float64],
    diffusivity: float,
    dt: float,
    num_frames: int,
    cold: npt.NDArray[np.bool_],
    steps_per_frame: int = 4,
) -> Float64:
    """(T, N): u of u_t = diffusivity lap u at the times dt, 2 dt, ..., where u is start((2, ...)) at 0.

    cold (N,): points with u = 0; an edge between two of them is cold, and other edges of the boundary are insulated.
    Time steps are those of the L-stable diagonally implicit Runge-Kutta method of order 2.
    """
    import skfem as fem
    from scipy.sparse.linalg import splu
    from skfem.models.poisson import laplace, mass

    mesh = _mesh(points, triangles)
    basis = fem.Basis(mesh, fem.ElementTriP2())
    edges = mesh.boundary_facets()
    held = basis.get_dofs(edges[cold[mesh.facets[:, edges]].all(axis=0)]).all()
    free = np.setdiff1d(np.arange(basis.N), held)
    weight, stiffness = (form.assemble(basis)[free][:, free].tocsc() for form in (mass, laplace))
    state = np.zeros(basis.N)
    u = start(basis.doflocs)[free]
    gamma, step, frames = 1 - np.sqrt(0.5), dt / steps_per_frame, []
    matrix = weight + gamma * step * diffusivity * stiffness
    solver = splu(matrix, permc_spec="MMD_AT_PLUS_A", options={"SymmetricMode": True})
    for _ in range(num_frames):
        for _ in range(steps_per_frame):
            one = solver.solve(-diffusivity * (stiffness @ u))
            two = solver.solve(-diffusivity * (stiffness @ (u + (1 - gamma) * step * one)))
            u = u + step * ((1 - gamma) * one + gamma * two)
        state[free] = u
        frames.append(state[basis.nodal_dofs[0]].copy())
    return np.stack(frames)


def stokes(
    points: Float64,
    triangles: Integers,
    velocity: Callable[[Float64], Float64],
    outflow: Callable[[Float64], npt.NDArray[np.bool_]] | None,
    wanted: Float64,
) -> Float64:
    """(3, K): both velocities and the pressure of -lap v + grad p = 0, div v = 0 at the wanted points (2, K).

    velocity((2, ...)): on the boundary. outflow((2, ...)): edges, by their middle, that the flow leaves through without
    traction; without them the pressure is 0 at the first point. Elements of Taylor and Hood.
    """
    import skfem as fem
    from scipy.sparse import bmat
    from skfem.models.poisson import laplace

    mesh = _mesh(points, triangles)
    quadratic = fem.Basis(mesh, fem.ElementTriP2(), intorder=4)
    linear = quadratic.with_element(fem.ElementTriP1())
    block = laplace.assemble(quadratic)
    slopes = [fem.BilinearForm(lambda u, q, w, i=i: -u.grad[i] * q).assemble(quadratic, linear) for i in range(2)]
    rows = [[block, None, slopes[0].T], [None, block, slopes[1].T], [*slopes, None]]
    edges = mesh.boundary_facets()
    if outflow is not None:
        edges = edges[~outflow(mesh.p[:, mesh.facets[:, edges]].mean(axis=1))]
    held = quadratic.get_dofs(edges).all()
    given = np.zeros(2 * quadratic.N + linear.N)
    for i, values in enumerate(velocity(quadratic.doflocs[:, held])):
        given[held + i * quadratic.N] = values
    known = np.concatenate([held, held + quadratic.N, [] if outflow is not None else [2 * quadratic.N]]).astype(int)
    solution = _solved(bmat(rows, "csr"), np.zeros(len(given)), known, given, symmetric=False)
    parts = np.split(solution, [quadratic.N, 2 * quadratic.N])
    probes = quadratic.probes(wanted), linear.probes(wanted)
    return np.stack([probes[0] @ parts[0], probes[0] @ parts[1], probes[1] @ parts[2]])


def _mesh(points: Float64, triangles: Integers) -> Any:
    import skfem as fem

    return fem.MeshTri(np.ascontiguousarray(points.T), np.ascontiguousarray(triangles.T))


def _solved(matrix: Any, load: Float64, known: Integers, values: Float64, *, symmetric: bool = True) -> Float64:
    """values at the known unknowns, the solution of the rows of the others elsewhere."""
    from scipy.sparse.linalg import splu

    free = np.setdiff1d(np.arange(len(values)), known)
    rows = matrix.tocsr()[free]
    # The order for symmetric matrices fills in less; a saddle point needs pivots, which that mode would not take.
    how: dict[str, Any] = {"permc_spec": "MMD_AT_PLUS_A", "options": {"SymmetricMode": True}} if symmetric else {}
    solution = values.copy()
    known = np.setdiff1d(known, ())
    solution[free] = splu(rows[:, free].tocsc(), **how).solve(load[free] - rows[:, known] @ values[known])
    if not np.isfinite(solution).all():
        raise DataError("a finite-element system has no finite solution")
    return solution
