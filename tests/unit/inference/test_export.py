"""Exported steps: the same rollouts, warnings and error bars as torch; what differs, lies or is damaged is not used."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

import ups
from tests.support.calibrated_bundle import STEPS, Drawn, calibrated_bundle
from tests.support.small_bundle import ADVECTION, DARCY, FLOW
from ups.cli.eval import export_app
from ups.errors import BundleError
from ups.inference.bundle import load_bundle, write_bundle
from ups.inference.export import (
    DOCUMENT_NAME,
    WEIGHTS_NAME,
    Graph,
    GraphPredictor,
    GraphStep,
    checked_difference,
    export,
    export_path,
    torch_graph,
    typical_batch,
)
from ups.models.stepper import Stepper
from ups.record.manifest import commit_directory
from ups.serve.engine import Engine, Ticket
from ups.serve.requests import Limits
from ups.serve.served import Admission, Budget, Served
from ups.spec.descriptors import DivergenceLimits
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

pytestmark = pytest.mark.timeout(1200)

CUBE = TaskSpec("cube", (FieldSpec("u"), FieldSpec("v")), tuple(AxisSpec(axis) for axis in "xyz"), dt=0.1)
SAMPLES = 3


def given(task: TaskSpec, samples: int = SAMPLES) -> dict[str, Any]:
    windows = [Drawn(task).read("train", n, 0, 0 if task.steady else 1) for n in range(samples)]
    arguments: dict[str, Any] = {"task": task.name, "steps": 1 if task.steady else STEPS}
    arguments["parameters"] = {
        p.name: np.array([w.parameters[i] for w in windows]) for i, p in enumerate(task.parameters)
    } or None
    if not task.steady:
        arguments["state"] = np.stack([w.state[0] for w in windows])
    if task.num_channels("static"):
        arguments["static"] = np.stack([w.static for w in windows])
    return arguments


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose rollouts do not grow, of tasks in 1D, 2D and 3D and a steady one, with ONNX files of two."""
    path = calibrated_bundle(tmp_path_factory.mktemp("export") / "b", (CUBE,))
    loaded = load_bundle(path)
    with torch.no_grad():
        for parameter in loaded.stepper.network.get_submodule("lower").parameters():
            parameter.mul_(0.02)
    config, card = (path / "config.yaml").read_text(), (path / "card.md").read_text()
    write_bundle(path, loaded.stepper, loaded.info, config_text=config, card=card, stated=loaded.calibrations)
    export(load_bundle(path), export_path(path, "onnx"), "onnx", ["advection", "darcy"])
    return path


def same(one: Any, other: Any) -> None:
    assert set(one.data_vars) == set(other.data_vars)
    for name, values in one.data_vars.items():
        if values.dtype.kind in "biu":
            assert (values.values == other[name].values).all(), name
        else:
            size = float(np.sqrt(np.nanmean(values.values**2)))
            np.testing.assert_allclose(other[name].values, values.values, rtol=1e-3, atol=1e-4 * size, err_msg=name)
    assert one.attrs["warnings"] == other.attrs["warnings"]


