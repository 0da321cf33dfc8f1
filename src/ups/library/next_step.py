"""The last line of `ups run`: what a person may do next. No torch."""

from __future__ import annotations

from ups.library.recipe_steps import Job
from ups.record.run_dir import RunDir
from ups.record.text import path_text


def next_words(job: Job, *, stopped: bool = False) -> str:
    """One line for a run after its last step. stopped: the training did not come to its end."""
    from ups.supervise.run_file import read_run

    run = path_text(job.run_dir)
    if stopped:
        # A run that was told to stop has a checkpoint and no fault.
        goes_on = read_run(job.run_dir)["state"] in ("stopped", "preempted")
        return "next: the same command goes on from the last checkpoint" if goes_on else f"next: ups why {run}"
    report = f"the report is {path_text(RunDir(job.run_dir).report_page)}"
    if job.gate_failed:
        return f"next: ups why {run} says what does not hold; {report}"
    tasks = job.resolved.recipe.data.tasks
    chosen = f" --task {tasks[0].name}" if len(tasks) > 1 else ""
    return f"next: ups rollout {run}{chosen} --picture {job.run_dir.name}.png; {report}"
