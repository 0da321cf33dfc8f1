"""`RemoteSimulator` against servers that lie: what is no answer becomes an error of this package, and no file."""

from __future__ import annotations

import copy
import http.server
import json
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ups
from tests.support.small_bundle import ADVECTION, grid
from ups.errors import JobLostError, ServerError

(X,) = grid(ADVECTION)
MODEL = {
    "bundle": "a" * 64,
    "context_frames": 1,
    "is_ensemble": False,
    "card": "# card",
    "tasks": [ADVECTION.to_json()],
}
MODEL |= {"coordinates": {"advection": [X.tolist()]}}
ARRAY: dict[str, Any] = {
    "zarr_format": 3, "node_type": "array", "shape": [2, len(X)], "data_type": "float32", "fill_value": "NaN",
    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, len(X)]}},
    "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
    "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}], "attributes": {},
    "dimension_names": ["time", "x"],
}  # fmt: skip


def answers() -> dict[str, Any]:
    """What a sound server says: path -> document, or bytes."""
    consolidated = {"kind": "inline", "must_understand": False, "metadata": {"u": copy.deepcopy(ARRAY)}}
    group = {"zarr_format": 3, "node_type": "group", "attributes": {}, "consolidated_metadata": consolidated}
    status = {"id": "j", "status": "done", "error": "", "frames_done": 2}
    chunk = np.ones(len(X), "<f4").tobytes()
    return {
        "/models": {"m": copy.deepcopy(MODEL)}, "/jobs": status | {"status": "running"}, "/jobs/j": status,
        "/jobs/j/store/zarr.json": group, "/jobs/j/store/u/c/0/0": chunk, "/jobs/j/store/u/c/1/0": chunk,
    }  # fmt: skip


@pytest.fixture
def lying() -> Iterator[tuple[str, dict[str, Any]]]:
    """The address of a server, and what it answers."""
    said = answers()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            found = said.get(self.path)
            content = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_DELETE = do_GET

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", said
    server.shutdown()
    server.server_close()


def changed(*keys: Any, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(said: dict[str, Any]) -> None:
        part = said
        for key in keys[:-1]:
            part = part[key]
        if to is None:
            del part[keys[-1]]
        else:
            part[keys[-1]] = to

    return change


STORE = ("/jobs/j/store/zarr.json", "consolidated_metadata", "metadata")
LIES = {
    "no tasks": changed("/models", "m", "tasks", to=None),
    "tasks are a number": changed("/models", "m", "tasks", to=3),
    "models are a list": changed("/models", to=[1, 2]),
    "a model is a text": changed("/models", "m", to="model"),
    "not JSON": changed("/models", to=b"<html>"),
    "deep JSON": changed("/models", to=b"[" * 100_000),
    "no job": changed("/jobs", to={}),
    "job is a list": changed("/jobs", to=["x"]),
    "status is a list": changed("/jobs/j", to=[[1, 2]]),
    "frames are a text": changed("/jobs/j", "frames_done", to="many"),
    "no metadata": changed("/jobs/j/store/zarr.json", to={"zarr_format": 3}),
    "metadata are a list": changed(*STORE, to=[1]),
    "a name that leads out": changed(*STORE, "../../x", to=ARRAY),
    "an absolute name": changed(*STORE, "/tmp/x", to=ARRAY),
    "a codec that runs code": changed(*STORE, "u", "codecs", to=[{"name": "numcodecs.pickle"}]),
    "codecs are numbers": changed(*STORE, "u", "codecs", to=[1]),
    "chunks of nothing": changed(*STORE, "u", "chunk_grid", "configuration", "chunk_shape", to=[0, 16]),
    "no time": changed(*STORE, "u", "dimension_names", to=["y", "x"]),
    "names lead out": changed(*STORE, "u", "dimension_names", to=["..", "x"]),
    "an unknown type": changed(*STORE, "u", "data_type", to="object"),
    "a chunk cut short": changed("/jobs/j/store/u/c/0/0", to=b"123"),
}  # fmt: skip


def test_a_sound_server_is_believed(lying: tuple[str, dict[str, Any]]) -> None:
    result = ups.RemoteSimulator(lying[0], patience=1).rollout(
        np.ones((1, 16)), 2, {"beta": 1.0}, progress=lambda _: None
    )
    assert result["u"].shape == (2, 16)


@pytest.mark.parametrize("lie", LIES)
def test_a_server_that_lies_is_an_error(
    lying: tuple[str, dict[str, Any]], lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    url, said = lying
    LIES[lie](said)
    with pytest.raises((ServerError, JobLostError)):
        ups.RemoteSimulator(url, patience=0.1).rollout(np.ones((1, 16)), 2, {"beta": 1.0}, progress=lambda _: None)
    assert list(tmp_path.rglob("*")) == []
