"""The linear part: exact for linear equations with constant coefficients, in real arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from ups.models.network import NetworkInput
from ups.models.propagator import Propagator
from ups.models.vocabulary import Channels
from ups.spec.task import AxisSpec, FieldSpec, ParameterSpec, TaskSpec

SPEED = (ParameterSpec("speed", minimum=-2.0, maximum=2.0),)
RING = TaskSpec("ring", (FieldSpec("u"),), (AxisSpec("x"),), SPEED, dt=0.1)
ROD = TaskSpec("rod", (FieldSpec("heat"),), (AxisSpec("x", "neumann"),), dt=0.1)
TORUS = TaskSpec("torus", (FieldSpec("u"), FieldSpec("v")), (AxisSpec("x"), AxisSpec("y")), dt=0.1)
TASKS = (RING, ROD, TORUS)


def given(task: TaskSpec, fields: torch.Tensor, relative: float = 0.0, dt: float | None = None) -> NetworkInput:
    samples = fields.shape[0]
    parameters = fields.new_full((samples, len(task.parameters)), relative)
    names = task.channel_names("state")
    return NetworkInput(
        task=task,
        fields=fields,
        channels=Channels(names, (0,) * len(names)),
        outputs=names,
        parameters=torch.zeros_like(parameters),
        relative_parameters=parameters,
        dt=fields.new_full((samples,), task.dt if dt is None else dt),
        coordinates=[torch.arange(n) / n for n in fields.shape[2:]],
        change_gain=fields.new_ones(len(names)),
    )


def propagator(**rows: list[float]) -> Propagator:
    """Rows by 'task feature axis channel'."""
    found = Propagator(TASKS).double()
    with torch.no_grad():
        for name, values in rows.items():
            row = found.row_names.index(tuple(name.split("__")))
            found.table[row] = torch.tensor(values, dtype=torch.float64)
    return found


@pytest.mark.parametrize("points", [32, 33])
@pytest.mark.parametrize("relative", [0.5, -1.0])
def test_advection_by_any_distance_is_exact(points: int, relative: float) -> None:
    x = torch.arange(points, dtype=torch.float64) / points

    def wave(at: torch.Tensor) -> torch.Tensor:
        return 0.3 + torch.sin(2 * math.pi * at) + 0.5 * torch.cos(14 * math.pi * at)

    part = propagator(**{"ring__speed relative__0__u": [0, 0, 0, 0.17, 0]})
    for dt in (0.1, 0.25):
        (change,) = part([given(RING, wave(x)[None, None], relative, dt)])
        moved = wave(x - 0.17 * relative * dt / RING.dt)
        torch.testing.assert_close(wave(x) + change[0, 0], moved, rtol=0, atol=1e-12)


def test_diffusion_is_exact_with_insulated_ends() -> None:
    x = (torch.arange(24, dtype=torch.float64) + 0.5) / 24
    rate = 0.3  # of the wave with 8 periods
    part = propagator(rod__1__0__heat=[0, rate, 0, 0, 0])
    modes = [0, 1, 3, 23]
    heat = sum(torch.cos(math.pi * k * x) for k in modes)
    later = sum(torch.cos(math.pi * k * x) * math.exp(-rate * (k / 2 / 8) ** 2) for k in modes)
    (change,) = part([given(ROD, heat[None, None])])
    torch.testing.assert_close(heat + change[0, 0], later, rtol=0, atol=1e-12)


def test_axes_and_channels_have_their_own_coefficients() -> None:
    draw = torch.Generator().manual_seed(0)
    fields = torch.randn(2, 2, 9, 7, generator=draw, dtype=torch.float64)
    part = propagator(torus__1__0__u=[0, 0, 0, 2 / 9, 0], torus__1__1__v=[0, 0, 0, -1 / 7, 0])
    (change,) = part([given(TORUS, fields)])
    moved = torch.stack([fields[:, 0].roll(2, -2), fields[:, 1].roll(-1, -1)], dim=1)
    torch.testing.assert_close(fields + change, moved, rtol=0, atol=1e-12)


def test_small_changes_keep_their_digits_in_float32() -> None:
    part = propagator(ring__1__0__u=[-1e-6, 0, 0, 0, 0]).float()
    fields = torch.ones(1, 1, 16)
    (change,) = part([given(RING, fields)])
    torch.testing.assert_close(change, torch.full_like(fields, -1e-6), rtol=1e-5, atol=0)


def test_a_group_is_what_its_tasks_are_alone_and_a_new_one_changes_nothing() -> None:
    part = Propagator(TASKS).double()
    group = [given(task, torch.randn(2 + n, 1, 16, dtype=torch.float64)) for n, task in enumerate((RING, ROD))]
    assert not any(change.any() for change in part(group))
    torch.nn.init.normal_(part.table, std=0.1)
    for one, together in zip(group, part(group), strict=True):
        torch.testing.assert_close(together, part([one])[0], rtol=0, atol=1e-13)


def test_it_can_be_fitted_alone() -> None:
    torch.manual_seed(0)
    part = Propagator([replace(RING, parameters=())])
    fields = torch.randn(8, 1, 16) @ torch.linalg.matrix_power(torch.ones(16, 16).tril().triu(-3) / 4, 2)
    optimizer = torch.optim.Adam(part.parameters(), lr=1e-2)
    task = replace(RING, parameters=())
    for _ in range(150):
        (change,) = part([given(task, fields)])
        loss = (change - (fields.roll(1, -1) - fields)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.05 * (fields.roll(1, -1) - fields).square().mean()
