"""`RUN/launch`: what launchers leave on the host that started a run elsewhere."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = "launch"
# What the folder holds; anything else in it is not ours.
NAMES = re.compile(r"job\.sh|slurm_\d+(_\d+)?\.out|skypilot\.yaml|vast\.sh|vast_\d+\.log")


def write_script(run_dir: Path, name: str, text: str) -> Path:
    """Write one of the files anew; returns its path."""
    path = run_dir / FOLDER / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