SLOW = pytest.mark.long  # they are exported first, into the cache
TASKS = [ADVECTION, DARCY, pytest.param(FLOW, marks=SLOW), pytest.param(CUBE, marks=SLOW)]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_rollouts_warnings_and_error_bars_are_those_of_torch(
    bundle: Path, task: TaskSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    eager, exported = (ups.Simulator.load(bundle, runtime=runtime) for runtime in ("eager", "onnx"))
    stated: dict[str, Any] = {} if task is CUBE else {"level": 0.5}
    for more in (stated, {"on_doubt": "ignore"}):
        for samples in (1, SAMPLES):
            arguments = given(task, samples)
            same(eager.rollout(**arguments, **more), exported.rollout(**arguments, **more))
    exact = eager.rollout(**given(task))
    assert not exact.equals(exported.rollout(**given(task))), "that was torch"


def test_a_trajectory_that_is_further_out_ends_at_the_same_step(bundle: Path) -> None:
    arguments = given(ADVECTION) | {"on_doubt": "stop"}
    arguments["state"] = arguments["state"] * np.array([1.0, 30.0, 1.0])[:, None, None]
    one, other = (ups.Simulator.load(bundle, runtime=name).rollout(**arguments) for name in ("eager", "onnx"))
    assert one.outside_at[1] == 1
    assert np.isnan(other.u[1]).all()
    same(one, other)


def test_a_program_needs_the_files_alone(bundle: Path, tmp_path: Path) -> None:
    """From export.json to the error bars that `Simulator.rollout` states, in numpy and onnxruntime."""
    folder = shutil.copytree(export_path(bundle, "onnx"), tmp_path / "elsewhere")
    document = json.loads((folder / DOCUMENT_NAME).read_text())
    entry = document["tasks"]["advection"]
    assert document["bundle"] == load_bundle(bundle).hash
    assert entry["inputs"]["state"] == ["samples", 1, 16]
    assert entry["grid"]["x"] == load_bundle(bundle).info.coordinates["advection"][0].tolist()
    assert [p["maximum"] for p in entry["task"]["parameters"]] == [4.0]
    assert entry["compared"]["difference"] <= 1e-4
    session = onnxruntime.InferenceSession(folder / entry["file"], providers=["CPUExecutionProvider"])
    held = json.loads(session.get_modelmeta().custom_metadata_map["ups"])
    assert held["bundle"] == document["bundle"]
    assert held["task"] == entry["task"]
    arguments = given(ADVECTION)
    expected = ups.Simulator.load(bundle).rollout(**arguments, level=0.5, on_doubt="ignore")
    components = np.zeros((SAMPLES, session.get_inputs()[-1].shape[1]), np.float32)
    state = arguments["state"].astype(np.float32)
    parameters = arguments["parameters"]["beta"][:, None].astype(np.float32)
    for step in range(STEPS):
        feed = {"state": state, "parameters": parameters, "step": np.array([step + 1])}
        outputs = session.run(entry["outputs"], feed | {"components_before": components})
        state, _, _, log_error, components = outputs
        factors = entry["calibration"]["levels"]["0.5"]
        errors = np.array(factors["error"][step]) * np.exp(log_error)
        bands = np.array(factors["band"][step]) * np.exp(log_error)
        np.testing.assert_allclose(errors[:, 0], expected.u_error[:, step], rtol=1e-3)
        np.testing.assert_allclose(bands[:, 0], expected.u_band[:, step], rtol=1e-3)
    np.testing.assert_allclose(state, expected.u.values[:, -1:], rtol=0, atol=1e-5)


def test_tasks_share_one_file_of_weights(bundle: Path) -> None:
    folder = export_path(bundle, "onnx")
    models = {path.stem: onnx.load(path, load_external_data=False) for path in sorted(folder.glob("*.onnx"))}
    assert sorted(models) == ["advection", "darcy"]
    offsets = {
        name: {entry.value for one in model.graph.initializer for entry in one.external_data if entry.key == "offset"}
        for name, model in models.items()
    }
    assert len(offsets["advection"] & offsets["darcy"]) >= 3, "attention and condition are the same for all tasks"
    no_path_of_this_machine(folder)
    assert (folder / WEIGHTS_NAME).stat().st_size < (bundle / "model.safetensors").stat().st_size
    assert all((folder / f"{name}.onnx").stat().st_size < 100_000 for name in models)


def no_path_of_this_machine(folder: Path) -> None:
    for file in folder.iterdir():
        assert str(Path(ups.__file__).parents[1]).encode() not in file.read_bytes(), file


def test_a_program_of_torch_export_gives_the_same(bundle: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(export_app, ["torch", str(bundle), "-o", str(tmp_path / "pt2"), "--task", "darcy"])
    assert done.exit_code == 0, done.output
    no_path_of_this_machine(tmp_path / "pt2")
    static = torch.from_numpy(given(DARCY, 1)["static"]).float()
    solution = torch_graph(tmp_path / "pt2" / "darcy.pt2")({"static": static}, ["frame"])[0]
    expected = ups.Simulator.load(bundle).rollout(**given(DARCY, 1))
    assert torch.allclose(solution[0, 0], torch.from_numpy(expected.u.values).reshape(16, 16), atol=1e-5)


def test_what_differs_from_torch_is_refused(bundle: Path) -> None:
    loaded = load_bundle(bundle)
    step = GraphStep(loaded, DARCY).eval()
    batch = typical_batch(loaded, DARCY, 2)

    def other(change: dict[str, float]) -> Graph:
        return lambda given, wanted: [
            x * change.get(name, 1.0) for x, name in zip(step(**given), step.outputs, strict=True)
        ]

    assert checked_difference(step, other({}), batch, 1) < 1e-5
    for change in ({"frame": 1 + 1e-3}, {"frame": float("nan")}, {"distance": 2.0}, {"log_error": 1.5}):
        with pytest.raises(BundleError, match=r"exported step of task 'darcy' is .* of the RMS apart from torch"):
            checked_difference(step, other(change), batch, 1)


def test_frames_that_have_diverged_are_not_compared(bundle: Path) -> None:
    loaded = load_bundle(bundle)
    step, batch, calls = GraphStep(loaded, ADVECTION).eval(), typical_batch(loaded, ADVECTION, 2), list[int]()

    def wrong_later(given: Any, wanted: Any) -> list[torch.Tensor]:
        calls.append(1)
        return [output * min(len(calls), 2) for output in step(**given)]

    with pytest.raises(BundleError, match="of the RMS apart from torch"):
        checked_difference(step, wrong_later, batch, 5)
    calls.clear()
    step.limits = DivergenceLimits(*torch.zeros(3, 1, dtype=torch.float64))
    assert checked_difference(step, wrong_later, batch, 5) < 1e-5


def test_what_no_graph_can_hold_is_refused_and_leaves_nothing(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = Stepper.fields
    monkeypatch.setattr(Stepper, "fields", lambda *given: torch.from_numpy(exact(*given).numpy()))
    with pytest.raises(BundleError, match="task 'darcy' cannot be exported"):
        export(load_bundle(bundle), tmp_path / "out", "onnx", ["darcy"])
    assert list(tmp_path.iterdir()) == []


def test_unknown_tasks_and_runtimes_are_refused(bundle: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="no task 'burgers'"):
        export(load_bundle(bundle), tmp_path / "out", "onnx", ["burgers"])
    with pytest.raises(BundleError, match="runtime is one of eager, onnx, auto"):
        ups.Simulator.load(bundle, runtime="tensorrt")


def test_a_damaged_export_is_refused(bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "b")
    folder = Path(shutil.copytree(export_path(bundle, "onnx"), tmp_path / "b-onnx"))
    content = bytearray((folder / WEIGHTS_NAME).read_bytes())
    content[100] ^= 1
    (folder / WEIGHTS_NAME).write_bytes(content)
    with pytest.raises(BundleError, match="no sound export"):
        ups.Simulator.load(tmp_path / "b", runtime="onnx").rollout(**given(DARCY))


def test_an_export_of_other_weights_is_not_used(bundle: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A whole export that names this bundle and was made of another one."""
    loaded = load_bundle(bundle)
    with torch.no_grad():
        loaded.stepper.network.get_submodule("lower").get_parameter("weight").mul_(1.1)
    config, card = (bundle / "config.yaml").read_text(), (bundle / "card.md").read_text()
    path = write_bundle(tmp_path / "b", loaded.stepper, loaded.info, config_text=config, card=card)
    lying = Path(shutil.copytree(export_path(bundle, "onnx"), tmp_path / "lying"))
    text = (lying / DOCUMENT_NAME).read_text().replace(loaded.hash, load_bundle(path).hash)
    (lying / DOCUMENT_NAME).write_text(text)
    for name in ("MANIFEST", "COMMITTED"):
        (lying / name).unlink()
    commit_directory(lying, export_path(path, "onnx"))
    arguments = given(DARCY) | {"on_doubt": "ignore"}
    with pytest.raises(BundleError, match="of the RMS apart from torch"):
        ups.Simulator.load(path, runtime="onnx").rollout(**arguments)
    result = ups.Simulator.load(path, runtime="auto").rollout(**arguments)
    assert result.equals(ups.Simulator.load(path).rollout(**arguments))
    assert "it is not used" in caplog.text


def test_auto_takes_what_is_faster(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    eager = ups.Simulator.load(bundle).rollout(**given(ADVECTION))
    for faster, is_eager in ((True, False), (False, True)):
        monkeypatch.setattr(
            "ups.inference.onnx_steps._seconds",
            lambda predictor, batch, faster=faster: float(isinstance(predictor, GraphPredictor) is not faster),
        )
        result = ups.Simulator.load(bundle, runtime="auto").rollout(**given(ADVECTION))
        assert result.equals(eager) is is_eager
    monkeypatch.undo()
    shutil.copytree(bundle, tmp_path / "alone")  # nothing was exported: auto does not wait for that
    result = ups.Simulator.load(tmp_path / "alone", runtime="auto").rollout(**given(ADVECTION))
    assert result.equals(eager)


def test_a_server_takes_what_is_faster_for_the_size_of_a_batch(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here onnxruntime for batches of more than 4 samples. A batch with a sample that is not finite decides nothing."""
    monkeypatch.setattr(
        "ups.inference.onnx_steps._seconds",
        lambda predictor, batch: float(isinstance(predictor, GraphPredictor) is (batch.num_samples <= 4)),
    )
    served, eager, limits = Served.load(bundle, runtime="auto"), ups.Simulator.load(bundle), Limits()
    engine, requests = Engine(8), [given(ADVECTION, 2) | {"steps": 4 + 3 * n} for n in range(4)]
    assert served._exported is not None

    def submit(arguments: dict[str, Any]) -> Ticket:
        admission: Any = Admission(limits, Budget("memory", 2**30), 2**30)
        return engine.submit(served.rollout(**arguments, out=admission), "c", "g")

    bad = submit(requests[0])
    bad.state = torch.full_like(bad.state, torch.nan)
    while engine.step():
        pass
    assert served._exported._better == {("advection", True): {}}
    tickets = [submit(arguments) for arguments in requests]
    while engine.step():
        pass
    assert served._exported._better == {("advection", True): {3: True, 2: False, 1: False}}
    for ticket, arguments in zip(tickets, requests, strict=True):
        same(eager.rollout(**arguments, level=0.9), ticket.rolling.sink.finish())


def test_onnx_exports_what_lacks_into_the_cache(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    shutil.copytree(bundle, tmp_path / "alone")
    first = ups.Simulator.load(tmp_path / "alone", runtime="onnx").rollout(**given(DARCY))
    (folder,) = (tmp_path / "cache" / "ups" / "onnx").iterdir()
    stamp = folder.stat().st_mtime_ns
    again = ups.Simulator.load(tmp_path / "alone", runtime="onnx").rollout(**given(DARCY))
    assert again.equals(first)
    assert folder.stat().st_mtime_ns == stamp
