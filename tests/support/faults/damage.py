"""Damage to the checkpoints of a run. Standard library only."""

from __future__ import annotations

from pathlib import Path


def damage_newest(run_dir: Path, how: str = "flip") -> None:
    """Flip one bit in the middle of the largest file of the newest checkpoint, or cut the file there."""
    newest = max((run_dir / "checkpoints").glob("step_*"))
    files = [p for p in newest.rglob("*") if p.is_file() and p.name not in ("MANIFEST", "COMMITTED")]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    middle = len(content) // 2
    if how == "truncate":
        del content[middle:]
    else:
        content[middle] ^= 1
    largest.write_bytes(content)
