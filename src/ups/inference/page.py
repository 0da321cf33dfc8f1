"""A simulator as a web page: one HTML file with exported steps and onnxruntime-web, or the same page for a server.

The page (`templates/page.html`) is one plain source. It gets a document (`page_document`: tasks, grids, ranges,
calibration, states to start from), and in a file also graphs, weights and the runtime, compressed. Its content security
policy allows its own script by hash, and no request; on a server requests to that server only.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from ups import __version__
from ups.config.schema import TaskConfig
from ups.errors import BundleError, FetchUnavailableError
from ups.inference.bundle import Bundle
from ups.inference.export import (
    SUFFIXES,
    WEIGHTS_NAME,
    GraphStep,
    describe_task,
    export,
    export_path,
    exported_file,
    first_batch,
    typical_batch,
)
from ups.inference.stored_scores import bundle_warnings
from ups.record.files import machine_errors, write_file_atomically
from ups.record.run_dir import cache_directory, states_beside
from ups.spec.task import TaskSpec

RUNTIME = "onnxruntime-web-1.30.0"
NPM_PACK = ("npm", "pack", RUNTIME.replace("web-", "web@"))
# The plain wasm build, which needs no thread and no GPU: name in the page -> file in the package, its SHA-256.
RUNTIME_FILES = {
    "runtime": (
        "dist/ort.wasm.bundle.min.mjs",
        "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    ),
    "wasm": (
        "dist/ort-wasm-simd-threaded.wasm",
        "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
    ),
}
MAX_FILE_BYTES, DOWNLOAD_SECONDS = 64 * 2**20, 120.0
NUM_STATES = 3


def export_page(
    bundle: Bundle,
    name: str,
    path: Path,
    runtime: Path | None = None,
    tasks: Sequence[str] | None = None,
    progress: Callable[[str, float], None] = lambda task, difference: None,
) -> int:
    """Write a page; its size in bytes.

    Steps are those that `ups export onnx` wrote beside the bundle; where one is missing, they are exported for this
    page. runtime: the package of onnxruntime-web (.tgz or a directory). progress: as in `export`.
    """
    blobs = read_runtime(runtime)
    chosen = [task for task in bundle.info.tasks if tasks is None or task.name in tasks]
    with tempfile.TemporaryDirectory(prefix="ups-page-") as temporary:
        directory = export_path(bundle.path, "onnx")
        if not chosen or not all(exported_file(directory, bundle, task.name) for task in chosen):
            directory = export(bundle, Path(temporary) / "onnx", "onnx", tasks, progress)
        blobs["weights"] = (directory / WEIGHTS_NAME).read_bytes()
        for task in chosen:
            blobs[f"graph {task.name}"] = (directory / f"{task.name}{SUFFIXES['onnx']}").read_bytes()
    document = {"models": {name: page_document(bundle, tasks)}}
    blobs["document"] = json.dumps(document, allow_nan=False).encode()
    content = page_html(f"{name}: simulator", blobs).encode()
    with machine_errors(f"cannot write {path}"):
        write_file_atomically(path, content)
    return len(content)


def page_document(bundle: Bundle, tasks: Sequence[str] | None = None) -> dict[str, Any]:
    """What the page knows about a bundle."""
    described = {}
    for task in bundle.info.tasks:
        if tasks is None or task.name in tasks:
            inputs = (step := GraphStep(bundle, task)).inputs(typical_batch(bundle, task, 1), None)
            described[task.name] = describe_task(bundle, step, inputs) | {
                "divergence": {name: _finite(getattr(step.limits, name).tolist()) for name in ("mean", "rms", "peak")},
                "states": _states(bundle, task),
            }
    warned = bundle_warnings(bundle.info.scores, bundle.info.provenance)
    return {"bundle": bundle.hash, "written_by": __version__, "warnings": warned, "tasks": described}


def page_html(title: str, blobs: Mapping[str, bytes]) -> str:
    """The page; without blobs it asks the server that it came from."""
    page = _source().replace("TITLE", title.replace("&", "&amp;").replace("<", "&lt;"), 1)
    texts = {name: base64.b64encode(gzip.compress(blob, 9, mtime=0)).decode() for name, blob in blobs.items()}
    packed = (f'<script type="text/plain" id="{name}">{text}</script>' for name, text in texts.items())
    script, style = (_hash(page, element) for element in ("script", "style"))
    runs, asks = ("blob: 'wasm-unsafe-eval'", "'none'") if blobs else ("", "'self'")
    policy = f"default-src 'none'; script-src {script} {runs}; style-src {style}; connect-src {asks}; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    return page.replace("POLICY", policy, 1).replace("<!-- BLOBS -->", "\n".join(packed), 1)


def read_runtime(given: Path | None = None) -> dict[str, bytes]:
    """The files of onnxruntime-web, by their name in the page.

    given: the package as npm gives it, packed or not. Without one that of the working directory is taken, or npm is
    asked for it, once. Raises BundleError for other files, and FetchUnavailableError.
    """
    beside = (Path(f"{RUNTIME}.tgz"), Path("node_modules/onnxruntime-web"))
    path = given or next((one for one in beside if one.exists()), None) or _from_npm()
    with machine_errors(f"cannot read {path}"):
        try:
            contents = _package_files(path)
        except (KeyError, tarfile.TarError, EOFError, FileNotFoundError) as error:
            raise _wrong_runtime(path) from error
    for name, (_, digest) in RUNTIME_FILES.items():
        if hashlib.sha256(contents[name]).hexdigest() != digest:
            raise _wrong_runtime(path)
    return contents


def _package_files(path: Path) -> dict[str, bytes]:
    if path.is_dir():
        return {name: (path / file).read_bytes() for name, (file, _) in RUNTIME_FILES.items()}
    contents = {}
    with tarfile.open(path, "r:gz") as archive:
        for name, (file, _) in RUNTIME_FILES.items():
            member = archive.extractfile(f"package/{file}")
            contents[name] = b"" if member is None else member.read(MAX_FILE_BYTES)
    return contents


def _wrong_runtime(path: Path) -> BundleError:
    return BundleError(f"{path} is not the package {RUNTIME} of npm, or it is damaged", hint=" ".join(NPM_PACK))


def _from_npm() -> Path:
    """The package in the user's cache."""
    path = (cache_directory() or Path(tempfile.gettempdir(), "ups")) / f"{RUNTIME}.tgz"
    if not path.exists():
        with machine_errors(f"cannot write {path.parent}"):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # What is cut off must not stand under the final name.
            with tempfile.TemporaryDirectory(dir=path.parent) as temporary:
                command = [*NPM_PACK, "--silent", "--pack-destination", temporary]
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
                os.replace(Path(temporary, path.name), path)
        except (OSError, subprocess.SubprocessError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[:1]
            raise FetchUnavailableError(
                f"npm gives no {RUNTIME}: {''.join(said)[:500]}",
                hint=f"run `{' '.join(NPM_PACK)}` where npm and a network are, and name the file: --runtime",
            ) from error
    return path


def _states(bundle: Bundle, task: TaskSpec) -> list[dict[str, Any]]:
    """States to start from: test states that came with the bundle, in 1D with their truth, else smooth random ones."""
    batch, store = first_batch(bundle, task, NUM_STATES), states_beside(bundle.path, task.name)
    names, states = [p.name for p in task.parameters], []
    for number in range(batch.num_samples):
        parameters = dict(zip(names, batch.parameters[number].tolist(), strict=True))
        state = {"label": f"{'random' if store is None else 'test'} {number + 1}", "parameters": parameters}
        states.append(state | {"state": _packed(batch.state[number]), "static": _packed(batch.static[number])})
    if store is not None and task.num_spatial_dims == 1 and not task.steady:
        from ups.data.open import open_task  # a simulator loads without readers

        reader = open_task(TaskConfig(name=task.name, path=str(store)))
        for number, state in enumerate(states):
            frames = reader.read("test", number, 0, reader.frames_in("test", number)).state
            state["truth"] = _packed(frames[bundle.info.context_frames :])
        reader.close()
    return states


def _packed(values: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(values, "<f4").tobytes()).decode()


def _finite(values: list[float]) -> list[float | None]:
    return [value if np.isfinite(value) else None for value in values]


@cache
def _source() -> str:
    return (Path(__file__).parent / "templates" / "page.html").read_text(encoding="utf-8")


def _hash(page: str, element: str) -> str:
    """The one inline script, or style, as a content security policy names it."""
    content = re.search(rf"<{element}[^>]*>(.*?)</{element}>", page, re.DOTALL)
    assert content is not None
    return f"'sha256-{base64.b64encode(hashlib.sha256(content[1].encode()).digest()).decode()}'"
