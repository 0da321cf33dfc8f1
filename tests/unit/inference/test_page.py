"""The page of a simulator without a browser: what it holds, what it allows itself, and which runtime it takes."""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.calibrated_bundle import make_shipped
from tests.support.small_bundle import make_bundle
from ups.errors import BundleError, FetchUnavailableError
from ups.inference import page
from ups.inference.bundle import load_bundle

FILES = {"dist/ort.wasm.bundle.min.mjs": b"export {}", "dist/ort-wasm-simd-threaded.wasm": b"\0asm"}


def package(path: Path, files: dict[str, bytes] = FILES) -> Path:
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            entry = tarfile.TarInfo(f"package/{name}")
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return path


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Small files stand for the runtime, and nothing is cached yet."""
    names = zip(page.RUNTIME_FILES, FILES.items(), strict=True)
    pins = {name: (file, hashlib.sha256(content).hexdigest()) for name, (file, content) in names}
    monkeypatch.setattr(page, "RUNTIME_FILES", pins)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("pinned")
def test_the_runtime_is_taken_from_a_package_of_npm(tmp_path: Path) -> None:
    wanted = dict(zip(("runtime", "wasm"), FILES.values(), strict=True))
    assert page.read_runtime(package(tmp_path / "any.tgz")) == wanted
    for name, content in FILES.items():
        path = tmp_path / "node_modules/onnxruntime-web" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    assert page.read_runtime() == wanted


@pytest.mark.usefixtures("pinned")
@pytest.mark.parametrize("change", ["other", "less", "text", "none"])
def test_another_runtime_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.tgz"
    if change == "other":
        package(path, FILES | {"dist/ort.wasm.bundle.min.mjs": b"export {0}"})
    elif change == "less":
        package(path, {"dist/ort.wasm.bundle.min.mjs": b"export {}"})
    elif change == "text":
        path.write_text("<html>not found</html>")
    with pytest.raises(BundleError, match=r"is not the package onnxruntime-web-1\.30\.0 of npm") as caught:
        page.read_runtime(path)
    assert "npm pack onnxruntime-web@1.30.0" in caught.value.hint


@pytest.mark.usefixtures("pinned")
def test_without_a_package_npm_is_asked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs, asked = tmp_path / "bin", tmp_path / "asked"
    programs.mkdir()
    npm, server = programs / "npm", package(tmp_path / "server.tgz")
    npm.write_text(f'#!/bin/sh\necho "$1 $2" >> {asked}\ncp {server} "$5/onnxruntime-web-1.30.0.tgz"\n')
    npm.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    assert page.read_runtime() == page.read_runtime()
    assert asked.read_text() == "pack onnxruntime-web@1.30.0\n"
    npm.write_text("#!/bin/sh\necho no network >&2\nexit 1\n")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    with pytest.raises(FetchUnavailableError, match="no network") as caught:
        page.read_runtime()
    assert "--runtime" in caught.value.hint
    npm.unlink()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(FetchUnavailableError, match="npm"):
        page.read_runtime()


def test_the_page_allows_its_own_script_by_hash_and_no_request() -> None:
    html = page.page_html("a <b> & c", {"document": b"{}"})
    script, style = (re.search(rf"<{name}[^>]*>(.*?)</{name}>", source, re.S) for name, source in
                     (("script", html[html.index('type="module"') - 8 :]), ("style", html)))  # fmt: skip
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert script is not None
    assert style is not None
    assert policy is not None
    for part in (script[1], style[1]):
        assert f"'sha256-{base64.b64encode(hashlib.sha256(part.encode()).digest()).decode()}'" in policy[1]
    assert "default-src 'none'" in policy[1]
    assert "connect-src 'none'" in policy[1]
    assert "unsafe-inline" not in policy[1]
    assert "<title>a &lt;b> &amp; c</title>" in html
    assert not re.findall(r"""\s(?:src|href)=|url\(|@import|\son\w+=["']|\sstyle=["']""", html)
    on_server = page.page_html("Simulator", {})
    assert "connect-src 'self'" in on_server
    assert "wasm-unsafe-eval" not in on_server.split("<style>")[0]
    assert 'type="text/plain"' not in on_server


def test_blobs_are_compressed_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    html = page.page_html("a", {"document": b"x" * 1000, "graph flow": bytes(range(256))})
    found = dict(re.findall(r'<script type="text/plain" id="([^"]+)">([^<]*)</script>', html))
    assert gzip.decompress(base64.b64decode(found["graph flow"])) == bytes(range(256))
    assert len(found["document"]) < 100
    assert html == page.page_html("a", {"document": b"x" * 1000, "graph flow": bytes(range(256))})


def unpacked(text: str, *shape: int) -> Any:
    return np.frombuffer(base64.b64decode(text), "<f4").reshape(shape)


def test_the_document_holds_grids_ranges_calibration_and_test_states(tmp_path: Path) -> None:
    bundle = load_bundle(make_shipped(tmp_path / "shipped"))
    document = json.loads(json.dumps(page.page_document(bundle), allow_nan=False))
    assert document["bundle"] == bundle.hash
    advection, flow, darcy = (document["tasks"][name] for name in ("advection", "flow", "darcy"))
    assert advection["states"][0]["label"] == "test 1"
    assert unpacked(advection["states"][0]["state"], 1, 1, 16).any()
    assert unpacked(advection["states"][0]["truth"], 5, 1, 16).any()
    assert unpacked(flow["states"][0]["state"], 1, 3, 16, 16).any()
    assert "truth" not in flow["states"][0]
    assert unpacked(darcy["states"][0]["static"], 1, 16, 16).any()
    assert flow["calibration"]["levels"]["0.9"]["error"]
    assert set(flow["states"][0]["parameters"]) == {"nu", "rho"}


def test_a_bundle_without_calibration_and_states_starts_from_smooth_random_ones(tmp_path: Path) -> None:
    document = page.page_document(load_bundle(make_bundle(tmp_path / "b", context_frames=2)), ["flow"])
    assert list(document["tasks"]) == ["flow"]
    flow = document["tasks"]["flow"]
    assert flow["calibration"] is None
    assert [state["label"] for state in flow["states"]] == ["random 1", "random 2", "random 3"]
    assert unpacked(flow["states"][2]["state"], 2, 3, 16, 16).any()
