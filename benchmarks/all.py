"""Every figure of speed, by one command: each program measures ratios to a bare reference in the same run.

    python benchmarks/all.py [--quick] [--the-well-python PYTHON] [--only WORD ...]

Runs the programs below one after another, appends a row to benchmarks/results/performance.jsonl, and writes
docs/performance.md from these rows. --quick: fewer blocks, and none of the programs that take minutes; its row is kept
but never shown beside whole ones. --only: those whose command has one of the words. Figures that were measured while
other machines took more than a tenth of the processors are marked as not judged. Exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the checkout

from benchmarks.engine.overhead import MOST_STEAL, Steal

ROOT = Path(__file__).resolve().parents[1]
HISTORY, PAGE = ROOT / "benchmarks/results/performance.jsonl", ROOT / "docs/performance.md"
WORSE, SHOWN = 0.1, 5


@dataclass(frozen=True)
class Figure:
    """A number of the last line of a program. path: keys of the JSON object; least or most: its bar."""

    name: str
    path: str
    least: float | None = None
    most: float | None = None

    def good(self, value: float) -> bool:
        return not ((self.least is not None and value < self.least) or (self.most is not None and value > self.most))

    def worse(self, value: float, before: float) -> bool:
        """By more than `WORSE`; where there is no bar, less is better."""
        gain = value / before if self.least is not None else before / value
        return gain < 1 - WORSE

    @property
    def bar(self) -> str:
        return f">= {self.least:g}" if self.least else f"<= {self.most:g}" if self.most else ""


@dataclass(frozen=True)
class Program:
    title: str
    command: str
    figures: tuple[Figure, ...]
    quick: str | None = None  # arguments of --quick; None: left out


def _pair(what: str, bar: float) -> tuple[Figure, ...]:
    return Figure(f"{what}, one rank", "single/ratio", bar), Figure(f"{what}, two ranks", "ddp/ratio", bar)


PROGRAMS = (
    Program("Engine", "engine/overhead.py", _pair("steps per second, of a bare loop", 0.985), "--blocks 10"),
    Program(
        "Lightning Fabric", "engine/overhead.py --peer fabric", _pair("steps per second, of Fabric", 1), "--blocks 10"
    ),
    Program(
        "neuraloperator",
        "engine/overhead.py --peer neuraloperator",
        (Figure("steps per second, of its Trainer with the same FNO", "single/ratio", 1),),
        "--blocks 10",
    ),
    Program(
        "Start-up",
        "engine/startup.py",
        (
            Figure(
                "`ups train`, two ranks, to the first step, of `import torch`", "train, two ranks, first step/of_torch"
            ),
            Figure("`ups rollout` to the first frame, of `import torch`", "rollout, first frame/of_torch"),
            Figure("`import ups`, of `import torch`", "import ups/of_torch"),
            Figure("`ups config check`, of `import torch`", "config check/of_torch"),
        ),
        "--rounds 2",
    ),
    Program(
        "Saving",
        "engine/checkpoint_async.py",
        (Figure("what a save costs the loop, of a synchronous save", "excess_over_synchronous", most=0.5),),
        "--repeats 2",
    ),
    Program("Black box", "engine/blackbox.py", (Figure("a record, microseconds", "record_microseconds", most=5),), ""),
    Program(
        "Trackers",
        "engine/trackers.py --steps 300 --pairs 3",
        tuple(
            Figure(f"steps per second, MLflow server {kind}", f"ratios/{kind}", 0.97)
            for kind in ("silent", "gone", "full")
        ),
    ),
    Program(
        "Reading",
        "data/throughput.py",
        tuple(
            Figure(f"windows per second, {words}, {size} kB", f"cases/{case}/{key}", bar)
            for case, size in (("50 kB", 50), ("600 kB", 600))
            for key, words, bar in (("of_memmap", "of a bare memory map", 0.6), ("of_h5py", "of h5py", 1.0))
        ),
        "--seconds 0.5",
    ),
    Program(
        "Sampler",
        "data/sampler.py",
        (Figure("window numbers per CPU second, of 10^12 on 1,024 ranks", "numbers_per_second", 200_000),),
        "",
    ),
    Program(
        "Rollouts",
        "model/rollout.py",
        tuple(Figure(f"steps per second, of a bare loop, {n} samples", f"speed/{n}/ratio", 0.95) for n in (1, 8)),
        "--blocks 4 --long 2000",
    ),
    Program(
        "Serving",
        "serve/load.py src/ups/shipped/ups-joint/bundle --task burgers1d",
        (
            Figure("steps per second, of one request at a time", "against_one", 2),
            Figure("steps per second, of the bare batch", "against_bare", 0.8),
        ),
    ),
    Program(
        "1,024 ranks",
        "scale/thousand_ranks.py",
        tuple(Figure(f"`ups {name}`, CPU seconds", f"{name}/cpu_seconds", most=2) for name in ("why", "status")),
        "",
    ),
)
THE_WELL = Program(
    "The Well",
    "data/the_well.py --package-python",
    tuple(
        Figure(f"windows per second, of its package, {name}", f"windows_per_second/{name}/times", bar)
        for name, bar in (("contiguous 128x128", 2.0), ("gzip 128x128", 1.2))
    ),
)


def run(program: Program, more: str) -> dict[str, Any]:
    """What one program found."""
    words = f"{program.command} {more}".split()
    steal, started = Steal(), time.monotonic()
    print(f"\n== {program.title}: python benchmarks/{' '.join(words)}", flush=True)
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / words[0]), *words[1:]],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    found: dict[str, Any] = {"steal": steal.fraction()}
    found |= {"seconds": time.monotonic() - started, "exit_code": done.returncode, "commit": commit(), "values": {}}
    try:
        last = json.loads(done.stdout.strip().splitlines()[-1])
        for figure in program.figures:
            value = last
            for key in figure.path.split("/"):
                value = value[key]
            found["values"][figure.name] = round(float(value), 4)
    except (ValueError, LookupError, TypeError) as error:
        found["failed"] = f"no figure in the last line: {error!r}"
    return found


def machine() -> dict[str, Any]:
    rows = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((row.partition(":")[2].strip() for row in rows if row.startswith("model name")), platform.machine())
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit() -> str:
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty"]
    return subprocess.run(words, stdout=subprocess.PIPE, text=True, check=False).stdout.strip()


def page(rows: list[dict[str, Any]], programs: list[Program]) -> str:
    """docs/performance.md: the newest row, and how each figure went before on the same machine."""
    last = rows[-1]
    past = [row for row in rows[:-1] if row["machine"] == last["machine"]][-SHOWN:]
    lines = [
        "# Performance",
        "",
        "Ratios of two things that took turns in one run, so they hardly depend on the machine: above 1 ups is faster,",
        "except for start-up and saving. `python benchmarks/all.py` measures all and writes this page.",
        "",
        f"Measured until {last['date']} on {last['machine']['processor']}, {last['machine']['cores']} processors, "
        f"torch {last['machine']['torch']}.",
        "",
        "| program | figure | measured | bar | before |",
        "|---|---|---|---|---|",
    ]
    for program in programs:
        found = last["programs"].get(program.command)
        for figure in program.figures if found else ():
            value = found["values"].get(figure.name)
            olds = [row["programs"].get(program.command, {}).get("values", {}).get(figure.name) for row in past]
            known = [old for old in olds if old is not None]
            words = judgment(figure, value, found, known)
            shown = words if value is None else f"{value:.4g}" + (f" ({words})" if words else "")
            ended = f", exit code {found['exit_code']}" if found["exit_code"] else ""
            name = f"`benchmarks/{program.command}` ({found['commit']}{ended})" if figure is program.figures[0] else ""
            trail = ", ".join(f"{old:.4g}" for old in known)
            lines.append(f"| {name} | {figure.name} | {shown} | {figure.bar} | {trail} |")
    return "\n".join([*lines, "", LIMITS, ""])


LIMITS = """## Why bars are missed

