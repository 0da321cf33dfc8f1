"""The page `docs/fault-benchmark.md`, from scored cells and the paragraphs of `prose.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLUMNS = (
    *("stack", "rank", "cause", "detected s", "exit code"),
    *("continues", "lost", "left behind", "false success", "equal"),
)
ORDER = ("torchrun", "lightning", "accelerate", "ray", "ups", "nvrx")


def write(results: Path, expected: dict[str, Any], target: Path) -> None:
    """Everything that has a result appears; what was not played is said."""
    prose = json.loads(Path(__file__).with_name("prose.json").read_text())
    stacks = [json.loads(path.read_text()) for name in ORDER if (path := results / f"{name}.json").exists()]
    target.write_text("\n".join(lines(stacks, expected["faults"], prose)) + "\n")


def lines(stacks: list[dict[str, Any]], faults: dict[str, Any], prose: dict[str, Any]) -> list[str]:
    """The page, line by line."""
    titles = [stack["title"] for stack in stacks]
    page = ["# A fault benchmark of training stacks", "", *prose["head"], "", "## Result", ""]
    page += ["| fault | " + " | ".join(titles) + " |", "|---" * (len(stacks) + 1) + "|"]
    for name, fault in faults.items():
        page.append("| ".join(["", fault["title"] + " ", *(mark(stack, name) + " " for stack in stacks)]) + "|")
    page.append("| ".join(["", "**right, of those played** ", *(total(stack) + " " for stack in stacks)]) + "|")
    waiting = sum(not cells(stack, fault) for stack in stacks for fault in faults)
    if waiting:
        page += ["", f"{waiting} of {len(stacks) * len(faults)} cells were not played yet: this table is a beginning."]
    page += ["", *prose["marks"], "", "## Each fault", ""]
    for name, fault in faults.items():
        rows = [(stack["title"], cell) for stack in stacks for cell in cells(stack, name)]
        if not rows:
            continue
        page += [f"### {fault['title'][0].upper()}{fault['title'][1:]}", "", f"{fault['how']}.", ""]
        page += ["| " + " | ".join(COLUMNS) + " |", "|---" * len(COLUMNS) + "|"]
        page += [detail(title, cell, fault) for title, cell in rows]
        page.append("")
    page += ["## What each does better", ""]
    for stack in stacks:
        page += [f"**{stack['title']}.** {prose['stacks'][stack['stack']]}", ""]
    page += ["## Settings and versions", "", "| stack | settings | packages | start s |", "|---|---|---|---|"]
    for stack in stacks:
        free = [cell["start_seconds"] for cell in cells(stack, "none")]
        packages = ", ".join(package.split("@")[0] for package in stack.get("packages", []))
        settings = "; ".join([stack["settings"], *(f"`{k}={v}`" for k, v in stack["variables"].items())])
        page.append(f"| {stack['title']} | {settings} | {packages} | {free[0] if free else '-'} |")
    scored = [cell for stack in stacks for cell in stack["cells"] if cell["fault"] != "none"]
    loads = sorted(cell["load"] for cell in scored)
    if loads:
        page += [
            "",
            f"Load average of the machine during the cells: median {loads[len(loads) // 2]}, most {loads[-1]}.",
        ]
    return [*page, "", *prose["tail"]]


def cells(stack: dict[str, Any], fault: str) -> list[dict[str, Any]]:
    """The scored cells of a stack and a fault, in order of repetition."""
    return [cell for cell in stack["cells"] if cell["fault"] == fault and not cell.get("not_scored")]


def mark(stack: dict[str, Any], fault: str) -> str:
    """A word for the overview, of each repetition once."""
    return " / ".join(dict.fromkeys(_word(cell) for cell in cells(stack, fault))) or "not played"


def _word(cell: dict[str, Any]) -> str:
    if cell["right"]:
        return "right"
    wrong = []
    if cell["false_success"]:
        wrong.append("**false success**")
    if cell["does_not_end"]:
        wrong.append("undetected" if cell["detected_seconds"] is None else "does not end")
    if cell["left_behind"]:
        wrong.append("leaves processes")
    if cell["rank"] == "wrong":
        wrong.append("wrong rank")
    return ", ".join(wrong) or ("continues" if cell["continues"] else "stops") + ", not explained"


def total(stack: dict[str, Any]) -> str:
    """How many cells are right."""
    played = [cell for cell in stack["cells"] if cell["fault"] != "none" and not cell.get("not_scored")]
    return f"{sum(cell['right'] for cell in played)} of {len(played)}"


def detail(title: str, cell: dict[str, Any], fault: dict[str, Any]) -> str:
    """A row with every figure of a cell."""
    left = f"{len(cell['left_behind'])}" if not cell["does_not_end"] else "does not end"
    values = [
        title,
        cell["rank"] if fault["rank"] else "-",
        ("right" if cell["cause"] else "not named") if fault["cause"] else "-",
        "undetected" if cell["detected_seconds"] is None else cell["detected_seconds"],
        "-" if cell["exit_code"] is None else cell["exit_code"],
        "yes" if cell["continues"] else "no",
        "-" if cell["lost_steps"] is None else cell["lost_steps"],
        left,
        "**yes**" if cell["false_success"] else "no",
        "yes" if cell["equal_weights"] else "no",
    ]
    return "| " + " | ".join(str(value) for value in values) + " |"
