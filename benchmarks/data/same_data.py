"""Whether two copies of a data set of the solvers are the same but for the solver bits of their machines.

    python benchmarks/data/same_data.py data/ks1d.zarr elsewhere/ks1d.zarr

Prints where identity or summary statistics differ; the exit code is 1 if they do.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ups.formats.zarr_store import read_store_attributes

# Summary statistics of two copies of a data set may differ by this part of a standard deviation.
TOLERANCE = 1e-3


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


def main() -> int:
    ours, theirs = (read_store_attributes(Path(path))["generator"] for path in sys.argv[1:3])
    lines = differences(ours["summary"], theirs["summary"])
    if ours["identity"] != theirs["identity"]:
        lines.insert(0, f"identity: {ours['identity']} and {theirs['identity']}")
    print("\n".join(lines) or "the same data")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
