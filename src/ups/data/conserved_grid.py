"""Whether a model can keep the integrals that a task conserves on the grid of its data. No torch."""

from __future__ import annotations

from ups.config.model import ModelConfig
from ups.errors import ConfigError
from ups.formats.base import Reader
from ups.spec.grid import uneven_axes


def check_conserved(model: ModelConfig, reader: Reader) -> None:
    """Raises ConfigError where the model would keep a sum over points that is not the integral."""
    uneven = uneven_axes(reader.task.axes, reader.coordinates)
    if model.conserves and reader.task.conserved and uneven:
        raise ConfigError(
            f"task '{reader.task.name}' conserves {', '.join(reader.task.conserved)}, and the points of its grid are "
            f"not equally spaced along {', '.join(uneven)}: the model can keep an integral on a uniform grid only",
            hint="set model.conserve: false, or interpolate the data to a uniform grid",
        )
