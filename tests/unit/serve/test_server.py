"""A real server: answers in every format, jobs whose store is read while they run, the client, tokens and the end."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray

import ups
from tests.support.calibrated_bundle import calibrated_bundle
from tests.support.faults.small_disk import small_disk
from tests.support.serving import Served, serving
from ups.errors import BundleError, BusyError, JobLostError, LimitError, ServerError
from ups.serve.requests import JSON, NETCDF, NPZ
from ups.serve.results import plain, write_npz

pytestmark = pytest.mark.processes
TOLERANCE = 1e-4
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


STATE = np.sin(2 * np.pi * np.arange(16) / 16)[None]
REQUEST = {"task": "advection", "state": STATE.tolist(), "parameters": {"beta": 1.0}, "steps": 7}
LONG = REQUEST | {"steps": 100_000, "every": 10}


def same(found: xarray.Dataset, expected: xarray.Dataset, tolerance: float = TOLERANCE) -> None:
    assert set(found.variables) == set(expected.variables)
    assert {name: expected.attrs[name] for name in expected.attrs} == {n: found.attrs[n] for n in expected.attrs}
    for name, variable in expected.variables.items():
        assert found[name].dims == variable.dims
        assert plain(dict(found[name].attrs)) == plain(dict(variable.attrs)), name
        if variable.dtype.kind in "OU":
            assert found[name].values.tolist() == variable.values.tolist()
        else:
            size = max(1e-30, float(np.nanmax(np.abs(variable.values.astype(float)), initial=0)))
            a, b = (array.astype(float) / size for array in (found[name].values, variable.values))
            np.testing.assert_allclose(a, b, rtol=0, atol=tolerance, err_msg=str(name))


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


def metric(server: Served, name: str) -> float:
    text = server.request("GET", "/metrics")[2].decode()
    return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name + " ")))


def test_the_schema_has_examples_and_the_health_is_open(server: Served) -> None:
    schema = server.json("GET", "/openapi.json")
    content = schema["paths"]["/rollout"]["post"]["requestBody"]["content"]
    assert content[JSON]["example"]["steps"] == 20
    assert server.json("GET", "/healthz") == {"status": "ok"}
    assert server.json("GET", "/readyz") == {"status": "ready"}
    assert metric(server, "ups_sample_steps_total") > 0
    assert metric(server, "process_resident_memory_bytes") > 0


def test_a_client_that_leaves_frees_its_place(server: Served) -> None:
    with pytest.raises(TimeoutError):
        server.request("POST", "/rollout", LONG | {"every": 1000}, timeout=0.5)
    began = time.monotonic()
    while metric(server, "ups_waiting_rollouts"):
        assert time.monotonic() - began < 5
        time.sleep(0.05)


def test_tokens_are_needed_and_jobs_are_of_one_client(bundle: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# clients\nann secret-of-ann-0123456\nbob secret-of-bob-0123456\n")
    tokens.chmod(0o600)
    with serving(bundle, tmp_path / "s", {"jobs": 2}, "--tokens", str(tokens), "--deterministic") as server:
        ann, bob = ({"Authorization": f"Bearer secret-of-{name}-0123456"} for name in ("ann", "bob"))
        for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": ann["Authorization"][7:]}):
            status, answer, _ = server.request("POST", "/rollout", REQUEST, headers)
            assert (status, answer["WWW-Authenticate"]) == (401, "Bearer")
        assert server.request("GET", "/healthz")[0] == 200
        job = server.json("POST", "/jobs", LONG, ann)
        assert server.request("GET", f"/jobs/{job['id']}", None, bob)[0] == 404
        assert server.request("DELETE", f"/jobs/{job['id']}", None, bob)[0] == 404
        assert server.request("GET", f"{job['store']}/zarr.json", None, bob)[0] == 404
        assert server.request("GET", f"{job['store']}/zarr.json", None, ann)[0] == 200
        assert server.json("GET", "/jobs", None, bob) == {"jobs": []}
        assert server.request("DELETE", f"/jobs/{job['id']}", None, ann)[0] == 204
        # to the bit, in the neighborhood of others
        remote = ups.RemoteSimulator(server.url, token="secret-of-bob-0123456")
        simulator = ups.Simulator.load(bundle)
        found: dict[int, xarray.Dataset] = {}

        def roll(n: int) -> None:
            found[n] = remote.rollout(STATE * n, 20 + n, {"beta": 1.0}, task="advection")

        threads = [threading.Thread(target=roll, args=(n,)) for n in range(1, 6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for n, result in found.items():
            same(result, simulator.rollout(STATE * n, 20 + n, {"beta": 1.0}, task="advection", level=0.9), 0.0)
        assert "secret-of" not in server.log.read_text()
        with pytest.raises(ServerError, match="token"):
            ups.RemoteSimulator(server.url, token="wrong")


def test_sigterm_finishes_what_is_under_way_and_refuses_the_rest(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path / "s", command=True) as server:
        answers: list[int] = []
        threads = [
            threading.Thread(
                target=lambda: answers.append(server.request("POST", "/rollout", REQUEST | {"steps": 300})[0])
            )
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        while metric(server, "ups_waiting_rollouts") < 4 and not answers:
            time.sleep(0.01)
        server.process.send_signal(signal.SIGTERM)
        refused = None
        while any(thread.is_alive() for thread in threads) and refused is None:
            try:
                status, headers, _ = server.request("POST", "/rollout", REQUEST)
                refused = (status, headers["Retry-After"]) if status != 200 else None
            except OSError:
                break
        for thread in threads:
            thread.join()
        assert answers == [200] * 4
        assert refused in (None, (503, "1"))
        assert server.process.wait(30) == 143
        assert server.events()[-1]["event"] == "stopped"


def test_a_killed_server_is_an_error_with_the_frames_so_far_and_the_next_one_serves(
    bundle: Path, tmp_path: Path
) -> None:
    with serving(bundle, tmp_path / "a", {}, "--jobs", str(tmp_path)) as server:
        remote = ups.RemoteSimulator(server.url, patience=0.5)

        def kill(frames: int) -> None:
            if frames > 0:
                server.process.kill()

        with pytest.raises(JobLostError, match="lost after") as caught:
            remote.rollout(STATE, 2_000, {"beta": 1.0}, task="advection", every=5, progress=kill)
    partial = caught.value.partial
    assert isinstance(partial, xarray.Dataset)
    assert 0 < partial.sizes["time"] < 400
    assert not bool(partial["u"].isnull().any())
    with serving(bundle, tmp_path / "b", {}, "--jobs", str(tmp_path)) as server:
        same(
            ups.RemoteSimulator(server.url).rollout(STATE, 5, {"beta": 1.0}, task="advection"),
            ups.Simulator.load(bundle).rollout(STATE, 5, {"beta": 1.0}, task="advection", level=0.9),
        )


def test_a_full_disk_is_named_and_other_rollouts_continue(bundle: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    with small_disk(disk, 2**20), serving(bundle, tmp_path / "s", {}, "--jobs", str(disk)) as server:
        flow = {"state": np.ones((3, 16, 16)).tolist(), "static": np.ones((1, 16, 16)).tolist()}
        flow |= {"task": "flow", "parameters": {"nu": 0.02, "rho": 1.5}, "steps": 200}
        job = server.json("POST", "/jobs", flow)
        (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - 2**16))
        deadline = time.monotonic() + 60
        while (job := server.json("GET", f"/jobs/{job['id']}"))["status"] == "running":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert job["status"] == "failed"
        assert job["error"].startswith("disk_full: cannot write the job's store")
        assert server.request("POST", "/rollout", REQUEST)[0] == 200
        assert server.request("POST", "/jobs", flow)[0] == 507
        assert server.request("DELETE", f"/jobs/{job['id']}")[0] == 204
        (disk / "other").unlink()
        assert server.request("POST", "/jobs", flow)[0] == 202


def test_beyond_capacity_refusals_are_fast_and_nothing_grows(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path / "s", {"waiting": 8, "waiting_of_client": 8}) as server:
        for _ in range(3):
            server.request("POST", "/rollout", REQUEST)
        before = server.resident()
        statuses: list[int] = []
        refusals: list[float] = []
        end = time.monotonic() + 3

        def work() -> None:
            while time.monotonic() < end:
                began = time.monotonic()
                status, headers, _ = server.request("POST", "/rollout", REQUEST | {"steps": 400, "every": 40})
                statuses.append(status)
                if status != 200:
                    refusals.append(time.monotonic() - began)
                    assert headers["Retry-After"] == "1"
                    time.sleep(0.05)

        threads = [threading.Thread(target=work) for _ in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(statuses) == {200, 429}
        assert np.median(refusals) < 1.0  # a second of a busy machine
        began = time.monotonic()
        assert server.request("POST", "/rollout", REQUEST)[0] == 200
        assert time.monotonic() - began < 2
        assert server.resident() - before < 64 * 2**20
        assert metric(server, "ups_held_bytes") == 0


def test_a_busy_server_is_asked_again(bundle: Path, tmp_path: Path) -> None:
    with serving(bundle, tmp_path / "s", {"waiting": 1}) as server:
        remote = ups.RemoteSimulator(server.url, patience=30)
        job = server.json("POST", "/jobs", LONG)
        impatient = ups.RemoteSimulator(server.url, patience=0.2)
        with pytest.raises(BusyError, match="under way"):
            impatient.rollout(STATE, 2, {"beta": 1.0}, task="advection")
        threading.Timer(1, lambda: server.request("DELETE", f"/jobs/{job['id']}")).start()
        assert remote.step(STATE, {"beta": 1.0}, task="advection").sizes["time"] == 1
