"""The example of haproxy with two real servers, and what can be checked of the Dockerfile without building it."""

from __future__ import annotations

import re
import shlex
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import ups
from tests.support.calibrated_bundle import calibrated_bundle
from tests.support.checkout import ROOT
from tests.support.rollout_requests import LONG, REQUEST, STATE, same
from tests.support.serving import Served, serving
from ups.cli.serve import app
from ups.errors import JobLostError

EXAMPLES = ROOT / "examples" / "serve"
TOKEN = "secret-of-ann-0123456"
ANN = {"Authorization": f"Bearer {TOKEN}"}


@contextmanager
def proxy(replicas: list[Served], folder: Path) -> Iterator[Served]:
    """The haproxy of the example, with other ports; looks like a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    text = (EXAMPLES / "haproxy.cfg").read_text()
    for example, real in zip((8000, 8081, 8082), (port, *(one.port for one in replicas)), strict=True):
        assert f"127.0.0.1:{example}" in text
        text = text.replace(f"127.0.0.1:{example}", f"127.0.0.1:{real}")
    (folder / "haproxy.cfg").write_text(text)
    process = subprocess.Popen(["haproxy", "-db", "-f", str(folder / "haproxy.cfg")])
    try:
        front = Served(process, port, folder / "haproxy.cfg")
        deadline = time.monotonic() + 20
        while True:
            try:
                assert front.request("GET", "/readyz")[0] == 200
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield front
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("haproxy") is None, reason="haproxy is not installed (Debian package haproxy)")
def test_jobs_stick_to_their_replica_behind_haproxy(tmp_path: Path) -> None:
    bundle, tokens = calibrated_bundle(tmp_path / "b"), tmp_path / "tokens"
    tokens.write_text(f"ann {TOKEN}\n")
    tokens.chmod(0o600)
    with (
        serving(bundle, tmp_path / "one", {}, "--tokens", str(tokens)) as one,
        serving(bundle, tmp_path / "two", {}, "--tokens", str(tokens)) as two,
        proxy([one, two], tmp_path) as front,
    ):
        jobs = [front.json("POST", "/jobs", LONG, ANN) for _ in range(6)]
        on_one = {job["id"] for job in one.json("GET", "/jobs", None, ANN)["jobs"]}
        on_two = {job["id"] for job in two.json("GET", "/jobs", None, ANN)["jobs"]}
        assert min(len(on_one), len(on_two)) >= 2
        assert on_one | on_two == {job["id"] for job in jobs}
        for job in jobs * 5:
            assert front.json("GET", f"/jobs/{job['id']}", None, ANN)["id"] == job["id"]
            assert front.request("GET", f"{job['store']}/zarr.json", None, ANN)[0] == 200
        for job in jobs:
            assert front.request("DELETE", f"/jobs/{job['id']}", None, ANN)[0] == 204
        remote = ups.RemoteSimulator(front.url, TOKEN, patience=20)
        simulator = ups.Simulator.load(bundle)
        given = (STATE, 300, {"beta": 1.0})
        same(remote.rollout(*given, task="advection"), simulator.rollout(*given, task="advection", level=0.9))
        # A replica that ends: its job is lost with the frames so far, and the other one serves.
        assert front.request("GET", "/models")[0] == 401
        ended: list[Served] = []

        def end_replica(frames: int) -> None:
            if frames and not ended:
                ended.append(one if one.json("GET", "/jobs", None, ANN)["jobs"] else two)
                ended[0].process.kill()

        with pytest.raises(JobLostError, match="lost after") as caught:
            remote.rollout(STATE, 2_000, {"beta": 1.0}, task="advection", every=5, progress=end_replica)
        assert caught.value.partial is not None
        assert np.isfinite(caught.value.partial["u"]).all()
        for _ in range(4):
            assert remote.step(STATE, {"beta": 1.0}, task="advection").sizes["time"] == 1
        assert front.request("POST", "/rollout", REQUEST, ANN)[0] == 200


def test_the_image_runs_as_no_user_of_the_host_and_starts_what_exists() -> None:
    lines = re.sub(r"\\\n", " ", (EXAMPLES / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert all(":" in rest and ":latest" not in rest for name, rest in steps if name == "FROM")
    (user,) = [rest for name, rest in steps if name == "USER"]
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user)
    entry = next(rest for name, rest in steps if name == "ENTRYPOINT")
    options = re.findall(r"--[a-z-]+", entry)
    shown = CliRunner().invoke(app, ["--help"]).output
    assert options
    assert all(option in shown for option in options)
    for sources in (rest.split()[:-1] for name, rest in steps if name == "COPY" and "--from" not in rest):
        assert all((ROOT / source).exists() for source in sources)
    assert not [rest for name, rest in steps if name == "RUN" and "sudo" in shlex.split(rest)]
