"""Files of points are seen as arrays on a grid, and what is trained and scored is the truth at the points."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial import Delaunay

from ups.data.open import open_paths
from ups.errors import DataError
from ups.formats.mesh_files import MeshFile, read_mesh_file, write_mesh_file
from ups.formats.mesh_grid import Box, MeshContainer, box_of, make_mapping
from ups.spec.points import NO_POINT, at_points, valid_at_points

STEADY = """\
name: law
fields:
  - {name: a, role: static}
  - {name: u, role: target}
axes:
  - {name: x}
  - {name: y}
parameters:
  - {name: k}
steady: true
"""
MOVING = """\
name: law
fields:
  - {name: u}
axes:
  - {name: x}
  - {name: y}
"""


def square(seed: int, count: int = 150, dims: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points of a square with a round hole, its cells, and the kind of boundary: 1 at the hole."""
    rng = np.random.default_rng(seed)
    points = rng.uniform(0, 1, (count, dims))
    points = points[np.linalg.norm(points - 0.5, axis=1) > 0.2]
    corners = np.stack(np.meshgrid(*[[0.0, 1.0]] * dims), -1).reshape(-1, dims)
    turns = np.arange(24) * np.pi / 12
    ring = 0.5 + 0.2 * np.stack([np.cos(turns), np.sin(turns), *[0 * turns] * (dims - 2)], 1)
    points = np.concatenate([corners, ring, points])
    cells = Delaunay(points).simplices
    cells = cells[np.linalg.norm(points[cells].mean(1) - 0.5, axis=1) > 0.2]
    kind = np.where(np.abs(np.linalg.norm(points - 0.5, axis=1) - 0.2) < 1e-9, 1, 0)
    return points, cells.astype(np.int64), kind


