"""The fault benchmark of training stacks: `python -m benchmarks.stacks COMMAND --out DIR`.

    environments   make one environment for each stack, under DIR/environments
    run            play the cells that have no result yet, some at a time; raw logs go to DIR/cells
    score          judge the raw logs; writes benchmarks/results/stacks/STACK.json
    page           write docs/fault-benchmark.md from those files

`run --only torchrun.kill` plays one cell. Rules and expected verdicts stand in `rules.md` and `expected.json`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the checkout

from benchmarks.stacks import page, score
from benchmarks.stacks.cell import SCRIPTS
from benchmarks.stacks.stacks import COMMON, STACKS

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
EXPECTED = json.loads((HERE / "expected.json").read_text())
FAULTS = ("none", *EXPECTED["faults"])


def main() -> int:
    """Do what the command line asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("environments", "run", "score", "page"))
    parser.add_argument("--out", type=Path, default=CHECKOUT / "build" / "stacks")
    parser.add_argument("--environments", type=Path, help="default: OUT/environments")
    parser.add_argument("--stacks", nargs="+", choices=tuple(STACKS), default=list(STACKS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--only", help="one cell: STACK.FAULT")
    parser.add_argument("--repetitions", type=int, default=1)
    parser.add_argument("--default-timeouts", action="store_true", help="the timeouts of the stacks instead of 60 s")
    parser.add_argument("--side-by-side", type=int, default=2, help="cells at a time")
    arguments = parser.parse_args()
    if arguments.only:
        stack, fault = arguments.only.split(".")
        arguments.stacks, arguments.faults = [stack], [fault]
    environments = (arguments.environments or arguments.out / "environments").resolve()
    out = arguments.out.resolve()
    if arguments.command == "environments":
        make_environments(environments, arguments.stacks)
    elif arguments.command == "run":
        run(out, environments, arguments)
    elif arguments.command == "score":
        score.score_all(out / "cells", EXPECTED, CHECKOUT / "benchmarks/results/stacks", environments)
    else:
        page.write(CHECKOUT / "benchmarks/results/stacks", EXPECTED, CHECKOUT / "docs/fault-benchmark.md")
    return 0


def make_environments(environments: Path, stacks: list[str]) -> None:
    """An environment of its own for each stack; what is there already stays."""
    for name in stacks:
        folder = environments / name
        if (folder / "packages.txt").exists():
            continue
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = folder / "bin" / "python"
        packages = [str(CHECKOUT)] if name == "ups" else list(STACKS[name].packages)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *COMMON, *packages], check=True)
        frozen = subprocess.run([python, "-m", "pip", "freeze"], check=True, capture_output=True, text=True).stdout
        (folder / "packages.txt").write_text(frozen)


def run(out: Path, environments: Path, arguments: argparse.Namespace) -> None:
    """Play what has no result yet. Stacks take turns, so that cells side by side are of different stacks."""
    out.mkdir(parents=True, exist_ok=True)
    data = out / "data.h5"
    if not data.exists():
        write_data(data)
    timeout = 0.0 if arguments.default_timeouts else 60.0
    waiting = [
        (stack, fault, repetition)
        for repetition in range(arguments.repetitions)
        for fault in arguments.faults
        for stack in arguments.stacks
    ]
    running: list[tuple[subprocess.Popen[bytes], Path, Path, str]] = []
    while waiting or running:
        while waiting and len(running) < arguments.side_by_side:
            stack, fault, repetition = waiting.pop(0)
            name = f"{stack}.{fault}.{repetition}" + (".default" if arguments.default_timeouts else "")
            final = out / "cells" / name
            if score.is_finished(final):
                continue
            running.append((*start(name, stack, fault, data, environments, timeout), final, name))
        time.sleep(0.5)
        for one in list(running):
            process, folder, final, name = one
            if process.poll() is None:
                continue
            running.remove(one)
            shutil.rmtree(final, ignore_errors=True)
            shutil.copytree(folder, final, ignore=shutil.ignore_patterns("data.h5*", "out"))
            shutil.rmtree(folder)
            print(f"{time.strftime('%H:%M:%S')} {name}: exit code {process.returncode} of the cell", flush=True)


def start(
    name: str, stack: str, fault: str, data: Path, environments: Path, timeout: float
) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a cell in new namespaces; returns its process and its directory, which has a short path for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="c", dir=data.parent))
    recipe = (SCRIPTS / "ups_recipe.yaml").read_text()
    (folder / "recipe.yaml").write_text(recipe.replace("OUT", f"{folder}/out").replace("DATA", f"{folder}/data.h5"))
    request = STACKS[stack].request(folder, data, environments / stack, fault, timeout)
    (folder / "request.json").write_text(json.dumps(request | {"name": name, "stack": stack}))
    spaces = ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    if os.geteuid():
        spaces.insert(1, "--map-root-user")
    command = ["nice", "-n", "15", *spaces, sys.executable, str(HERE / "cell.py"), str(folder / "request.json")]
    with (folder / "cell.log").open("w") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=folder), folder


def write_data(path: Path) -> None:
    """80 trajectories of two traveling waves, a chunk with a checksum for each."""
    trajectories, frames, points = 80, 41, 512
    draw = np.random.default_rng(0)
    x, t = np.arange(points) / points, np.arange(frames) * 0.02
    phases = draw.uniform(0, 2 * np.pi, (2, trajectories, 1, 1))
    along = 2 * np.pi * (x - draw.uniform(0.5, 2, (trajectories, 1, 1)) * t[:, None])
    u = (np.sin(along + phases[0]) + 0.5 * np.sin(3 * along + phases[1])).astype(np.float32)
    with h5py.File(path, "w") as file:
        file.create_dataset("u", data=u, chunks=(1, frames, points), fletcher32=True)
        file["x"], file["t"] = x, t


if __name__ == "__main__":
    sys.exit(main())
