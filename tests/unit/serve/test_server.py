"""A real server: answers in every format, jobs whose store is read while they run, the client, tokens and the end."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray

import ups
from tests.support.calibrated_bundle import calibrated_bundle
from tests.support.rollout_requests import LONG, REQUEST, STATE, TOLERANCE, metric, same
from tests.support.serving import Served, serving
from ups.errors import BundleError, LimitError, ServerError
from ups.serve.requests import JSON, NETCDF, NPZ
from ups.serve.results import write_npz

pytestmark = pytest.mark.processes
LIMITS = {"json_bytes": 2**20, "reply_bytes": 2**22, "waiting_of_client": 64}


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated_bundle(tmp_path_factory.mktemp("bundle") / "b")


@pytest.fixture(scope="module")
def simulator(bundle: Path) -> ups.Simulator:
    return ups.Simulator.load(bundle)


@pytest.fixture(scope="module")
def server(bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(bundle, tmp_path_factory.mktemp("server"), LIMITS) as running:
        yield running


@pytest.fixture(scope="module")
def remote(server: Served) -> ups.RemoteSimulator:
    return ups.RemoteSimulator(server.url, patience=10)


def test_every_format_holds_the_result_of_the_simulator(server: Served, simulator: ups.Simulator) -> None:
    expected = simulator.rollout(STATE, 7, {"beta": 1.0}, task="advection", level=0.9)
    assert {"u_error", "u_band", "p_value", "outside_at", "warnings"} <= set(expected)
    _, _, content = server.request("POST", "/rollout", REQUEST, {"Accept": JSON})
    same(xarray.Dataset.from_dict(json.loads(content)), expected)
    _, _, content = server.request("POST", "/rollout", REQUEST, {"Accept": NETCDF})
    same(xarray.open_dataset(io.BytesIO(content), engine="h5netcdf"), expected)
    _, _, content = server.request("POST", "/rollout", REQUEST, {"Accept": NPZ})
    arrays = np.load(io.BytesIO(content))
    np.testing.assert_allclose(arrays["u"], expected["u"], atol=TOLERANCE)
    assert json.loads(str(arrays["about"]))["attrs"]["bundle"] == expected.attrs["bundle"]
    body = write_npz({"task": np.array("advection"), "state": STATE, "steps": np.array(7), "parameters.beta": 1.0})
    _, _, content = server.request("POST", "/rollout", body, {"Content-Type": NPZ, "Accept": NPZ})
    np.testing.assert_array_equal(np.load(io.BytesIO(content))["u"], arrays["u"])


@pytest.mark.parametrize("task", ["advection", "flow", "darcy"])
@pytest.mark.parametrize("long", [False, True])
def test_the_client_gives_what_the_simulator_gives(
    remote: ups.RemoteSimulator, simulator: ups.Simulator, task: str, long: bool
) -> None:
    draw = np.random.default_rng(0)
    given: dict[str, Any] = {
        "advection": {"state": draw.normal(size=(3, 1, 16)), "parameters": {"beta": [1.0, 2.0, 9.0]}, "steps": 31},
        "flow": {
            "state": {"velocity": draw.normal(size=(2, 16, 16)), "density": draw.normal(size=(16, 16))},
            "static": draw.normal(size=(1, 16, 16)),
            "parameters": {"nu": 0.02, "rho": 1.5},
            "steps": 6,
            "every": 2,
            "time": 3.0,
        },
        "darcy": {"static": draw.normal(size=(1, 16, 16))},
    }[task]
    expected = simulator.rollout(**given, task=task, level=0.9)
    seen: list[int] = []
    found = remote.rollout(**given, task=task, progress=seen.append if long else None)
    same(found, expected)
    if long:
        assert seen[-1] == (1 if task == "darcy" else given["steps"])
    points = draw.uniform(0.1, 0.8, (4, len(simulator.tasks[task].axes)))
    xarray.testing.assert_allclose(remote.query(found, points), simulator.query(expected, points), atol=1e-3)


def test_the_client_takes_datasets_writes_files_and_streams(
    remote: ups.RemoteSimulator, simulator: ups.Simulator, tmp_path: Path
) -> None:
    result = simulator.rollout(STATE, 3, {"beta": 1.0}, task="advection")
    expected = simulator.rollout(result, 40, task="advection", level=0.9)
    for name in ("a.zarr", "a.nc"):
        same(remote.rollout(result, 40, task="advection", out=tmp_path / name), expected)
        assert [path.name for path in tmp_path.iterdir()].count(name) == 1
    pieces = list(remote.stream(result, 40, task="advection"))
    np.testing.assert_allclose(np.concatenate([piece["u"] for piece in pieces]), expected["u"], atol=TOLERANCE)
    with pytest.raises(BundleError, match="exists already"):
        remote.rollout(result, 40, task="advection", out=tmp_path / "a.nc")
    assert not list(tmp_path.glob("ups-remote-*"))


def test_wrong_requests_are_told_what_is_wrong(remote: ups.RemoteSimulator, server: Served) -> None:
    with pytest.raises(BundleError, match="parameter 'beta' of task 'advection' is missing"):
        remote.rollout(STATE, 3, task="advection")
    with pytest.raises(BundleError, match="was not trained as an ensemble"):
        remote.rollout(STATE, 3, {"beta": 1.0}, task="advection", members=2)
    with pytest.raises(LimitError, match="100,000"):
        remote.rollout(STATE, 10**6, {"beta": 1.0}, task="advection")
    with pytest.raises(BundleError, match="no bundle 'other'"):
        ups.RemoteSimulator(server.url, bundle="other")
    with pytest.raises(ServerError, match="cannot be reached"):
        ups.RemoteSimulator("http://127.0.0.1:1", patience=0.1)
    status, _, content = server.request("POST", "/rollout", LONG | {"every": 1})
    assert status == 413
    assert "start a job" in json.loads(content)["hint"]


READER = """
import json, sys, warnings, xarray
warnings.simplefilter("ignore")
for consolidated in (None, True, False):
    data = xarray.open_zarr(sys.argv[1], consolidated=consolidated)
    done = data.attrs["frames_done"]
    print(json.dumps([data.attrs["status"], done, list(data["u"].shape), data["u"][:done].isnull().sum().item(),
        data["u"][-1].isnull().all().item(), data["p_value"].shape[0], data.attrs["bundle"]]))
