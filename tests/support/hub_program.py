"""A program that uses bundles on the hub as a user's would: a line of JSON in is a call, a line out what came of it.

A process of its own, because the client of the hub reads HF_ENDPOINT when it is imported.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np

import ups
from ups.errors import UpsError
from ups.inference import hub


def client() -> str:
    return huggingface_hub.__version__


def push(bundle: str, repo: str, key: str | None = None) -> str:
    return str(hub.push(bundle, repo, key=Path(key) if key else None))


def pull(address: str, out: str | None = None, public_key: str | None = None) -> list[str]:
    path, exact = hub.pull(address, Path(out) if out else None, Path(public_key) if public_key else None)
    return [str(path), str(exact)]


def rollout(name: str) -> str:
    """SHA-256 of the trajectories of each task that can be loaded from there."""
    simulator, digest = ups.Simulator.load(name, device="cpu"), hashlib.sha256()
    x = np.linspace(0, 1, 16, endpoint=False)
    result = simulator.rollout(np.sin(2 * np.pi * x)[None], 20, {"beta": 1.5}, task="advection")
    digest.update(result["u"].to_numpy().tobytes())
    return digest.hexdigest()


def answer(call: list[Any]) -> Any:
    try:
        return globals()[call[0]](*call[1:])
    except UpsError as error:
        return {"cause": error.cause, "line": error.one_line()}


if __name__ == "__main__":
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=out, flush=True)
