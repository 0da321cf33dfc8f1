"""Summary statistics of a data set, taken while it is written: what makes it the same data on another machine.

Solver bits differ between processors and library versions, so two copies of a data set are the same if generator,
version and request agree and the statistics here agree within a tolerance. Byte hashes are kept as information.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from ups.solvers.problem import Solution
from ups.spec.moments import Moments, by_channel
from ups.spec.task import TaskSpec

TOLERANCE = 1e-3


class Summary:
    """Mean, standard deviation, range and root mean square change per frame of each channel of one split."""

    def __init__(self, spec: TaskSpec) -> None:
        self._spec = spec
        self._moments: dict[str, Moments] = {}
        self._hashes = {role: hashlib.sha256() for role in ("state", "static", "target", "parameters")}

    def add(self, solution: Solution) -> None:
        """Take in the trajectories of a chunk, in the order of the store."""
        for role, array in solution.arrays().items():
            if not array.size:
                continue
            self._hashes[role].update(np.ascontiguousarray(array).data)
            self._take(role, by_channel(array, 2 if role == "state" else 1))
            if role == "state":
                self._take("change", by_channel(np.diff(array.astype(np.float64), axis=1), 2))

    def _take(self, role: str, values: np.ndarray[Any, Any]) -> None:
        self._moments.setdefault(role, Moments(len(values), allow_nonfinite=True)).add(values)

    def to_json(self) -> dict[str, Any]:
        """{role: {channel: {mean, std, minimum, maximum[, change_rms]}}, sha256: {role: hash}}."""
        out: dict[str, Any] = {}
        names = {
            "state": self._spec.channel_names("state"),
            "static": self._spec.channel_names("static"),
            "target": self._spec.channel_names("target"),
            "parameters": tuple(p.name for p in self._spec.parameters),
        }
        for role, channels in names.items():
            if role not in self._moments:
                continue
            found = self._moments[role]
            rows = zip(channels, found.mean, found.std(), found.minimum, found.maximum, strict=True)
            out[role] = {
                name: {"mean": mean, "std": std, "minimum": low, "maximum": high} for name, mean, std, low, high in rows
            }
        if "change" in self._moments:
            for name, rms in zip(names["state"], self._moments["change"].rms, strict=True):
                out["state"][name]["change_rms"] = rms
        out["sha256"] = {role: digest.hexdigest() for role, digest in self._hashes.items() if role in out}
        return out


def differences(ours: Mapping[str, Any], theirs: Mapping[str, Any], tolerance: float = TOLERANCE) -> list[str]:
    """Where two summaries (split -> to_json) differ by more than `tolerance` standard deviations; empty if the same."""
    found: list[str] = []
    for split in sorted(set(ours) | set(theirs)):
        one, two = ours.get(split, {}), theirs.get(split, {})
        for role in sorted((set(one) | set(two)) - {"sha256"}):
            for channel in sorted(set(one.get(role, {})) | set(two.get(role, {}))):
                a, b = one.get(role, {}).get(channel), two.get(role, {}).get(channel)
                if a is None or b is None:
                    found.append(f"{split} {role} {channel}: only in one of the two")
                    continue
                scale = max(a["std"], b["std"], 1e-12 * max(abs(a["mean"]), abs(b["mean"])), 1e-30)
                found += [
                    f"{split} {role} {channel}: {name} {a[name]:.6g} and {b[name]:.6g}"
                    for name in ("mean", "std", "change_rms")
                    if name in a and abs(a[name] - b.get(name, np.inf)) > tolerance * scale
                ]
    return found
