"""What a request may hold: its schema, its size, and the two formats of a body (JSON, NumPy's npz).

A body is hostile until it was checked: its size is known before it is read, what an archive would unpack to before it
is unpacked, and nothing is unpickled.
"""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ups.errors import BundleError, LimitError

JSON, NPZ, NETCDF = "application/json", "application/x-npz", "application/x-netcdf"


@dataclass(frozen=True)
class Limits:
    """What a server allows. Bytes of frames count in float32."""

    samples: int = 64  # of a request, and of a batch
    steps: int = 100_000
    body_bytes: int = 64 * 2**20
    json_bytes: int = 8 * 2**20  # of a body; its numbers take many times as much memory
    reply_bytes: int = 64 * 2**20  # of a rollout that is no job; an eighth of it as JSON
    job_bytes: int = 4 * 2**30  # on disk, of all jobs
    memory_bytes: int = 2**30  # of all bodies and replies
    waiting: int = 64  # rollouts that are not finished
    waiting_of_client: int = 16
    jobs: int = 256  # that are kept
    connections: int = 512
    body_seconds: float = 30.0  # until a request is there, and for a client to take a reply
    reply_seconds: float = 300.0
    keep_seconds: float = 3600.0  # of a job after its end
    drain_seconds: float = 30.0


class RolloutRequest(BaseModel):
    """A rollout. Arrays are nested lists, or those of an npz body, where names like `parameters.nu` are objects."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    bundle: str | None = Field(None, max_length=200, description="Name of a bundle, where the server has several.")
    task: str | None = Field(None, max_length=200, description="Name of a task, where the bundle has several.")
    state: Any = Field(None, description="(channels, *points) or (samples, channels, *points), or by field.")
    static: Any = Field(None, description="Given fields, as state.")
    parameters: dict[str, Any] | None = Field(None, description="One number each, or one for each sample.")
    coordinates: dict[str, Any] | None = Field(None, description="Axis to coordinates; default the trained domain.")
    steps: int = Field(1, ge=1)
    every: int = Field(1, ge=1, description="Keep every n-th frame.")
    members: int | None = Field(None, ge=1, description="Of an ensemble.")
    seed: int = Field(0, ge=0, lt=2**63)
    level: float | None = Field(None, description="Chance of error bars to hold; default 0.9 where that was measured.")
    on_doubt: Literal["warn", "stop"] = "warn"
    rescale_domain: bool = False
    dt: float | None = None
    time: float | None = None

    def arguments(self, limits: Limits, num_axes: int) -> dict[str, Any]:
        """For `Simulator.rollout`. Raises LimitError."""
        given = {name: value for name, value in self if name != "bundle"}  # without a copy of its lists
        check_limit("steps", self.steps, limits.steps)
        check_limit("members", self.members or 1, limits.samples)
        for name, value in (self.parameters or {}).items():
            check_limit(f"values of parameter {name[:40]!r}", np.size(_array(value)), limits.samples)
        for role in ("state", "static"):
            parts = given[role] if isinstance(given[role], dict) else {role: given[role]}
            parts = {name: None if value is None else _array(value) for name, value in parts.items()}
            given[role] = parts if isinstance(given[role], dict) else parts[role]
            # Each axis may be resampled to four times as many points.
            size = sum(array.size for array in parts.values() if array is not None) * 4**num_axes
            check_limit(f"values of {role} on the training grid", size, limits.memory_bytes // 8)
        return given


def _array(value: Any) -> Any:
    try:
        return np.asarray(value)
    except ValueError as error:
        raise BundleError(f"a regular array is expected: {str(error)[:100]}") from error


def check_limit(what: str, value: float, most: float) -> None:
    """Raises LimitError."""
    if value > most:
        raise LimitError(f"{what}: {value:,} are more than the {most:,} that this server allows")


def read_request(body: bytes, content_type: str, limits: Limits) -> RolloutRequest:
    """The request in a body. Raises BundleError, for one that is too large LimitError."""
    try:
        if content_type == NPZ:
            return RolloutRequest.model_validate(_nested(read_npz(body, limits.body_bytes)))
        check_limit("bytes of a JSON body", len(body), limits.json_bytes)
        return RolloutRequest.model_validate(json.loads(body))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part)[:40] for part in first["loc"])
        raise BundleError(f"{where or 'the request'}: {first['msg']}"[:300]) from error
    except (ValueError, RecursionError) as error:
        raise BundleError(f"the body is not valid JSON: {str(error)[:100]}") from error


def read_npz(body: bytes, most: int) -> dict[str, Any]:
    """The arrays of an npz file by name, at most so many bytes. Raises BundleError."""
    arrays: dict[str, Any] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(body)) as archive:
            entries = archive.infolist()
            check_limit("arrays of a body", len(entries), 1000)
            check_limit("bytes of an unpacked body", sum(entry.file_size for entry in entries), most)
            for entry in entries:
                arrays[entry.filename.removesuffix(".npy")] = _read_npy(archive.read(entry))
    except (ValueError, zipfile.BadZipFile, OSError, EOFError, NotImplementedError, RuntimeError, zlib.error) as error:
        raise BundleError(f"the body is not a valid npz file: {str(error)[:100]}") from error
    return arrays


def _read_npy(content: bytes) -> Any:
    """An array whose header claims no more than there is, or its only value."""
    stream = io.BytesIO(content)
    version = np.lib.format.read_magic(stream)
    read_header = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read_header(stream)
    if dtype.hasobject or dtype.kind not in "biufU":
        raise ValueError(f"arrays of {dtype} are not taken")
    rest = content[stream.tell() :]
    if math.prod(shape) * dtype.itemsize != len(rest) or not dtype.itemsize:
        raise ValueError(f"shape {shape} of {dtype} does not fit {len(rest)} bytes"[:100])
    array = np.frombuffer(rest, dtype).reshape(shape, order="F" if fortran else "C")
    return array if shape else array.item()


def _nested(flat: dict[str, Any]) -> dict[str, Any]:
    """'parameters.nu' -> {'parameters': {'nu': ...}}."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        head, dot, tail = name.partition(".")
        if not dot:
            tree[head] = value
        elif isinstance(branch := tree.setdefault(head, {}), dict):
            branch[tail] = value
        else:
            raise ValueError(f"'{head}' is an array and an object")
    return tree
