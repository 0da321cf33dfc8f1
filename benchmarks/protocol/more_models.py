"""Networks that only the benchmark has, for recipes of the protocol: `ups train RECIPE --plugin` this file.

`fno_law` and `unet_law`: the baselines with the linear law of our network in front, fitted first as ours is. `dilated`:
a residual network of dilated convolutions (arXiv 2112.15275), the best or second best of APEBench's tasks in 1D.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from ups.config.model import BaselineConfig, FnoConfig, UnetConfig
from ups.config.setting import setting
from ups.models import fno, unet
from ups.models.network import (
    Network,
    NetworkInput,
    NetworkWithLinearPart,
    num_inputs,
    num_outputs,
    only_task,
    with_parameters,
)
from ups.models.propagator import Propagator
from ups.models.unet import CONVOLUTIONS, pad
from ups.registry import MODELS
from ups.spec.task import TaskSpec

# Of the convolutions of a block.
_DILATIONS = (1, 2, 4, 8, 4, 2, 1)


class FnoLawConfig(FnoConfig):
    """FNO for what the linear law leaves over."""

    type: Literal["fno_law"] = setting("fno_law", "Which model to build.")  # type: ignore[assignment]
    propagator: bool = setting(True, "Adds what is linear in the equation.")


class UnetLawConfig(UnetConfig):
    """U-Net for what the linear law leaves over."""

    type: Literal["unet_law"] = setting("unet_law", "Which model to build.")  # type: ignore[assignment]
    propagator: bool = setting(True, "Adds what is linear in the equation.")


class DilatedConfig(BaselineConfig):
    """Residual network of dilated convolutions, for one task."""

    type: Literal["dilated"] = setting("dilated", "Which model to build.")
    width: int = setting(32, "Hidden channels.", unit="channels", ge=4)
    blocks: int = setting(2, "Blocks of seven dilated convolutions.", unit="blocks", ge=1)


class WithLaw(NetworkWithLinearPart):
    """A network whose prediction is added to that of the linear law, for a transient task."""

    def __init__(self, inner: Network, task: TaskSpec) -> None:
        super().__init__()
        self.inner = inner
        self.law = Propagator([task])

    @property
    def linear_part(self) -> nn.Module:  # type: ignore[override]
        return self.law

    def forward(self, given: NetworkInput) -> Tensor:
        predicted: Tensor = self.inner(given)
        return predicted if given.task.steady else predicted + self.linear(given)

    def linear(self, given: NetworkInput) -> Tensor:
        gain = given.change_gain.reshape(-1, *[1] * (given.fields.ndim - 2))
        change: Tensor = self.law([given])[0]
        return change * gain

    def linear_rows(self) -> list[tuple[nn.Parameter, list[str]]]:
        return [(self.law.table, [name[0] for name in self.law.row_names])]

    def shard_units(self) -> list[nn.Module]:
        return self.inner.shard_units()

    def matrices(self) -> list[nn.Parameter]:
        return self.inner.matrices()


class DilatedNetwork(Network):
    """Lift, blocks that are added to their input, projection; padding as the U-Net's."""

    def __init__(self, config: DilatedConfig, task: TaskSpec, context_frames: int) -> None:
        super().__init__()
        convolution = CONVOLUTIONS[task.num_spatial_dims]
        self.periodic = tuple(axis.periodic for axis in task.axes)
        self.lift = convolution(num_inputs(task, context_frames), config.width, 1)
        self.blocks = nn.ModuleList(
            nn.ModuleList(convolution(config.width, config.width, 3, dilation=d) for d in _DILATIONS)
            for _ in range(config.blocks)
        )
        self.project = convolution(config.width, num_outputs(task), 1)

    def forward(self, given: NetworkInput) -> Tensor:
        x = self.lift(with_parameters(given.fields, given.parameters))
        for block in self.blocks:
            y = x
            for layer, dilation in zip(block, _DILATIONS, strict=True):  # type: ignore[call-overload]
                y = F.gelu(layer(pad(y, dilation, self.periodic)))
            x = x + y
        predicted: Tensor = self.project(x)
        return predicted

    def shard_units(self) -> list[nn.Module]:
        return list(self.blocks)


@MODELS.register("fno_law", config=FnoLawConfig)
def build_fno_law(config: Any, tasks: Sequence[TaskSpec], context_frames: int) -> WithLaw:
    task = only_task("fno_law", tasks)
    return WithLaw(fno.FnoNetwork(config, task, context_frames), task)


@MODELS.register("unet_law", config=UnetLawConfig)
def build_unet_law(config: Any, tasks: Sequence[TaskSpec], context_frames: int) -> WithLaw:
    task = only_task("unet_law", tasks)
    return WithLaw(unet.UnetNetwork(config, task, context_frames), task)


@MODELS.register("dilated", config=DilatedConfig)
def build_dilated(config: Any, tasks: Sequence[TaskSpec], context_frames: int) -> DilatedNetwork:
    return DilatedNetwork(config, only_task("dilated", tasks), context_frames)
