"""What devices can do: the table of data sheets (devices.json), and this machine's CPU as its yardstick finds it.

A data sheet says what a device can do at most. What eager torch gets of it is assumed here, in one place, and was
never measured on a GPU: every time that is made from it is an estimate.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources

from ups.errors import ConfigError
from ups.plan.operations import CONVOLUTION, DEPTHWISE, FOURIER, MOVE, PRODUCT, Operation

# Assumed of a GPU: parts of the peaks that eager kernels reach, and seconds to launch one from Python.
_OF_PEAK = {PRODUCT: 0.5, CONVOLUTION: 0.35, DEPTHWISE: 0.05, FOURIER: 0.1}
_OF_BANDWIDTH = 0.7
_LAUNCH_SECONDS = 8e-6
_OF_MEMORY = 0.92  # the rest: context, kernels, what the caching allocator cannot hand out
# Of memory that no GPU manages, and of what is free at the moment: the rest is what an allocator cannot hand out.
OF_FREE_MEMORY = 0.9
_OF_LINK = 0.7  # inside a host and between hosts
NEAR_BYTES = 2 << 20


@dataclass(frozen=True)
class Device:
    """Rates: FLOP/s by kind of operation, bytes/s; memory in bytes; `queues`: launches run ahead of the device."""

    name: str
    rates: Mapping[str, float]
    bandwidth: float
    launch_seconds: float
    memory_bytes: int
    link_bandwidth: float
    source: str
    queues: bool = True
    near_bandwidth: float = 0.0  # of operations whose bytes stay in the caches of a CPU; 0: as `bandwidth`
    network_bandwidth: float = 0.0  # of a host of GPUs; all ranks on a CPU are on one host

    @property
    def usable_bytes(self) -> int:
        return int(self.memory_bytes * (_OF_MEMORY if self.queues else OF_FREE_MEMORY))

    def seconds(self, operations: Iterable[Operation]) -> float:
        """How long these operations take: each as long as its arithmetic or its bytes, whichever is longer."""
        work, launches = 0.0, 0.0
        for one in operations:
            arithmetic = one.flops / self.rates[one.kind] if one.kind != MOVE else 0.0
            near = self.near_bandwidth if one.num_bytes <= NEAR_BYTES else 0.0
            work += max(arithmetic, one.num_bytes / (near or self.bandwidth))
            launches += self.launch_seconds
        return max(work, launches) if self.queues else work + launches


def known_devices() -> dict[str, dict[str, object]]:
    """The rows of devices.json by name."""
    text = resources.files("ups.plan").joinpath("devices.json").read_text()
    rows: dict[str, dict[str, object]] = json.loads(text)["devices"]
    return rows


def gpu(name: str, precision: str, network_gbit: float | None = None) -> Device:
    """A device of the table in one precision; network_gbit: of a host, if it is not that of the table.

    Raises ConfigError that lists the known devices.
    """
    rows = known_devices()
    key = name.lower().replace("_", "-").replace(" ", "-")
    if key not in rows:
        close = difflib.get_close_matches(key, rows, n=1, cutoff=0.5)
        meant = f"did you mean {close[0]}? " if close else ""
        raise ConfigError(f"no GPU is called '{name[:40]}'", hint=f"{meant}known: {', '.join(sorted(rows))}")
    row = rows[key]
    peak = row[precision]
    if peak is None:
        raise ConfigError(
            f"{key} has no {precision} arithmetic ({row['source']})", hint="--set engine.precision=float32"
        )
    plain = min(_number(row["float32"]), _number(peak)) * 1e12
    rates = {
        kind: part * (_number(peak) * 1e12 if kind in (PRODUCT, CONVOLUTION) else plain)
        for kind, part in _OF_PEAK.items()
    }
    return Device(
        key,
        rates,
        _number(row["bandwidth"]) * 1e9 * _OF_BANDWIDTH,
        _LAUNCH_SECONDS,
        int(_number(row["memory"]) * 1e9),
        _number(row["link"]) * 1e9 * _OF_LINK,
        str(row["source"]),
        network_bandwidth=_number(row["network"] if network_gbit is None else network_gbit) * 1e9 / 8 * _OF_LINK,
    )


def this_gpu() -> str | None:
    """The row of this machine's first GPU; None if it has none. Raises ConfigError for a GPU that is in no row."""
    import torch

    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name(0)
    found = row_of(name)
    if found is None:
        raise ConfigError(
            f"the table of devices has no {name}",
            hint=f"name the nearest one with --gpu: {', '.join(sorted(known_devices()))}",
        )
    return found


def row_of(device_name: str) -> str | None:
    """The row of the table that a device is, by the name that its driver gives it; None if it is none of them.

    All words of a row's name must be in that name; of several rows the one that says most.
    """
    given = device_name.lower().replace(" ", "").replace("-", "")
    fitting = [key for key in known_devices() if all(word in given for word in key.split("-"))]
    return max(fitting, key=len, default=None)


def _number(value: object) -> float:
    return float(value)  # type: ignore[arg-type]
