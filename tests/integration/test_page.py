"""The page of a simulator in a real browser: what `Simulator` gives, by mouse and by keyboard, without a request."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ups
from tests.support.calibrated_bundle import calibrated_bundle, make_shipped
from tests.support.chromium import PROGRAM, Browser, chromium
from tests.support.serving import serving
from ups.inference.bundle import load_bundle, write_bundle
from ups.inference.page import RUNTIME, export_page
from ups.record.run_dir import find_bundle
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

pytestmark = [
    pytest.mark.processes,
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(PROGRAM is None, reason="there is no Chromium here: apt-get install chromium"),
]

CUBE = TaskSpec("cube", (FieldSpec("u"),), tuple(AxisSpec(axis) for axis in "xyz"), dt=0.1)
STEP = "Number(document.getElementById('frame').value)"
SAID = "document.getElementById('message').textContent"
READY = f"document.getElementById('state')?.options.length && !{SAID}.includes('...')"
BOX = "(box => [box.x, box.y, box.width, box.height])(document.querySelector('canvas').getBoundingClientRect())"


def click(browser: Browser, name: str) -> None:
    browser.run(f"document.getElementById('{name}').click()")


def shown(browser: Browser, name: str) -> str:
    return str(browser.run(f"document.getElementById('{name}').textContent"))


def finish(browser: Browser) -> None:
    click(browser, "finish")
    browser.wait("document.getElementById('finish').disabled")


def downloaded(browser: Browser, folder: Path, kind: str) -> Path:
    """A file that the page gives, under a name of its own."""
    browser.downloads(folder)
    click(browser, kind)
    deadline = time.monotonic() + 30
    while not (files := list(folder.glob(f"*.{kind}"))):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return files[0].rename(folder / f"{time.monotonic_ns()}-{kind}")


def same_as_eager(path: Path, simulator: ups.Simulator, task: str) -> None:
    """The frames and the error bars of a rollout, within 1e-4 of its RMS."""
    arrays, spec = dict(np.load(path)), simulator.tasks[task]
    given: dict[str, Any] = {"parameters": {p.name: arrays[p.name] for p in spec.parameters} or None}
    first = 0 if spec.steady else 1
    if spec.fields_of("static"):
        given["static"] = {field.name: arrays[field.name] for field in spec.fields_of("static")}
    if not spec.steady:
        given |= {"steps": len(arrays["time"]) - 1}
        given["state"] = {field.name: arrays[field.name][0] for field in spec.fields_of("state")}
    level = 0.9 if f"{spec.fields_of(spec.predicted)[0].name}_error" in arrays else None
    # The page does not know all that `Simulator` doubts; what both state must be the same.
    expected = simulator.rollout(**given, task=task, level=level, on_doubt="ignore")
    for field in spec.fields_of(spec.predicted):
        values = expected[field.name].values
        size = np.sqrt(np.square(values).mean())
        np.testing.assert_allclose(arrays[field.name][first:] / size, values / size, rtol=0, atol=1e-4)
        if level:
            name = f"{field.name}_error"
            stated = arrays[name] if spec.steady else arrays[name][first:]
            stated = np.where(np.isnan(stated), expected[name], stated)
            np.testing.assert_allclose(stated, expected[name], rtol=0.01)


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npm")
    subprocess.run(["npm", "pack", RUNTIME.replace("web-", "web@")], cwd=folder, check=True, capture_output=True)
    return folder / f"{RUNTIME}.tgz"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of all kinds; that in 3D is not calibrated. Its rollouts do not grow."""
    path = calibrated_bundle(tmp_path_factory.mktemp("bundle") / "small", (CUBE,))
    found = load_bundle(path)
    with torch.no_grad():
        for name, parameter in found.stepper.named_parameters():
            if name.endswith("head.weight"):
                parameter.mul_(0.1)
    config, card = (path / "config.yaml").read_text(), (path / "card.md").read_text()
    return write_bundle(path, found.stepper, found.info, config_text=config, card=card, stated=found.calibrations)


