"""`ups.RemoteSimulator`: a simulator behind the URL of `ups serve`, with the interface of `ups.Simulator`.

A short rollout is one request. A long one is a job, whose store is copied chunk by chunk while the job runs. What the
server sends is data: nothing is unpickled, and names of arrays and codecs are checked before they become files.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import re
import shutil
import tempfile
import threading
import time as clock
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from ups.errors import BundleError, BusyError, DataError, JobLostError, LimitError, ServerError, UpsError
from ups.inference.inputs import Part, read_given, suggestion
from ups.inference.query import query_result
from ups.inference.results import NETCDF_SUFFIXES, check_new
from ups.inference.simulator import find_task
from ups.serve.requests import NPZ, read_npz
from ups.serve.results import ABOUT, write_npz
from ups.spec.task import TaskSpec

if TYPE_CHECKING:
    import xarray

# A rollout with more steps or values is a job.
SHORT_STEPS, SHORT_VALUES = 256, 2**21
MOST_BYTES = 2**32  # of a reply
# What reading an answer raises that is not what this server sends.
_MALFORMED = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
POLL_SECONDS = 0.2


class RemoteSimulator:
    """A simulator on a server. token: for a server that asks for one. bundle: name, where the server has several.

    patience: seconds for which a server that is busy or away is asked again, with growing pauses.
    """

    def __init__(self, url: str, token: str = "", bundle: str | None = None, patience: float = 60.0) -> None:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ServerError(f"'{url[:100]}' is not the address of a server", hint="for example http://127.0.0.1:8080")
        self._kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._host, self._port, self._prefix = parts.hostname, parts.port, parts.path.rstrip("/")
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._patience, self._local = patience, threading.local()
        models = self._json("GET", "/models")
        if bundle is None and len(models) == 1:
            bundle = next(iter(models))
        if bundle is None or bundle not in models:
            hint = f"bundle= one of {', '.join(models)}"
            raise BundleError(f"the server has no bundle '{bundle}'{suggestion(str(bundle), [*models])}", hint=hint)
        self._name, model = bundle, models[bundle]
        try:
            specs = [TaskSpec.from_json(task) for task in model["tasks"]]
            grids = model["coordinates"]
            self._grids = {s.name: [np.asarray(axis, np.float64) for axis in grids[s.name]] for s in specs}
            self.hash, self.card = str(model["bundle"]), str(model["card"])
            self.context_frames, self.is_ensemble = int(model["context_frames"]), bool(model["is_ensemble"])
        except (DataError, *_MALFORMED) as error:
            raise ServerError(f"{url} does not describe its bundle", hint="is it a server of ups?") from error
        self.tasks = {spec.name: spec for spec in specs}

    def __repr__(self) -> str:
        return f"RemoteSimulator(tasks={list(self.tasks)}, bundle={self.hash[:12]}, server={self._host}:{self._port})"

    def task(self, name: str | None) -> TaskSpec:
        """The task of that name, or the only one."""
        return find_task(self.tasks, name)

    def step(self, state: Any = None, parameters: Any = None, **options: Any) -> xarray.Dataset:
        """One step from `state` (or the solution of a steady task)."""
        return self.rollout(state, 1, parameters, **options)

    def rollout(
        self,
        state: Any = None,
        steps: int = 1,
        parameters: Any = None,
        *,
        out: str | Path | None = None,
        progress: Callable[[int], None] | None = None,
        **options: Any,
    ) -> xarray.Dataset:
        """As `Simulator.rollout`, but for quantities and reversed_axes. `progress` hears of frames as they arrive.

        Raises JobLostError if the server of a long rollout is gone, with the frames received so far as `partial`.
        """
        body, num_values = self._request(state, steps, parameters, options)
        if out is None and progress is None and steps <= SHORT_STEPS and num_values <= SHORT_VALUES:
            return _decode(self._call("POST", "/rollout", body))
        if out is not None:
            check_new(Path(out))
        every = int(options.get("every", 1))
        with tempfile.TemporaryDirectory(prefix="ups-remote-", dir=Path(out).parent if out else None) as name:
            store = Path(name) / "store"
            for frames in self._follow(body, store):
                if progress is not None:
                    progress(frames * every)
            if out is None:
                return _loaded(store)
            if Path(out).suffix in NETCDF_SUFFIXES:
                _opened(store).to_netcdf(out, engine="h5netcdf")
            else:
                shutil.move(store, out)
        return _opened(Path(out))

    def stream(
        self, state: Any = None, steps: int = 1, parameters: Any = None, **options: Any
    ) -> Iterator[xarray.Dataset]:
        """Yields the frames of a rollout in pieces, as they arrive."""
        body, _ = self._request(state, steps, parameters, options)
        with tempfile.TemporaryDirectory(prefix="ups-remote-") as name:
            store, done = Path(name) / "store", 0
            for frames in self._follow(body, store):
                if frames > done:
                    yield _loaded(store, done, frames)
                done = frames

    def query(
        self, result: Any, points: Any, times: Any = None, *, task: str | None = None, in_time: str | None = None
    ) -> xarray.Dataset:
        """Values of a rollout at points (N, axes) and some of its times, computed here."""
        spec = self.task(task or getattr(result, "attrs", {}).get("task"))
        return query_result(result, points, times, spec, self._grids[spec.name], in_time)

    def _request(self, state: Any, steps: int, parameters: Any, options: dict[str, Any]) -> tuple[bytes, int]:
        """The body, and how many values the result has."""
        spec = self.task(options.pop("task", None))
        inputs = {name: options.pop(name, None) for name in ("static", "coordinates", "dt", "time")}
        given = read_given(spec, self.context_frames, state, parameters=parameters, **inputs)
        known = ("rescale_domain", "every", "members", "seed", "level", "on_doubt")
        if unknown := [name for name in options if name not in known]:
            raise BundleError(f"a server does not take '{unknown[0]}'", hint=f"known: {', '.join(known)}")
        arrays = {name: value for name, value in options.items() if value is not None}
        arrays |= {"bundle": self._name, "task": spec.name, "steps": steps, "time": given.time, "dt": given.dt}
        arrays |= {f"coordinates.{name}": values for name, values in given.coordinates.items()}
        for number, parameter in enumerate(spec.parameters):
            column = given.parameters[:, number]
            arrays[f"parameters.{parameter.name}"] = column if len(column) > 1 else column[0]
        num_values = max(1, steps // int(options.get("every", 1))) * int(options.get("members") or 1)
        for role, part in (("state", given.state), ("static", given.static)):
            if part is not None:
                arrays[role] = _sent(part, self.context_frames if role == "state" else 1)
        num_values *= max(np.size(arrays.get(role, 0)) for role in ("state", "static")) * len(given.parameters)
        if spec.steady:
            del arrays["dt"]
        return write_npz({name: np.asarray(v) for name, v in arrays.items() if v is not None}), num_values

    def _follow(self, body: bytes, store: Path) -> Iterator[int]:
        """Copies the store of a new job while it runs; yields the number of frames that are there."""
        job = self._json("POST", "/jobs", body)
        address, done = f"/jobs/{job.get('id')}", 0
        try:
            arrays = self._metadata(address, store)
            while True:
                job = self._json("GET", address)
                ended, frames = job["status"] != "running", int(job["frames_done"])
                if frames > done or ended:
                    self._copy(address, store, arrays, done, frames)
                    done = frames
                if ended:
                    break
                yield done
                clock.sleep(POLL_SECONDS)
            self._metadata(address, store)
        except (ServerError, *_MALFORMED) as error:
            reason = error.message if isinstance(error, ServerError) else f"{self._host} sent something else than a job"
            hint = "the frames are in `partial` of this error"
            lost = JobLostError(f"the job is lost after {done} frames: {reason}", hint=hint)
            if done:
                lost.partial = _loaded(store, 0, done)
            raise lost from error
        finally:
            with contextlib.suppress(OSError, http.client.HTTPException):  # else it is removed after an hour
                self._once("DELETE", address, None)
        if job["status"] != "done":
            raise ServerError(f"the job was {job['status']}: {job['error']}")
        yield done

    def _metadata(self, address: str, store: Path) -> dict[str, Any]:
        """Writes the metadata of a store; returns those of its arrays."""
        document = self._json("GET", f"{address}/store/zarr.json")
        arrays: dict[str, Any] = document["consolidated_metadata"]["metadata"]
        for name, array in arrays.items():
            codecs = {codec["name"] for codec in array["codecs"]}
            if not re.fullmatch(r"\w+", name) or codecs - {"bytes", "vlen-utf8"}:
                raise ServerError(f"array '{name[:40]}' of the job's store is none of ours")
        for name, part in {"": document, **arrays}.items():
            (store / name).mkdir(parents=True, exist_ok=True)
            (store / name / "zarr.json").write_text(json.dumps(part))
        return arrays

    def _copy(self, address: str, store: Path, arrays: dict[str, Any], done: int, frames: int) -> None:
        """Copies chunks of frames that are new, and all arrays of one chunk, which change while the job runs."""
        for name, array in arrays.items():
            sizes, dims = array["chunk_grid"]["configuration"]["chunk_shape"], array["dimension_names"]
            numbers = range(1)
            if array["shape"] != sizes:
                at_once = sizes[dims.index("time")]
                numbers = range(done // at_once, -(-frames // at_once))
            for number in numbers:
                key = "/".join(["c", *(str(number if dim == "time" else 0) for dim in dims)])
                path = store / name / key
                path.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(_Missing):  # a field of one chunk that is not computed yet
                    path.write_bytes(self._call("GET", f"{address}/store/{name}/{key}"))

    def _json(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        try:
            return dict(json.loads(self._call(method, path, body)))
        except (TypeError, ValueError, RecursionError) as error:
            raise ServerError(f"{self._host} does not answer as a server of ups") from error

    def _call(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """The body of the answer; a server that is busy or away is asked again. Raises UpsError."""
        until, pause = clock.monotonic() + self._patience, 0.1
        while True:
            try:
                status, headers, content = self._once(method, path, body)
                if status < 300:
                    return content
                if status not in (429, 502, 503):
                    raise _refusal(status, content)
                wait = headers.get("Retry-After", "")
                pause = max(pause, min(30.0, float(wait))) if wait.isdigit() else pause
                if clock.monotonic() + pause > until:
                    raise _refusal(status, content)
            except (OSError, http.client.HTTPException) as error:
                self._local.connection = None
                if clock.monotonic() + pause > until:
                    message = f"{self._host}:{self._port} cannot be reached: {error or type(error).__name__}"
                    raise ServerError(message, hint="start it: ups serve BUNDLE") from error
            clock.sleep(pause * random.uniform(0.5, 1.0))
            pause = min(2 * pause, 5.0)

    def _once(self, method: str, path: str, body: bytes | None) -> tuple[int, Any, bytes]:
        connection = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = self._kind(self._host, self._port, timeout=max(5.0, self._patience))
        headers = self._headers | {"Accept": NPZ} | ({"Content-Type": NPZ} if body else {})
        connection.request(method, self._prefix + path, body, headers)
        response = connection.getresponse()
        content = response.read(MOST_BYTES)
        return response.status, response.headers, content


class _Missing(ServerError):
    """404."""


_KINDS: dict[int, type[UpsError]] = {404: _Missing, 413: LimitError, 422: BundleError, 429: BusyError, 503: BusyError}


def _refusal(status: int, content: bytes) -> UpsError:
    try:
        document = json.loads(content)
        message, hint = str(document["message"])[:1000], str(document["hint"])[:1000]
    except (ValueError, KeyError, TypeError):
        message, hint = f"the server answered with status {status}", ""
    return _KINDS.get(status, ServerError)(message, hint=hint)


def _sent(part: Part, num_frames: int) -> Any:
    """(B, T, C, *S) as a request has it: without frames if there is one, and without samples if none were given."""
    values, batched = part
    values = values if num_frames > 1 else values[:, 0]
    return values if batched else values[0]


def _decode(content: bytes) -> xarray.Dataset:
    import xarray

    try:
        arrays = read_npz(content, MOST_BYTES)
        about = json.loads(arrays[ABOUT])
        for part in ("coords", "data_vars"):
            for name, label in about[part].items():
                label["data"] = arrays[name]
        result: xarray.Dataset = xarray.Dataset.from_dict(about)
    except (BundleError, *_MALFORMED) as error:
        raise ServerError("the server sent something else than a result") from error
    return result


def _loaded(store: Path, first: int = 0, end: int | None = None) -> xarray.Dataset:
    """The frames from `first` to before `end`."""
    try:
        data = _opened(store)
        return (data.isel(time=slice(first, end)) if "time" in data.dims else data).load()
    except _MALFORMED as error:
        raise ServerError("the server sent something else than a result") from error


def _opened(store: Path) -> xarray.Dataset:
    import xarray

    if store.suffix in NETCDF_SUFFIXES:
        return xarray.open_dataset(store, engine="h5netcdf")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # texts are not in the specification yet
        result: xarray.Dataset = xarray.open_zarr(store, chunks=None, consolidated=True)
    return result
