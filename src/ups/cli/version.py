"""`ups --version`: the version, and with `--verbose` what is installed, what is missing and what it would add."""

from __future__ import annotations

import ups
from ups.cli.output import report, say, styled, table
from ups.run.software import DISTRIBUTION, describe, parts


def show_version(*, verbose: bool, as_json: bool) -> None:
    """Print the version; `verbose` adds Python, the core libraries, the extras and the parts."""
    if not verbose:
        if as_json:
            report({"ups": ups.__version__})
        else:
            say(f"ups {ups.__version__}")
        return
    found = describe() | {"parts": parts()}
    if as_json:
        report(found)
        return
    say(f"{styled('ups', 'bold')} {found['ups']}")
    say()
    say(table([(name, version or "not installed") for name, version in found["libraries"].items()]))
    say()
    say(styled("Extras", "bold"))
    rows = []
    for name, extra in found["extras"].items():
        state = "missing" if extra["missing"] else "installed"
        more = f" (needs {', '.join(extra['missing'])})" if extra["missing"] else ""
        rows.append((name, state, f"{extra['adds']}{more}"))
    say(table(rows) if rows else "  (the package metadata lists none)")
    say()
    say(styled("Parts", "bold"))
    say(table(_part_rows(found["parts"])))
    missing = [name for name, extra in found["extras"].items() if extra["missing"]]
    if missing:
        say()
        say(f"Add one with: pip install '{DISTRIBUTION}[{missing[0]}]'")


def _part_rows(parts: list[dict[str, str]]) -> list[tuple[str, ...]]:
    """A row for each kind and package; a part that cannot be used has its own, with the reason."""
    groups: dict[tuple[str, str], list[str]] = {}
    broken: list[tuple[str, ...]] = []
    for part in parts:
        package = f"{part['distribution']} {part['version']}"
        if "error" in part:
            broken.append((part["kind"], package, f"{part['name']}: {part['error']}"))
        else:
            groups.setdefault((part["kind"], package), []).append(part["name"])
    return [*((*group, ", ".join(names)) for group, names in groups.items()), *broken]
