"""Real servers at their limits: tokens, SIGTERM, kill -9, a full disk, more clients than places."""

from __future__ import annotations

import shutil
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import xarray

import ups
from tests.support.calibrated_bundle import calibrated_bundle
from tests.support.faults.small_disk import small_disk
from tests.support.rollout_requests import LONG, REQUEST, STATE, metric, same
from tests.support.serving import serving
from ups.errors import BusyError, JobLostError, ServerError

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated_bundle(tmp_path_factory.mktemp("bundle") / "b")


def test_tokens_are_needed_and_jobs_are_of_one_client(bundle: Path, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("# clients\nann secret-of-ann-0123456\nbob secret-of-bob-0123456\n")
    tokens.chmod(0o600)
    with serving(bundle, tmp_path / "s", {"jobs": 2}, "--tokens", str(tokens), "--deterministic") as server:
        ann, bob = ({"Authorization": f"Bearer secret-of-{name}-0123456"} for name in ("ann", "bob"))
        for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": ann["Authorization"][7:]}):
            status, answer, _ = server.request("POST", "/rollout", REQUEST, headers)
            assert (status, answer["WWW-Authenticate"]) == (401, "Bearer")
        assert server.request("GET", "/healthz")[0] == server.request("GET", "/")[0] == 200
        assert server.request("GET", "/page")[0] == 401
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
        shutil.rmtree(next(disk.glob("ups-serve-*")))  # as programs do that tidy up /tmp
        assert server.request("POST", "/jobs", flow)[0] == 503
        assert server.request("POST", "/rollout", REQUEST)[0] == 200


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
