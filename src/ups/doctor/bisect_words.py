"""What `ups doctor --bisect` says in the end: one verdict, where it was made, and what to do next. No torch."""

from __future__ import annotations

from typing import Any

from ups.doctor.bisect import Finding, place_of
from ups.record.text import path_text

_MODEL = "the model"
_SHOWN_OF_FAILURE = ("check", "cause", "says", "rank", "log")


def module_text(culprit: dict[str, Any]) -> str:
    """'module a.b.c (shard unit a.b, network operator), forward pass in bfloat16'."""
    name = culprit.get("module") or ""
    if not name:
        text = "the loss of the stage, outside of every module"
    else:
        belongs = [f"shard unit {culprit['unit']}"] if culprit.get("unit") not in (None, name) else []
        belongs += ["a shard unit"] if culprit.get("unit") == name else []
        belongs += [f"network {culprit['network']}"] if culprit.get("network") else []
        text = f"module {name}" + (f" ({', '.join(belongs)})" if belongs else "")
    text += f", {culprit.get('pass', 'forward')} pass"
    if culprit.get("rank") is not None:
        text += f" of rank {culprit['rank']}, for which the others wait"
    if culprit.get("dtype"):
        text += f" in {culprit['dtype']}"
    if culprit.get("bad_parameters"):
        text += f"; its own weights are not finite: {', '.join(culprit['bad_parameters'])}"
    elif culprit.get("inputs_finite") is True and name:
        text += "; what went in was finite"
        if culprit.get("largest_input") is not None:
            text += f" (at most {culprit['largest_input']:.3g})"
    elif culprit.get("inputs_finite") is False:
        text += "; what went in was not finite either"
    return text


def windows_text(windows: dict[str, Any]) -> str:
    """Where the bad windows are."""
    count, where = len(windows["where"]), "; ".join(windows["where"])
    return f"{count} of {windows['of']} windows of task '{windows['task']}' have {windows['what']}: {where}"


def located(finding: Finding) -> list[str]:
    """What the failure needs, in words; empty if it could not be located."""
    place = place_of(finding)
    needs = list(finding.needs)
    windows = place.get("windows")
    by_data = bool(windows) or finding.kind == "opened"
    if windows and not any(need.startswith("task") for need in needs):
        needs.append(f"data of task {windows['task']}")
    if finding.kind == "opened" and not needs and place.get("task"):
        needs.append(f"task {place['task']}")
    culprit = place.get("culprit")
    if culprit is not None and not needs and not by_data:
        name = culprit.get("module")
        needs.append(f"{_MODEL}: {name}" if name else f"{_MODEL}: the loss of {place.get('stage_name', 'the stage')}")
    return needs


def verdict(finding: Finding) -> str:
    """One line."""
    if finding.failure is None or finding.failure.failed is None:
        tried = finding.outcomes[-1].label if finding.outcomes else "nothing"
        if finding.not_tried:
            return f"no failure was seen, but the time was up before everything was tried (last: {tried})"
        return "the recipe does not fail here: " + ", ".join(
            outcome.label.partition(": ")[2] or outcome.label for outcome in finding.outcomes
        )
    needs = located(finding)
    if not needs:
        return "the failure could not be located: it stays with every part at its simplest setting"
    text = f"the failure needs: {' and '.join(needs)}"
    return f"{text} (a guess: it comes and goes)" if finding.comes_and_goes else text


def next_step(finding: Finding, recipe: str) -> str:
    """What to do now."""
    if finding.failure is None or finding.failure.failed is None:
        return (
            "if a run of it fails later: `ups why RUN`, more steps (--steps), more time (--minutes), every value of "
            f"the data (ups data validate {recipe})"
        )
    place, failed = place_of(finding), (finding.last or finding.failure).failed
    needs = " ".join(located(finding))
    smallest = "" if finding.smallest is None else f"ups train {path_text(finding.smallest)} shows it"
    smallest += f" (--ranks {finding.ranks})" if smallest else ""
    if finding.comes_and_goes:
        return f"run the search again; {smallest}"
    if "task" in needs or place.get("windows"):
        return "look at the data with `ups data validate`, and leave the bad trajectories or the task out"
    if "loader workers" in needs:
        return f"train with --set data.loader.workers=0, and look at what the worker said in {finding.failure.folder}"
    if "precision" in needs:
        wider = _wider(needs)
        alone = (
            "let the named module alone compute in that (x.float() under torch.autocast(x.device.type, enabled=False))"
            if wider == "float32"
            else "let the named module alone compute in that"
        )
        return f"train with --set engine.precision={wider}, or {alone}; {smallest}"
    if "strategy" in needs or "ranks" in needs:
        return f"train with another engine.strategy until it is mended; {smallest}"
    if _MODEL in needs:
        return f"look at that module; {smallest}"
    if not needs:
        at = f" at {place['at']}" if place.get("at") else ""
        return f"read the log{at} in {failed.log if failed else finding.failure.folder}; {smallest}"
    return f"leave that setting out until it is mended; {smallest}"


def _wider(needs: str) -> str:
    return "float64" if "precision float32" in needs else "float32"


def to_json(finding: Finding, recipe: str) -> dict[str, Any]:
    """The object of `--json`."""
    failed = finding.failure.failed if finding.failure else None
    failure = None if failed is None else {name: getattr(failed, name) for name in _SHOWN_OF_FAILURE}
    return {
        "ok": failed is None,
        "fails": failed is not None,
        "located": bool(located(finding)) if failed is not None else None,
        "verdict": verdict(finding),
        "needs": located(finding) if failed is not None else [],
        "failure": failure,
        **place_of(finding),
        "not_needed": finding.simplified,
        "unclear": finding.unclear,
        "not_tried": finding.not_tried,
        "comes_and_goes": finding.comes_and_goes,
        "smallest_recipe": None if finding.smallest is None else str(finding.smallest),
        "smallest_ranks": finding.ranks,
        "next": next_step(finding, recipe),
        "trials": [outcome.to_json() for outcome in finding.outcomes],
    }
