"""The plan of a recipe before its training: `ups plan`, kept in RUN/plan.json, and a line about it. No torch.

It stops nothing. Times are estimates, and a run that does not fit halves its micro-batch by itself.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from ups.record.manifest import write_file_atomically
from ups.record.processes import module_command
from ups.record.run_dir import CONFIG_NAME, RunDir
from ups.record.text import duration_text, last_line, size_text


def make_plan(recipe: str, ranks: int, run_dir: Path) -> str:
    """Plan a recipe, given as its resolved text, for this machine; returns a line about it."""
    with tempfile.TemporaryDirectory(prefix="ups-plan-") as folder:
        path = Path(folder) / CONFIG_NAME
        path.write_text(recipe)
        # In a process of its own: this one works when torch is what is broken.
        command = module_command("ups", "plan", str(path), "--gpus", str(ranks), "--json")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = last_line(done.stderr)
        _write(run_dir, {"problem": last})
        return f"none could be made: {last}"
    found = json.loads(done.stdout)
    _write(run_dir, found)
    seconds = sum(stage["seconds"] for stage in found["stages"])
    peak = max(stage["memory_bytes"]["peak"] for stage in found["stages"])
    fits = all(stage["fits"] for stage in found["stages"])
    return f"about {duration_text(seconds)} of training, {size_text(peak)} of tensors on a rank" + (
        "" if fits else ", which do not fit"
    )


def _write(run_dir: Path, found: dict[str, Any]) -> None:
    write_file_atomically(RunDir(run_dir).plan, (json.dumps(found, indent=1) + "\n").encode())
