"""Values of a rollout at the points of a mesh, their errors there, and a file of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ups.errors import ConfigError
from ups.evaluation.metrics import trajectory_rms, trmse, without_holes
from ups.formats.base import Reader
from ups.formats.mesh_files import MeshFile, read_mesh_file, write_mesh_file
from ups.spec.batch import Window
from ups.spec.points import at_points, valid_at_points

if TYPE_CHECKING:
    from ups.evaluation.figures import Example

MESH_SUFFIX = ".npz"


@dataclass(frozen=True)
class OnMesh:
    """The points of a trajectory: in units of nodes (1, N, D), and values of all frames there (1, T, C, N, 1, ...)."""

    path: str
    points: torch.Tensor
    values: torch.Tensor

    @classmethod
    def of(cls, reader: Reader, split: str, trajectory: int, window: Window) -> OnMesh:
        block = reader.read_block(split, [trajectory], [window.start_frame], len(window.state))
        assert block.points is not None
        assert block.point_values is not None
        values = torch.from_numpy(block.point_values).double()
        return cls(reader.mesh_path(split, trajectory), torch.from_numpy(block.points).double(), values)

    def predicted(self, fields: Any) -> torch.Tensor:
        """Frames on the grid (T, C, *S) -> at the points (1, T, C, N, 1, ...)."""
        return at_points(torch.from_numpy(np.nan_to_num(np.asarray(fields, np.float64)))[None], self.points)

    def errors(self, example: Example, every: int) -> dict[str, float]:
        """Relative to the trajectory, at the points: of the model, and of the truth taken to the grid and back."""
        if example.truth is None:
            return {}
        weights = without_holes(None, valid_at_points(self.points)[:, None])
        steps = len(example.truth)
        following = self.values if example.task.steady else self.values[:, -(steps * every) :][:, every - 1 :: every]
        scale = trajectory_rms(self.values, weights)
        rows = {"model at the points": example.prediction, "interpolated truth at the points": example.truth}
        return {
            n: float(trmse(self.predicted(x), following[:, :steps], scale, weights).mean()) for n, x in rows.items()
        }


def write_mesh_result(example: Example | None, on_mesh: OnMesh | None, path: Path) -> None:
    """A new file with the predicted fields at the points of the input."""
    if example is None or on_mesh is None:
        raise ConfigError(
            f"{path} holds values at the points of a mesh, and the input is a grid", hint="give -o RESULT.nc"
        )
    mesh, task = read_mesh_file(on_mesh.path), example.task
    values = on_mesh.predicted(example.prediction)[0].flatten(2)[..., : len(mesh.points)].numpy()  # (T, C, N)
    fields, first = {}, 0
    for field in task.fields_of(task.predicted):
        count = field.num_channels(task.num_spatial_dims)
        own = np.moveaxis(values[:, first : first + count], 1, -1)  # (T, N, K)
        own = own if field.tensor_rank else own[..., 0]
        fields[field.name], first = own[0] if task.steady else own, first + count
    steps = np.arange(len(values), dtype=np.float64)
    times = None if task.steady else np.asarray(example.first_step_time + example.step_time * steps)
    write_mesh_file(
        path, MeshFile(mesh.points, fields, times, mesh.cells, mesh.cell_kinds, mesh.boundary, mesh.parameters)
    )
