"""`ups doctor RECIPE --gpu-report FILE`: a recipe in every way that GPUs can train it, and the tests that need GPUs.

One JSON file to send back, without secrets, the name of the host, or the home and working directory. `missing` says
what it does not show; `python -m ups.doctor.gpu_report FILE` prints that.
"""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ups.doctor.examine import Examination, Verdict, examine
from ups.errors import DataError, errors_as
from ups.record.files import MAX_RUN_BYTES, load_object
from ups.record.processes import module_command
from ups.record.text import printable
from ups.run.software import cleaner, environment_record

# Changes of the recipe. The first examination is whole; the others repeat what depends on the change.
VARIANTS: dict[str, tuple[str, ...]] = {
    "ddp": ("engine.strategy=ddp",),
    "fsdp": ("engine.strategy=fsdp",),
    "fsdp, bfloat16": ("engine.strategy=fsdp", "engine.precision=bfloat16"),
    "ddp, bfloat16, compiled": ("engine.strategy=ddp", "engine.precision=bfloat16", "engine.compile=true"),
    "fsdp, offloaded": ("engine.strategy=fsdp", "engine.offload=true"),
    "ddp, recomputed": ("engine.strategy=ddp", "engine.activation_checkpointing=true"),
    "ddp, gloo": ("engine.strategy=ddp", "engine.backend=gloo"),
}
_REPEATED = ("data", "model", "wrap", "parity")
TESTS = Path("tests/gpu")
_TIME_WAS_UP = "\nended: the time was up\n"
_OUTCOME = re.compile(r"^(tests/\S+\.py::.+?) (PASSED|FAILED|ERROR|SKIPPED)\b.*$", re.MULTILINE)


def write_report(
    file: Path,
    examination_of: Callable[[Sequence[str]], Examination],
    minutes: float,
    on_verdict: Callable[[Verdict], None] | None = None,
) -> list[str]:
    """Examine, write the report, and return what is missing. examination_of: of the recipe with such changes."""
    file.touch()  # not after 20 minutes
    end = time.monotonic() + 60 * minutes
    gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    until = end - (60 * minutes * 0.4 if TESTS.is_dir() else 0)
    variants: dict[str, list[dict[str, Any]]] = {}
    for name, changes in VARIANTS.items():
        if (left := until - time.monotonic()) <= 0:
            break
        whole = examination_of([f"engine.device={'cuda' if gpus else 'cpu'}", *changes])
        part = replace(whole, only=_REPEATED if variants else (), seconds=left)
        variants[name] = [verdict.to_json() for verdict in examine(part, on_verdict)]
    tests = run_tests(end - time.monotonic()) if TESTS.is_dir() else {}
    environment = environment_record()
    environment["variables"] = {n: v for n, v in environment["variables"].items() if not n.startswith("SLURM_")}
    report: dict[str, Any] = {"gpus": gpus, "environment": environment, "variants": variants, "tests": tests}
    file.write_text(json.dumps(cleaned(report, cleaner(os.environ)), indent=1) + "\n")
    return missing(report)


def run_tests(seconds: float) -> dict[str, Any]:
    """Outcomes of the tests of GPUs by name, also of those before the time was up, and the end of the output."""
    command = module_command("pytest", str(TESTS), "-v", "-p", "no:cacheprovider", "-p", "no:xdist")
    tests = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        output, ending = tests.communicate(timeout=max(1.0, seconds))[0], ""
    except subprocess.TimeoutExpired:
        os.killpg(tests.pid, signal.SIGKILL)  # its ranks too
        output, ending = tests.communicate()[0], _TIME_WAS_UP
    text = output.decode(errors="replace")
    return {"outcomes": dict(_OUTCOME.findall(text)), "output": text[-20_000:] + ending}


def cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    """A document without what identifies its machine or is secret; paths of logs stay on the machine."""
    if isinstance(value, dict):
        return {str(key): cleaned(one, clean) for key, one in value.items() if key not in ("log", "host")}
    if isinstance(value, list | tuple):
        return [cleaned(one, clean) for one in value]
    for name, stands_for in ((str(Path.home()), "~"), (str(Path.cwd()), "."), (platform.node(), "HOST")):
        value = value.replace(name, stands_for) if isinstance(value, str) and len(name) > 3 else value
    return clean(value) if isinstance(value, str) else value


def missing(report: dict[str, Any]) -> list[str]:
    """What a report does not show to work on GPUs, a line each; [] if it shows all."""
    lines = []
    if report["gpus"] < 2:
        lines.append(f"{report['gpus']} GPUs: NCCL and strategies need at least 2")
    for name in VARIANTS:
        verdicts = report["variants"].get(name)
        if not verdicts:
            lines.append(f"{name}: not examined, the time was up")
        elif not verdicts[-1]["ok"]:
            lines.append(f"{name}: {verdicts[-1]['rung']} failed: {verdicts[-1]['says']}")
    outcomes = report["tests"].get("outcomes", {})
    if not outcomes:
        lines.append(f"{TESTS}: not run; start ups in a checkout with `pip install -e .[dev]`")
    lines += [f"{test}: {outcome}" for test, outcome in outcomes.items() if outcome in ("FAILED", "ERROR")]
    if skipped := sum(outcome == "SKIPPED" for outcome in outcomes.values()):
        lines.append(f"{skipped} of {len(outcomes)} tests of GPUs were skipped")
    if report["tests"].get("output", "").endswith(_TIME_WAS_UP):
        lines.append(f"{TESTS}: not all run, the time was up")
    return lines


def main(path: str) -> None:
    """Print what a report does not show, whoever sent it."""
    with errors_as(DataError, f"{path} is not a report of GPUs", Exception):
        lines = missing(load_object(Path(path), MAX_RUN_BYTES)) or ["nothing is missing"]
    sys.stdout.writelines(printable(line) + "\n" for line in lines)


if __name__ == "__main__":
    main(sys.argv[1])