"""


def test_another_process_reads_the_first_frames_of_a_running_job(server: Served, simulator: ups.Simulator) -> None:
    job = server.json("POST", "/jobs", LONG | {"steps": 20_000, "every": 1})
    assert job["status"] == "running"
    deadline = time.monotonic() + 60
    while not server.json("GET", f"/jobs/{job['id']}")["frames_done"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    done = subprocess.run(
        [sys.executable, "-c", READER, server.url + job["store"]], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        status, frames, shape, missing, last_missing, length, name = json.loads(line)
        assert (status, shape, missing, last_missing, length) == ("running", [20_000, 16], 0, True, 20_000)
        assert 0 < frames < 20_000
        assert name == json.loads(json.dumps(job["bundle"]))
    began = time.monotonic()
    assert server.request("DELETE", f"/jobs/{job['id']}")[0] == 204
    assert server.request("GET", f"/jobs/{job['id']}")[0] == 404
    while metric(server, "ups_waiting_rollouts"):
        assert time.monotonic() - began < 5
    assert server.request("GET", job["store"] + "/zarr.json")[0] == 404


def test_the_schema_has_examples_and_the_health_is_open(server: Served) -> None:
    schema = server.json("GET", "/openapi.json")
    content = schema["paths"]["/rollout"]["post"]["requestBody"]["content"]
    assert content[JSON]["example"]["steps"] == 20
    assert server.json("GET", "/healthz") == {"status": "ok"}
    assert server.json("GET", "/readyz") == {"status": "ready"}
    assert metric(server, "ups_sample_steps_total") > 0
    assert metric(server, "process_resident_memory_bytes") > 0


def test_the_page_may_ask_its_server_only_and_cannot_be_framed(server: Served) -> None:
    status, headers, content = server.request("GET", "/")
    assert (status, headers["X-Frame-Options"]) == (200, "DENY")
    assert b"connect-src 'self'" in content
    assert server.json("GET", "/page")["models"]["b"]["tasks"]["flow"]["calibration"]["levels"]["0.9"]


def test_a_client_that_leaves_frees_its_place(server: Served) -> None:
    with pytest.raises(TimeoutError):
        server.request("POST", "/rollout", LONG | {"every": 1000}, timeout=0.5)
    began = time.monotonic()
    while metric(server, "ups_waiting_rollouts"):
        assert time.monotonic() - began < 5
        time.sleep(0.05)
