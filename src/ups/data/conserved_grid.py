"""Whether a model can keep the integrals, or the lack of divergence, of a task on the grid of its data. No torch."""

from __future__ import annotations

from ups.config.model import ModelConfig
from ups.errors import ConfigError
from ups.formats.base import Reader
from ups.spec.grid import uneven_axes


def check_conserved(model: ModelConfig, reader: Reader) -> None:
    """Raises ConfigError where the model would keep what is no integral, or no divergence, on such a grid."""
    uneven = uneven_axes(reader.task.axes, reader.coordinates)
    if reader.task.divergence_free and uneven:
        raise ConfigError(
            f"task '{reader.task.name}' has fields without divergence ({', '.join(reader.task.divergence_free)}), and "
            f"the points of its grid are not equally spaced along {', '.join(uneven)}",
            hint="leave divergence_free out of the description, or interpolate the data to a uniform grid",
        )
    if model.conserves and reader.task.conserved and uneven:
        raise ConfigError(
            f"task '{reader.task.name}' conserves {', '.join(reader.task.conserved)}, and the points of its grid are "
            f"not equally spaced along {', '.join(uneven)}: the model can keep an integral on a uniform grid only",
            hint="set model.conserve: false, or interpolate the data to a uniform grid",
        )
