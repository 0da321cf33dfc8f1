"""Scores as a table for people; the scores themselves: `ups.run.scoring`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ups.run.scoring import MODEL, blow_up_words, ensemble_words, ratio_words
from ups.run.table import table


def plain(text: str, *_styles: str) -> str:
    """Text without terminal styles."""
    return text


def score_lines(results: Sequence[Mapping[str, Any]], styled: Callable[..., str] = plain) -> str:
    """A table for people: each score of the model next to the best reference, with a word where it is not better.

    styled(text, *styles) makes a text bold, dim or yellow where that can be shown.
    """
    from ups.evaluation.headline import headlines
    from ups.evaluation.results import leak_words

    if not results:
        return "nothing was scored: no task has a test split"
    rows = [("task", "score", "model", "reference", "", "ratio", "")]
    for result in results:
        for number, line in enumerate(headlines(result, MODEL)):
            name = "" if number else result["task"]
            steps = f" ({result['protocol']['num_steps']} steps)" if line.score == "rollout" else ""
            ours, theirs, ratio = f"{line.model:.4g}", f"{line.reference:.4g}", ratio_words(line.ratio)
            rows.append((name, line.score + steps, ours, theirs, line.reference_name, ratio, line.verdict))
    title = f"Errors on the {results[0]['split']} split, in physical units; given frames are not scored"
    note = (
        "one step, rollout, solution: RMSE relative to the RMS of the trajectory; nRMSE: of the frame; VRMSE: to its "
        "deviation\n  reference: the best of those that learned nothing; ratio: reference / model"
    )
    lines = [styled(title, "bold"), table(rows), f"  {styled(note, 'dim')}"]
    lines += [styled(f"warning: {blow_up_words(r)}", "yellow") for r in results if blow_up_words(r)]
    lines += [styled(f"warning: {leak_words(result)}", "yellow") for result in results if result.get("in_train")]
    lines += [f"{r['task']}: {ensemble_words(r['ensemble'])}" for r in results if "ensemble" in r]
    lines += [f"{r['task']}: {cost_words(r['solver_cost'])}" for r in results if "solver_cost" in r]
    return "\n".join(lines)


def cost_words(cost: Mapping[str, Any]) -> str:
    """What the same error costs a solver, or why that is not known."""
    return str(cost.get("sentence") or cost["reason"])
