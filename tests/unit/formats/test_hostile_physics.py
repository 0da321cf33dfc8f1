"""Data of other equations in files shaped like PDEBench's: they get no known equation, boundary or parameter."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch

from tests.support import pdebench_files as files
from tests.support.small_bundle import statistics_of
from ups.cli.main import run
from ups.config.model import LatentOperatorConfig
from ups.config.schema import TaskConfig
from ups.data.inspect import card_lines, make_card
from ups.data.open import open_task
from ups.data.pack import pack
from ups.data.validate import validate_paths
from ups.errors import DataError
from ups.formats.hdf5 import survey_files
from ups.formats.pdebench import PdebenchReader
from ups.formats.pdebench_problems import PROBLEMS
from ups.formats.zarr_store import StoreReader
from ups.inference.bundle import BundleInfo, write_card
from ups.models.build import build_model
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

# equation -> (shape of its file, numbers it has)
OTHERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "damped_wave": ("groups2", ("gamma", "c")),
    "kuramoto_sivashinsky": ("tensor", ("Nu",)),
    "heat": ("tensor", ("Nu", "rho")),
    "allen_cahn": ("tensor", ("beta",)),
    "schroedinger": ("groups2", ("k", "hbar")),
    "gray_scott": ("groups2", ("Du", "Dv", "F", "k")),
    "linear_shallow_water": ("groups1", ("gravity", "f0")),
    "telegraph": ("groups0", ("D", "por")),
    "acoustics": ("flow", ("eta", "zeta", "c0")),
    "poisson": ("darcy", ("beta",)),
}
NAMES = (
    "{}.h5",
    "my_{}_Burgers.hdf5",
    "1D_Advection_{}.hdf5",
    "ReacDiff_{}_Nu0.1.hdf5",
    "2D_rdb_{}.h5",
    "{}_diff-react.h5",
)


def _write(path: Path, form: str, numbers: dict[str, float], draw: random.Random) -> None:
    config = "sim:\n" + "".join(f"  {name}: {value}\n" for name, value in numbers.items())
    if form == "tensor":
        files.single(path, attributes=numbers)
    elif form.startswith("groups"):
        shape = {"groups0": (6, 16, 1), "groups1": (6, 8, 4, 1), "groups2": (6, 8, 4, 2)}[form]
        files.grouped(path, shape, config if draw.random() < 0.5 else "name: mine\n")
        with h5py.File(path, "r+") as file:
            file.attrs.update(numbers if draw.random() < 0.5 else {})
    elif form == "flow":
        files.compressible(path, 2)
        with h5py.File(path, "r+") as file:
            file.attrs.update(numbers)
    else:
        files.darcy(path)


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Ten files of other equations, with drawn names and attributes; surveyed by one child."""
    draw, folder = random.Random(7), tmp_path_factory.mktemp("others")
    paths = {}
    for equation, (form, own) in OTHERS.items():
        path = folder / draw.choice(NAMES).format(equation)
        numbers = {name: round(draw.uniform(0.01, 2), 3) for name in own}
        _write(path, form, numbers, draw)
        paths[equation] = path
    assert not any(isinstance(answer, DataError) for answer in survey_files(list(paths.values())))
    return paths


@pytest.mark.parametrize("equation", OTHERS)
def test_no_drawn_file_of_another_equation_gets_a_known_one(drawn: dict[str, Path], equation: str) -> None:
    reader = PdebenchReader(drawn[equation])
    task = reader.task
    assert (task.name, task.equation, task.conserved, task.symmetries) == ("unknown", "", (), ())
    assert {axis.boundary for axis in task.axes} == {"unknown"}
    assert reader.assumptions[0].startswith("the equation is unknown")

    lines = card_lines(make_card(reader, [str(drawn[equation])]))
    assert ("task", "unknown, equation not known") in lines
    assert any(label == "assumed" and "boundary is unknown" in text for label, text in lines)
    report = validate_paths(str(drawn[equation]))
    assert (report.task, report.equation) == ("unknown", "")
    assert report.assumptions == list(reader.assumptions)

    info = BundleInfo(
        {"operator": LatentOperatorConfig(width=16, depth=1, num_heads=2)},
        1,
        (task,),
        {task.name: statistics_of(task)},
        {task.name: reader.coordinates},
        assumptions={task.name: reader.assumptions},
    )
    card = write_card("mine", info)
    assert "| unknown | not known |" in card
    assert "the equation is unknown" in card
    for problem in PROBLEMS.values():
        assert problem.equation not in card
        assert all(problem.equation not in text for _, text in lines)