@pytest.fixture(scope="module")
def page(bundle: Path, runtime: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "demo.html"
    export_page(load_bundle(bundle), "small", path, runtime)
    return path


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with chromium(tmp_path / "profile") as running:
        running.window(1280, 900)
        yield running
        assert not running.problems


def test_forty_steps_of_the_shipped_model_take_less_than_two_seconds_and_no_request(
    runtime: Path, tmp_path: Path
) -> None:
    path = tmp_path / "demo.html"
    assert export_page(load_bundle(find_bundle("ups-joint")), "ups-joint", path, runtime, ["burgers1d"]) < 30e6
    with chromium(tmp_path / "profile") as browser:
        browser.window(1280, 900)
        browser.open(path.as_uri())
        browser.wait(READY)
        seconds = []
        for state in (0, 1):  # the first may wait for the compiler of wasm
            browser.run(f"(one => {{ one.value = {state}; one.onchange(); }})(document.getElementById('state'))")
            browser.wait("!document.getElementById('finish').disabled")
            click(browser, "finish")
            browser.wait(f"/40 steps in/.test({SAID})")
            seconds.append(float(shown(browser, "message").split()[3]))
        assert min(seconds) < 2
        file = downloaded(browser, tmp_path, "npz")
        assert [url for url in browser.requests if not url.startswith("blob:null/")] == [path.as_uri()]
        assert browser.run("fetch('https://example.org').then(() => 'sent', () => 'refused')") == "refused"
        assert all("Content Security Policy" in problem for problem in browser.problems)
    same_as_eager(file, ups.Simulator.load("ups-joint"), "burgers1d")


@pytest.mark.parametrize("task", ["advection", "flow", "darcy", "cube"])
def test_every_kind_of_task_gives_what_the_simulator_gives(
    browser: Browser, page: Path, bundle: Path, tmp_path: Path, task: str
) -> None:
    browser.open(f"{page.as_uri()}#{task}")
    browser.wait(READY)
    finish(browser)
    same_as_eager(downloaded(browser, tmp_path, "npz"), ups.Simulator.load(bundle), task)
    lines = downloaded(browser, tmp_path, "csv").read_text().splitlines()
    columns = {"advection": "time,x,u", "darcy": "x,y,a,u", "cube": "time,x,y,z,u"}
    assert lines[0] == columns.get(task, "time,x,y,force,velocity_x,velocity_y,density")
    assert len(lines) == 1 + {"advection": 6 * 16, "cube": 16**3}.get(task, 256)
    # It starts from a random state, which may be unlike the trajectories that it was calibrated on.
    known = ("was not calibrated",) if task == "cube" else ("With a chance of 90 %", "further out than calibrated")
    assert any(words in shown(browser, "error-note") for words in known)


def test_drawing_by_mouse_and_keyboard_starts_a_new_rollout(
    browser: Browser, page: Path, bundle: Path, tmp_path: Path
) -> None:
    browser.open(f"{page.as_uri()}#advection")
    browser.wait(READY)
    browser.run("document.activeElement.blur()")
    browser.key(".", 190)
    browser.wait(f"{STEP} === 1")
    x, y, width, height = browser.run(BOX)
    browser.drag(*((x + width * (0.3 + 0.02 * n), y + height * 0.3) for n in range(15)))
    browser.wait("document.getElementById('state').value === 'drawn'")
    finish(browser)
    arrays = np.load(downloaded(browser, tmp_path, "npz"))
    assert len(set(np.round(arrays["u"][0][5:8], 2))) == 1  # the flat part that was drawn
    same_as_eager(downloaded(browser, tmp_path, "npz"), ups.Simulator.load(bundle), "advection")

    browser.run("document.querySelector('canvas').focus()")
    for name, code in [("ArrowRight", 39), ("ArrowUp", 38), ("ArrowUp", 38)]:
        browser.key(name, code)
    browser.run("document.activeElement.blur()")
    browser.key(" ", 32)
    browser.wait(f"{STEP} === 5 && document.getElementById('play').textContent === 'Play'")
    assert not np.array_equal(np.load(downloaded(browser, tmp_path, "npz"))["u"][0], arrays["u"][0])


@pytest.mark.parametrize("tool", ["raise", "stir"])
def test_a_map_is_painted_and_stirred(browser: Browser, page: Path, bundle: Path, tmp_path: Path, tool: str) -> None:
    browser.open(f"{page.as_uri()}#flow")
    browser.wait(READY)
    before = np.load(downloaded(browser, tmp_path, "npz"))
    click(browser, f"tool-{tool}")
    x, y, width, height = browser.run(BOX)
    browser.drag(*((x + width * (0.3 + 0.02 * n), y + height * 0.4) for n in range(8)))
    finish(browser)
    path = downloaded(browser, tmp_path, "npz")
    after = np.load(path)
    assert not np.array_equal(after["velocity"][0], before["velocity"][0])
    assert np.array_equal(after["density"][0], before["density"][0]) == (tool == "raise")  # stirring moves all
    same_as_eager(path, ups.Simulator.load(bundle), "flow")


def test_a_parameter_outside_of_the_trained_range_is_named_and_the_page_fits_a_phone(
    browser: Browser, page: Path
) -> None:
    browser.open(f"{page.as_uri()}#flow")
    browser.wait(READY)
    browser.run("(box => { box.value = '9'; box.onchange(); })(document.querySelectorAll('input[type=number]')[1])")
    note = "document.getElementById('parameter-note').textContent"
    browser.wait(f"{note}.includes('outside of the trained range, 1 to 2')")
    light = browser.run("getComputedStyle(document.body).backgroundColor")
    for width, dark in ((320, False), (390, True), (1280, True)):
        browser.window(width, 800, dark=dark, phone=width < 400)
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert (browser.run("getComputedStyle(document.body).backgroundColor") != light) is dark


def test_the_page_of_a_server_gives_what_the_server_gives(browser: Browser, tmp_path: Path) -> None:
    bundle, tokens = make_shipped(tmp_path / "shipped"), tmp_path / "tokens"
    tokens.write_text("ann 0123456789abcdef\n")
    tokens.chmod(0o600)
    with serving(bundle, tmp_path / "server", {}, "--tokens", str(tokens)) as server:
        browser.open(f"{server.url}/#flow")
        browser.wait("document.getElementById('token-card')?.hidden === false")
        assert server.request("GET", "/page")[0] == 401
        browser.problems.clear()  # that it was refused
        browser.run("document.getElementById('token').value = '0123456789abcdef'")
        browser.run("document.querySelector('#token-form button').click()")
        browser.wait(READY)
        for task in ("flow", "advection", "darcy"):
            number = ["advection", "flow", "darcy"].index(task)
            browser.run(f"(one => {{ one.value = {number}; one.onchange(); }})(document.getElementById('task'))")
            browser.wait(f"document.querySelectorAll('canvas').length >= 2 && {READY}")
            finish(browser)
            assert "With a chance of 90 %" in shown(browser, "error-note")
            assert ("m s⁻¹" in shown(browser, "error")) == (task == "flow")
            same_as_eager(downloaded(browser, tmp_path, "npz"), ups.Simulator.load(bundle), task)
        assert {url.removeprefix(server.url) for url in browser.requests} == {"/", "/page", "/rollout"}
        assert "0123456789abcdef" not in json.dumps(browser.requests)