def write(path: Path, seed: int, *, frames: int = 0, target: bool = True, cells: bool = True) -> MeshFile:
    points, simplices, kind = square(seed)
    rng = np.random.default_rng(seed)
    slope = rng.normal(size=2)
    u = points @ slope + 1
    fields = {"u": u} if not frames else {"u": np.stack([u * 0.9**t for t in range(frames)])}
    if not frames:
        fields = {"a": points @ rng.normal(size=2), **({"u": u} if target else {})}
    mesh = MeshFile(
        points,
        {name: values.astype(np.float32) for name, values in fields.items()},
        np.arange(frames) * 0.1 if frames else None,
        [simplices] if cells else None,
        ("triangle",) if cells else (),
        kind.astype(np.int64),
        {} if frames else {"k": float(seed)},
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_mesh_file(path, mesh)
    return mesh


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ups" / "points"


def data(folder: Path, *, frames: int = 0, cells: bool = True) -> Path:
    for split, seeds in (("train", range(4)), ("valid", range(4, 5)), ("test", range(5, 7))):
        for seed in seeds:
            write(folder / split / f"{seed}.npz", seed, frames=frames, cells=cells)
    (folder.parent / "task.yaml").write_text(MOVING if frames else STEADY)
    return folder


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_a_linear_field_is_exact_on_the_grid_and_back(dims: int) -> None:
    rng = np.random.default_rng(0)
    points = rng.uniform(0, 1, (300, dims))
    box = Box((-0.1,) * dims, (1.3,) * dims, (12,) * dims)
    mapping = make_mapping(MeshFile(points, {}), box)
    slope = rng.normal(size=dims)
    on_grid = np.nan_to_num(mapping.onto((points @ slope)[None], box.nodes))
    back = at_points(torch.from_numpy(on_grid)[None], torch.from_numpy(box.in_nodes(points))[None])
    assert np.abs(back.numpy().ravel() - points @ slope).max() < 0.02 * np.abs(slope).sum()


def test_the_hole_is_outside_and_the_distance_is_that_of_a_circle(tmp_path: Path) -> None:
    write(tmp_path / "0.npz", 0)
    box = box_of([tmp_path / "0.npz"])
    assert box.kinds == (1,)
    container = MeshContainer(str(tmp_path / "0.npz"), box, ("x", "y"))
    whole = tuple(slice(0, n, 1) for n in box.nodes)
    x, y = np.meshgrid(box.coordinates(0), box.coordinates(1), indexing="ij")
    to_hole = np.hypot(x - 0.5, y - 0.5) - 0.2
    exact = np.minimum(to_hole, np.minimum(np.minimum(x, 1 - x), np.minimum(y, 1 - y)))
    distance, outside = container.read("distance", whole), container.read("outside", whole)
    near = (exact > -0.05) & (x > 0) & (x < 1) & (y > 0) & (y < 1)
    assert np.abs(distance - exact)[near].max() < 0.03
    assert outside[to_hole < -float(box.spacing.max()) * 1.5].all()
    assert not outside[exact > 0].any()
    assert np.abs(container.read("boundary_1", whole) - np.abs(to_hole)).max() < 0.03


@pytest.mark.parametrize("cells", [True, False])
def test_windows_have_values_at_points(tmp_path: Path, cells: bool) -> None:
    reader = open_paths(data(tmp_path / "law", cells=cells))
    assert dict(reader.splits) == {"train": 4, "valid": 1, "test": 2}
    assert reader.task.channel_names("static") == ("a", "outside", "distance", "boundary_1")
    block = reader.read_block("test", [0, 1], [0, 0], 0)
    assert block.points is not None
    assert block.point_values is not None
    for row in (0, 1):
        mesh = read_mesh_file(reader.mesh_path("test", row))
        count = len(mesh.points)
        assert np.array_equal(block.point_values[row, 0, 0, :count, 0], mesh.fields["u"])
        assert (block.points[row, count:] == NO_POINT).all()
        assert block.parameters[row, 0] == mesh.parameters["k"]
    points = torch.from_numpy(block.points)
    back = at_points(torch.from_numpy(block.target), points)[:, None]
    off = (back - torch.from_numpy(block.point_values)) * valid_at_points(points)[:, None]
    assert off.abs().max() < 0.05


def test_weights_are_kept_and_damaged_ones_are_made_again(tmp_path: Path, cache: Path) -> None:
    from ups.formats import mesh_grid

    reader = open_paths(data(tmp_path / "law"))
    first = reader.read("train", 0, 0, 0).target
    (kept,) = cache.iterdir()
    kept.write_bytes(b"PK\x03\x04 no archive")
    mesh_grid._mapping.cache_clear()
    assert np.array_equal(reader.read("train", 0, 0, 0).target, first)
    assert kept.stat().st_size > 1000


def test_a_file_without_the_target_is_one_to_predict(tmp_path: Path) -> None:
    folder = data(tmp_path / "law")
    trained = open_paths(folder)
    write(tmp_path / "new" / "a.npz", 6, target=False)
    from ups.config.description import read_description
    from ups.formats.mesh_grid import on_trained_grid

    said = on_trained_grid(
        read_description(tmp_path / "task.yaml"), tmp_path / "new", trained.task, trained.coordinates
    )
    reader = open_paths(tmp_path / "new", description=said)
    window = reader.read("train", 0, 0, 0)
    assert [np.allclose(a, b) for a, b in zip(reader.coordinates, trained.coordinates, strict=True)] == [True, True]
    assert np.allclose(window.static, trained.read("test", 1, 0, 0).static, atol=1e-5)
    inside = window.static[1] == 0
    assert np.isnan(window.target[0][inside]).all()


def test_points_beyond_the_grid_are_refused_with_both_ranges(tmp_path: Path) -> None:
    mesh = write(tmp_path / "0.npz", 0)
    box = box_of([tmp_path / "0.npz"])
    moved = MeshFile(mesh.points + 0.5, mesh.fields)
    with pytest.raises(DataError, match=r"points from .* and the grid covers"):
        make_mapping(moved, box, "0.npz")


def test_frames_in_time_are_read_at_points(tmp_path: Path) -> None:
    reader = open_paths(data(tmp_path / "law", frames=5))
    assert reader.task.dt == pytest.approx(0.1)
    block = reader.read_block("train", [2], [1], 3)
    mesh = read_mesh_file(reader.mesh_path("train", 2))
    assert block.point_values is not None
    assert np.array_equal(block.point_values[0, :, 0, : len(mesh.points), 0], mesh.fields["u"][1:4])


def test_a_folder_without_a_description_is_guessed_with_its_grid(tmp_path: Path) -> None:
    from ups.data.guess import guess_description
    from ups.formats.open_container import open_containers

    folder = data(tmp_path / "law", frames=5)
    (tmp_path / "task.yaml").unlink()
    containers = open_containers([folder])
    description = guess_description(containers, "law").description
    box = box_of([container.path for container in containers])
    assert [(axis.nodes, axis.start, axis.extent) for axis in description.axes] == list(
        zip(box.nodes, box.start, box.extent, strict=True)
    )
    assert {field.name: field.role for field in description.fields} == {
        "outside": "static",
        "distance": "static",
        "boundary_1": "static",
        "u": "state",
    }
    assert (description.mask, description.times) == ("outside", "time")


def test_a_loss_at_points_has_gradients_that_finite_differences_confirm() -> None:
    rng = np.random.default_rng(1)
    fields = torch.from_numpy(rng.normal(size=(2, 1, 5, 6))).requires_grad_()
    points = torch.from_numpy(rng.uniform(0, 4, (2, 7, 2)))
    assert torch.autograd.gradcheck(lambda x: at_points(x, points), fields)
