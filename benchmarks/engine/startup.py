"""CPU time until a command does something, as a multiple of `import torch`.

    python benchmarks/engine/startup.py [--rounds 5] [--before CHECKOUT]

`ups train` of recipes/tiny.yaml on two ranks until both took their first step (the whole tree of processes), `ups
rollout` of the shipped model for one step, `import ups`, and `ups config check`. --before measures another checkout in
turns, and prints the ratio to it (no bar). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TICK = os.sysconf("SC_CLK_TCK")
# Imported by each Python at its start: a process that takes its first step of an optimizer says so by a file.
WATCH = """
import os, sys
from importlib.machinery import PathFinder
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name != "torch.optim.optimizer":
            return None
        spec = PathFinder.find_spec(name, path, target)
        execute = spec.loader.exec_module
        def exec_module(module):
            execute(module)
            mark = lambda *a, **k: open(os.path.join(os.environ["FIRST_STEPS"], str(os.getpid())), "w").close()
            module.register_optimizer_step_post_hook(mark)
        spec.loader.exec_module = exec_module
        return spec
sys.meta_path.insert(0, Watch())
"""


def environment(checkout: Path, **more: str) -> dict[str, str]:
    path = os.pathsep.join([str(checkout / "src"), *filter(None, [more.pop("PYTHONPATH", "")])])
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **more}


def tree_seconds(root: int) -> float:
    """CPU time of a process, of its living descendants, and of the dead ones that were waited for."""
    rows = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            rows[int(folder.name)] = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
    tree = {root}
    while more := {pid for pid, row in rows.items() if int(row[1]) in tree} - tree:
        tree |= more
    return sum(sum(map(int, rows[pid][11:15])) for pid in tree if pid in rows) / TICK


def first_step(checkout: Path, folder: Path) -> float:
    work = Path(tempfile.mkdtemp(dir=folder))
    marks = work / "marks"
    marks.mkdir()
    (work / "data").symlink_to(folder / "data")
    (work / "sitecustomize.py").write_text(WATCH)
    command = [sys.executable, "-m", "ups", "train", str(checkout / "recipes/tiny.yaml"), "--ranks", "2"]
    surroundings = environment(checkout, PYTHONPATH=str(work), FIRST_STEPS=str(marks))
    with (work / "log").open("w") as log:
        process = subprocess.Popen(command, cwd=work, env=surroundings, stdout=log, stderr=log)
        while len(list(marks.iterdir())) < 2:
            if process.poll() is not None:
                raise SystemExit(f"no first step:\n{(work / 'log').read_text()}")
            time.sleep(0.02)
        seconds = tree_seconds(process.pid)
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    shutil.rmtree(work)
    return seconds


def command(*arguments: str) -> Callable[[Path, Path], float]:
    """A measurement: CPU time of Python with these arguments, in an empty directory."""

    def measure(checkout: Path, folder: Path) -> float:
        work = tempfile.mkdtemp(dir=folder)
        child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=work,
            env=environment(checkout),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise SystemExit(f"exit code {child.returncode} of {arguments}")
        return usage.ru_utime + usage.ru_stime

    return measure


ROWS: dict[str, Callable[[Path, Path], float]] = {
    "import torch": command("-c", "import torch"),
    "train, two ranks, first step": first_step,
    "rollout, first frame": command(
        "-m", "ups", "rollout", "ups-joint", "--task", "advection1d", "--steps", "1", "-o", "frame.zarr"
    ),
    "import ups": command("-c", "import ups"),
    "config check": command("-m", "ups", "config", "check", str(ROOT / "recipes/tiny.yaml")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--before", type=Path, help="another checkout")
    options = parser.parse_args()
    sides = {"now": ROOT} | ({"before": options.before.resolve()} if options.before else {})
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="ups-startup-") as name:
        folder = Path(name)
        make = ["-m", "ups", "data", "generate", "advection1d", "darcy2d", "--small"]
        subprocess.run([sys.executable, *make], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        for title, measure in ROWS.items():
            for side in sides.values():  # compiled files and the page cache
                measure(side, folder)
            rounds = [{key: measure(side, folder) for key, side in sides.items()} for _ in range(options.rounds)]
            row = {key: statistics.median(one[key] for one in rounds) for key in sides}
            if options.before:
                row["ratio"] = statistics.median(one["now"] / one["before"] for one in rounds)
            found[title] = row | {"of_torch": row["now"] / found.get("import torch", row)["now"]}
            print(title, {key: round(value, 2) for key, value in found[title].items()}, flush=True)
    print(json.dumps({"benchmark": "startup", **found}))


if __name__ == "__main__":
    main()
