"""The network, its normalization and its constraints export to ONNX, and give there what they give in torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import ups
from tests.support.small_bundle import ADVECTION, DARCY, FLOW, make_bundle
from ups.config.model import MultiscaleConfig
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

CUBE = TaskSpec("cube", (FieldSpec("u"), FieldSpec("v")), tuple(AxisSpec(axis) for axis in "xyz"), dt=0.1)
TASKS = (
    dataclasses.replace(ADVECTION, conserved=("u",)),
    dataclasses.replace(FLOW, conserved=("density",), positive=("density",)),
    DARCY,
    CUBE,
)


class OneStep(nn.Module):
    """One step of one task, with its inputs as arguments side by side: state, static fields, parameters."""

    def __init__(self, simulator: ups.Simulator, task: TaskSpec) -> None:
        super().__init__()
        self.module, self.task = simulator.module, task

    def forward(self, *tensors: Tensor) -> Tensor:
        names = [p.name for p in self.task.parameters]
        fields, parameters = tensors[: len(tensors) - len(names)], tensors[len(tensors) - len(names) :]
        state = None if self.task.steady else fields[0]
        static = fields[-1] if self.task.num_channels("static") else None
        values = dict(zip(names, parameters, strict=True))
        return self.module(state, values, static=static, task=self.task.name)


def inputs(task: TaskSpec, samples: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(7)
    shape = [16] * task.num_spatial_dims
    channels = [task.num_channels(role) for role in ("state", "static")]
    fields = [torch.rand(samples, n, *shape, generator=draw) for n in channels if n]
    middles = [torch.full((samples,), (p.minimum + p.maximum) / 2) for p in task.parameters]
    return (*fields, *middles)


@pytest.fixture(scope="module")
def simulator(tmp_path_factory: pytest.TempPathFactory) -> ups.Simulator:
    config = MultiscaleConfig(widths=[16, 16], blocks=[1, 1], num_heads=2, own_kernels=True, noise_size=2)
    return ups.Simulator.load(make_bundle(tmp_path_factory.mktemp("bundle") / "b", tasks=TASKS, config=config))


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_a_step_in_onnx_is_the_step_in_torch(simulator: ups.Simulator, task: TaskSpec, tmp_path: Path) -> None:
    step, tensors = OneStep(simulator, task).eval(), inputs(task, 2)
    with torch.no_grad():
        expected = step(*tensors).numpy()
        torch.onnx.export(step, tensors, tmp_path / "step.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "step.onnx", providers=["CPUExecutionProvider"])
    feed = {i.name: tensor.numpy() for i, tensor in zip(session.get_inputs(), tensors, strict=True)}
    (exported,) = session.run(None, feed)
    assert np.isfinite(expected).all()
    assert np.abs(exported - expected).max() <= 1e-5 * np.abs(expected).max()