- **Fabric** does less in a step: no black box, no agreement on stops, no rows of metrics. Single blocks differ by 10 %.
- **Rollouts** compare each frame with the training data; a bare loop does not.
- **Serving** states errors at each step; the bare batch does not.

## Limits

- CPU only: no figure is of a GPU.
- *before*: earlier rows of the same machine in `benchmarks/results/performance.jsonl`; *slower*: more than 10 % worse
  than their median.
- *exit code 1*: the program missed a bar, maybe one that has no row here, such as latencies of the server.
- *not judged*: other virtual machines took more than a tenth of the processors.
"""


def judgment(figure: Figure, value: float | None, found: dict[str, Any], known: list[float]) -> str:
    if value is None:
        return str(found.get("failed", "failed"))
    if found["steal"] > MOST_STEAL:
        return "not judged"
    slower = bool(known) and figure.worse(value, statistics.median(known))
    return ", ".join(filter(None, ["" if figure.good(value) else "missed", "slower" if slower else ""]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--the-well-python", help="Python of an environment with the package the-well")
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    programs = [*PROGRAMS, *([THE_WELL] if options.the_well_python else [])]
    chosen = [one for one in programs if not options.only or any(word in one.command for word in options.only)]
    row: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "machine": machine()}
    row |= {"quick": options.quick, "programs": {}}
    for program in chosen:
        if options.quick and program.quick is None:
            continue
        more = program.quick if options.quick else options.the_well_python if program is THE_WELL else ""
        row["programs"][program.command] = run(program, more or "")
    rows = [json.loads(line) for line in HISTORY.read_text().splitlines()] if HISTORY.exists() else []
    if options.only and rows and rows[-1]["quick"] == options.quick and rows[-1]["machine"] == row["machine"]:
        row["programs"] = rows.pop()["programs"] | row["programs"]  # a part measured again
    rows.append(row)
    HISTORY.write_text("".join(json.dumps(one) + "\n" for one in rows))
    if not options.quick:
        PAGE.write_text(page([one for one in rows if not one["quick"]], [*PROGRAMS, THE_WELL]))
    missed = [
        figure.name
        for program in chosen
        if (found := row["programs"].get(program.command))
        for figure in program.figures
        if judgment(figure, found["values"].get(figure.name), found, []) not in ("", "not judged")
    ]
    print("\nmissed: " + "; ".join(missed) if missed else "\nno bar is missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