@pytest.mark.parametrize("equation", OTHERS)
def test_every_attribute_is_a_parameter_or_named_as_unused(drawn: dict[str, Path], equation: str) -> None:
    reader = PdebenchReader(drawn[equation])
    with h5py.File(drawn[equation]) as file:
        names = [*file.attrs] + [n for n in next(iter(file.values())).attrs if n != "config"]
        values = dict(file.attrs)
    parameters = {p.name: p.minimum for p in reader.task.parameters}
    said = " ".join(reader.assumptions)
    for name in names:
        assert parameters.get(name) == pytest.approx(values[name]) or f"'{name}'" in said


def _group_attributes(path: Path, **values: Any) -> None:
    with h5py.File(path, "r+") as file:
        for group in file.values():
            group.attrs.update(values)


def test_a_published_name_is_not_enough_if_the_file_says_otherwise(tmp_path: Path) -> None:
    wave = tmp_path / "2D_diff-react_NA_NA.h5"
    files.grouped(wave, (6, 8, 4, 2), files.CONFIG_DIFFREACT)
    _group_attributes(wave, gamma=0.1)
    gray_scott = tmp_path / "a" / "2D_diff-react_NA_NA.h5"
    gray_scott.parent.mkdir()
    files.grouped(gray_scott, (6, 8, 4, 2), "sim:\n  Du: 0.1\n  Dv: 0.2\n  F: 0.04\n  k: 0.06\n")
    named = tmp_path / "1D_Burgers_Sols_Nu0.1.hdf5"
    files.single(named, attributes={"Nu": 0.1, "hyperviscosity": 1.0})
    wide = tmp_path / "1D_Burgers_Sols_Nu1.0.hdf5"
    files.single(wide, attributes={"Nu": 1.0})
    with h5py.File(wide, "r+") as file:
        file["x-coordinate"][:] = files.cells(16, 0.0, 64.0)
    text = tmp_path / "1D_Advection_Sols_beta0.4.hdf5"
    files.single(text, attributes={"beta": 0.4, "equation": "u_tt = u_xx"})  # type: ignore[dict-item]
    paths = {wave: "'gamma'", gray_scott: "'f'", named: "'hyperviscosity'", wide: "length 64", text: "'equation'"}
    survey_files(list(paths))
    for path, reason in paths.items():
        reader = PdebenchReader(path)
        assert reader.task.equation == ""
        assert reason in reader.assumptions[0]


def test_a_parameter_that_differs_between_groups_is_not_taken_from_the_first(tmp_path: Path) -> None:
    path = tmp_path / "2D_diff-react_NA_NA.h5"
    files.grouped(path, (6, 8, 4, 2), files.CONFIG_DIFFREACT)
    with h5py.File(path, "r+") as file:
        for i, group in enumerate(file.values()):
            group.attrs["config"] = files.CONFIG_DIFFREACT.replace("0.005", str(0.005 + i))
    reader = PdebenchReader(path)
    assert [p.name for p in reader.task.parameters] == ["Du", "k"]
    assert any("differ between groups: values 'Dv'" in text for text in reader.assumptions)


