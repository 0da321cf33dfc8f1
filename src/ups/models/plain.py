"""A plain `torch.nn.Module` as a model: `ups.model(MyNet)` is all that it takes.

The module maps (B, C, *S) to the same shape. Its input is what the network knows: the given frames and static fields,
normalized, and each parameter as a constant channel. Of its output the channels of the last frame are the predicted
change, in standard deviations of increments; of a steady task the first channels are the normalized target.

If `__init__` has a parameter `channels`, it gets C. Other parameters with a default (whole numbers, numbers, truth
values, texts) become settings of the model section in a recipe.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

from pydantic import create_model
from torch import Tensor, nn

from ups.config.model import ModelConfig
from ups.config.setting import setting
from ups.errors import PluginError
from ups.models.network import Network, NetworkInput, num_inputs, num_outputs, only_task, with_parameters
from ups.registry import MODELS
from ups.spec.task import TaskSpec

M = TypeVar("M", bound=type[nn.Module])


class PlainNetwork(Network):
    """A module of the user behind the interface of a network, for one task."""

    def __init__(self, module: nn.Module, task: TaskSpec, context_frames: int) -> None:
        super().__init__()
        self.module = module
        self._num_channels = plain_channels(task, context_frames)
        self._last_frame = 0 if task.steady else (context_frames - 1) * task.num_channels("state")

    def forward(self, given: NetworkInput) -> Tensor:
        """fields (B, F, *S) -> (B, C, *S)."""
        x = with_parameters(given.fields, given.parameters)
        x = nn.functional.pad(x, (0, 0) * (x.ndim - 2) + (0, self._num_channels - x.shape[1]))
        y = self.module(x)
        if y.shape != x.shape:
            raise PluginError(
                f"{type(self.module).__name__} returned {tuple(y.shape)} for an input of {tuple(x.shape)}",
                hint="a plain module returns the shape that it gets: (samples, channels, *space)",
            )
        predicted: Tensor = y[:, self._last_frame : self._last_frame + len(given.outputs)]
        return predicted

    def shard_units(self) -> list[nn.Module]:
        """The module as a whole."""
        return [self.module]


def plain_channels(task: TaskSpec, context_frames: int) -> int:
    """Channels of a plain module for a task: all inputs, or all outputs where those are more."""
    return max(num_inputs(task, context_frames), num_outputs(task))


def model(module: M, *, name: str = "") -> M:
    """Register a class of modules from (B, C, *S) to the same shape as a model; also as a decorator.

    name: `model.type` in a recipe; by default the name of the class in lower case.
    """
    kind = name or module.__name__.lower()
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = {n: one for n, one in inspect.signature(module).parameters.items() if one.kind not in variadic}
    settings: dict[str, Any] = {
        one.name: (type(one.default), setting(one.default, f"`{one.name}` of {module.__name__}."))
        for one in parameters.values()
        if isinstance(one.default, bool | int | float | str)
    }
    wrong = [n for n, one in parameters.items() if n not in settings and n != "channels" and one.default is one.empty]
    if wrong:
        raise PluginError(
            f"{module.__name__} needs the argument '{wrong[0]}' to be built",
            hint="give it a default, which makes it a setting of the recipe; `channels` is the only one without",
        )
    fields: dict[str, Any] = {"type": (Literal[kind], setting(kind, "Which model to build.")), **settings}
    config = create_model(f"{module.__name__}Config", __base__=ModelConfig, **fields)

    def build(section: Any, tasks: Sequence[TaskSpec], context_frames: int) -> PlainNetwork:
        task = only_task(kind, tasks)
        values = {field: getattr(section, field) for field in settings}
        if "channels" in parameters:
            values["channels"] = plain_channels(task, context_frames)
        return PlainNetwork(module(**values), task, context_frames)

    MODELS.register(kind, config=config)(build)
    return module
