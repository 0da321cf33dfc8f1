"""Who was given a bundle needs the core package only: no extra, no training data, no drawing library.

The environment holds the wheel, its core dependencies with all that these require (torch among them), and nothing
else; they are links to the packages of the running environment (`environments.core_environment`).
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import tomllib
from pathlib import Path

import numpy as np
import pytest

from tests.integration.environments import ROOT, core_environment, run, start

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
STORED = ROOT / "tests" / "unit" / "inference" / "bundles" / "v1" / "latent_operator"
EXTRAS = ("imageio", "imageio_ffmpeg", "scipy", "skfem", "exponax", "jax", "neuralop", "pytest")
NETWORK_CAN_BE_TAKEN = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "--user", "--map-root-user", "--net", "true"], capture_output=True).returncode == 0
)
PROGRAM = """
import sys
import numpy as np, xarray, ups
arrays = np.load(sys.argv[2])
simulator = ups.Simulator.load(sys.argv[1], device="cpu")
state, beta = arrays["advection.state"], arrays["advection.parameters.beta"]
result = simulator.rollout(state, 8, {"beta": beta}, task="advection")
np.testing.assert_allclose(result.u.values, arrays["advection.answer.u"], rtol=1e-5, atol=1e-5)
x = result.x.values
xarray.Dataset({"u": (("x",), state[0, 0]), "beta": beta[0]}, {"x": x}).to_netcdf("start.nc", engine="h5netcdf")
print("same")
"""


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return core_environment(tmp_path_factory.mktemp("bare") / "environment", wheel, PROJECT["dependencies"])


@pytest.fixture(scope="module")
def desk(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with nothing but a copy of the stored bundle and the start of a simulation, start.nc."""
    desk = tmp_path_factory.mktemp("desk")
    shutil.copytree(STORED, desk / "bundle")
    program = (environment / "python", "-c", PROGRAM, "bundle", STORED.with_suffix(".npz"))
    assert run(*program, cwd=desk) == "same\n"
    return desk


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_no_package_of_an_extra_can_be_imported_here(environment: Path, tmp_path: Path) -> None:
    code = f"import importlib.util as u; print([n for n in {EXTRAS} if u.find_spec(n) is not None])"
    assert run(environment / "python", "-c", code, cwd=tmp_path) == "[]\n"
    document = json.loads(run(environment / "ups", "--version", "--verbose", "--json", cwd=tmp_path))
    assert document["libraries"]["torch"] is not None
    assert all(document["extras"][name]["missing"] for name in ("generate", "report", "baselines"))


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_kept_bundle_is_rolled_out_in_python_and_by_the_command_alike(environment: Path, desk: Path) -> None:
    command = ("rollout", "bundle", "start.nc", "--task", "advection", "--steps", "8", "-o", "result.zarr", "--json")
    facts = json.loads(run(environment / "ups", *command, cwd=desk))
    assert facts["written"] == ["result.zarr"]
    assert facts["attributes"]["blew_up"] == ""
    assert facts["samples"] == [{"warnings": [], "blew_up": False, "diverged_at": None}]
    code = "import sys, xarray, numpy; numpy.save('u.npy', xarray.open_zarr('result.zarr', chunks=None).u.values)"
    run(environment / "python", "-c", code, cwd=desk)
    expected = np.load(STORED.with_suffix(".npz"))["advection.answer.u"][0]
    np.testing.assert_allclose(np.load(desk / "u.npy"), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_a_picture_and_a_gif_need_no_extra_and_an_mp4_is_refused_before_any_work(environment: Path, desk: Path) -> None:
    command = ("rollout", "bundle", "start.nc", "--task", "advection", "-o", "{}.zarr", "--film", "{}")
    done = start(environment / "ups", *(word.format("film.mp4") for word in command), cwd=desk)
    assert done.returncode == 5, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: missing_extra: ")
    assert "in the checkout: pip install '.[report]'" in line
    assert not (desk / "film.mp4.zarr").exists()
    run(environment / "ups", *(word.format("film.gif") for word in command), "--picture", "picture.png", cwd=desk)
    assert (desk / "film.gif").read_bytes().startswith(b"GIF89a")
    assert (desk / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.processes
@pytest.mark.timeout(600)
@pytest.mark.skipif(not (ROOT / "src/ups/shipped/ups-joint").is_dir(), reason="this checkout has no shipped model")
def test_after_the_install_a_film_takes_less_than_30_seconds_and_no_network(environment: Path, tmp_path: Path) -> None:
    """CPU seconds, because tests run next to others; matplotlib looks for fonts in them, as in any new home."""
    offline = ("unshare", "--user", "--map-root-user", "--net") if NETWORK_CAN_BE_TAKEN else ()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    said = run(*offline, environment / "ups", "demo", cwd=tmp_path).splitlines()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert said[0].startswith("ups-joint, one model for ")
    assert said[-1] == "wrote ups-demo-ns2d.gif"
    assert 10_000 < (tmp_path / "ups-demo-ns2d.gif").stat().st_size < 3_000_000
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 30
    names = json.loads(run(environment / "ups", "models", "--json", cwd=tmp_path))
    assert Path(names["ups-joint"]["path"]).is_relative_to(environment.parent.resolve())