def test_the_user_can_state_the_problem_and_that_is_what_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "mine.hdf5"
    files.single(path, attributes={"Nu": 0.1, "seed": 3})
    reader = open_task(TaskConfig(name="mine", path=str(path), problem="burgers1d"))
    assert reader.task.equation == PROBLEMS["burgers1d"].equation
    assert reader.assumptions[0].startswith("stated by the user, not by the file: it holds burgers1d")
    assert "not used: attributes 'seed'" in reader.assumptions
    assert run(["data", "inspect", str(path), "--problem", "burgers1d", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["assumptions"] == list(reader.assumptions)
    assert run(["data", "validate", str(path)]) == 0
    assert "assumed: the equation is unknown" in capsys.readouterr().out
    for wrong, message in (("diffreact2d", "not arranged"), ("heat", "not a problem that ups knows")):
        with pytest.raises(DataError, match=message):
            PdebenchReader(path, problem=wrong)


def test_assumptions_go_with_the_data_into_a_store(tmp_path: Path) -> None:
    path = tmp_path / "mine.hdf5"
    files.single(path, attributes={"Nu": 0.1, "<script>\x1b[2J": 3})
    reader = PdebenchReader(path)
    pack(reader, tmp_path / "mine.zarr")
    store = StoreReader(tmp_path / "mine.zarr")
    assert store.assumptions == reader.assumptions
    assert store.task == reader.task
    assert not any("\x1b" in text or "<" in text for text in store.assumptions)


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("1D_Burgers_Sols_Nu0.001.hdf5", "burgers1d"),
        ("ReacDiff_react_Nu10.0_Rho5.0.hdf5", "reacdiff1d"),
        ("1D_CFD_Rand_Eta1.e-8_Zeta1.e-8_trans_Train.hdf5", "cfd1d"),
        ("2D_CFD_Turb_M0.1_Eta1e-08_Zeta1e-08_periodic_512_Train.hdf5", "cfd2d"),
        ("3D_CFD_Rand_M1.0_Eta1e-08_Zeta1e-08_periodic_Train.hdf5", "cfd3d"),
        ("2D_DarcyFlow_beta100.0_Train.hdf5", "darcy2d"),
        ("renamed.h5", "diffreact2d"),
    ],
)
def test_published_files_are_recognized_with_their_assumptions(tmp_path: Path, name: str, task: str) -> None:
    path = tmp_path / name
    if task.startswith("cfd"):
        files.compressible(path, int(task[3]))
    elif task == "darcy2d":
        files.darcy(path)
    elif task == "diffreact2d":
        files.grouped(path, (6, 8, 4, 2), f"output_path: 2D_diff-react_NA_NA\n{files.CONFIG_DIFFREACT}")
    else:
        files.single(path, attributes={"Nu": 0.1} | ({"rho": 1.0} if task == "reacdiff1d" else {}))
    reader = PdebenchReader(path)
    assert reader.task.name == task
    assert reader.assumptions[0].startswith(f"taken for PDEBench's {task} by ")
    assert any("units are not in the file" in text for text in reader.assumptions)


def test_the_walls_of_our_own_shallow_water_are_not_called_open(tmp_path: Path) -> None:
    path = tmp_path / "2D_rdb_NA_NA.h5"
    files.grouped(path, (6, 8, 4, 1), files.CONFIG_RDB)
    with h5py.File(path, "r+") as file:
        file.attrs["ups_generator"] = "{}"
    assert [axis.boundary for axis in PdebenchReader(path).task.axes] == ["wall", "wall"]


def test_a_model_is_reported_nothing_about_an_unknown_boundary() -> None:
    task = TaskSpec("t", (FieldSpec("u"),), (AxisSpec("x", "unknown"), AxisSpec("y", "unknown")), dt=0.1)
    known = dataclasses.replace(task, axes=(AxisSpec("x", "open"), AxisSpec("y", "open")))
    config = LatentOperatorConfig(width=16, depth=1, num_heads=2)
    models = [build_model(config, [spec], {"t": statistics_of(spec)}, 1, seed=0) for spec in (task, known)]
    shapes = [{name: value.shape for name, value in model.state_dict().items()} for model in models]
    assert shapes[0] == shapes[1]
    table = next(p for name, p in models[0].named_parameters() if name.endswith("conditioning.boundary"))
    module = next(m for m in models[0].modules() if getattr(m, "boundary", None) is table)
    arguments = (task, torch.zeros(2, 0), torch.full((2,), 0.1), (16, 16))
    before = module(*arguments)
    before.sum().backward()
    assert table.grad is not None
    assert (table.grad[:2] == 0).all()
    with torch.no_grad():
        table[:2] += 1.0
    np.testing.assert_array_equal(module(*arguments).detach(), before.detach())
