"""`ups.run_recipe`: one call from a recipe to a bundle that has passed its gate. `ups run` is this with options.

The steps themselves: `recipe_steps.py`. Here: their order, what is left out because nothing changed, and the record of
each in steps.json. No torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ups.config.recipe import ResolvedRecipe
from ups.config.schema import Recipe
from ups.config.tracker import by_name
from ups.errors import GateError, UpsError
from ups.library.recipe import RecipeLike, resolve_recipe, run_dir_for
from ups.library.recipe_steps import STEPS, Job, RecipeStep, StoppedError, before_gate
from ups.library.run import Run
from ups.library.train import Output, messages_shown, write_lines
from ups.record.causes import cause_of_error
from ups.record.run_dir import RunDir
from ups.record.text import duration_text, path_text
from ups.run.directory import check_ranks
from ups.run.progress_line import MetricsFollower, ProgressLine, plain
from ups.run.steps_file import DONE, FAILED, INTERRUPTED, StepRecord, StepsFile, digest
from ups.supervise.run_file import GATE_FAILED, hold_steps, read_run
from ups.supervise.tracker_feed import check_trackers
from ups.supervise.trackers import forget, remember, sync

# What a tracker gets to hear of the gate, and of the report.
TRACKER_SECONDS = 60.0


def run_recipe(recipe: RecipeLike, ranks: int = 1, *, progress: bool = False, **overrides: Any) -> Run:
    """Data, checks, training, scores, gate, bundle and report of a recipe; what is done already is left out.

    recipe and overrides as in `train`. Returns the run whatever its verdict is: look at `run.state`, which is
    'gate_failed' where the scores do not reach the gate of the recipe. Raises UpsError where a step cannot be done.
    """

    resolved = resolve_recipe(recipe, overrides)
    run_dir = run_dir_for(recipe, resolved)
    with messages_shown(progress):
        run_resolved(resolved, run_dir, ranks, StepLines() if progress else Output())
    return Run(run_dir)


def run_resolved(resolved: ResolvedRecipe, run_dir: Path, ranks: int, output: Output) -> int:
    """The same for a recipe that is resolved already; returns the exit code.

    Raises RunHeldError if another process works on the same run, and UpsError for a step that cannot be done.
    """
    # What would be refused in the end is refused before the first step.
    check_ranks(resolved.recipe, ranks)
    check_trackers(resolved.recipe.tracking.trackers)
    job = Job(resolved, run_dir, ranks, output)
    with hold_steps(run_dir):
        file = StepsFile(run_dir)
        worked = False
        try:
            for step in STEPS:
                if step.after_failed_gate or not job.gate_failed:
                    worked = _do(step, job, file) or worked
        except StoppedError as stopped:
            output.closing(next_words(job, stopped=True))
            return stopped.code
        if worked and resolved.recipe.tracking.trackers:
            # What cannot be sent now is sent by the next `ups status`.
            remember(run_dir)
            if not any(sync(run_dir, list(by_name(resolved.recipe.tracking.trackers)), TRACKER_SECONDS).values()):
                forget(run_dir)
    output.closing(next_words(job))
    return GateError.exit_code if job.gate_failed else 0


def _do(step: RecipeStep, job: Job, file: StepsFile) -> bool:
    """Do a step, if it has to be done; returns whether it was."""
    inputs, last = digest(step.inputs(job)), file.last(step.name)
    if last is not None and _still_holds(step, job, last, inputs):
        if last.outcome == GATE_FAILED:
            job.gate_failed = last.says
        job.output.unchanged(last)
        return False
    file.begin(step.name, inputs)
    try:
        with job.output.working(step.name, step.does):
            says = step.work(job)
    except BaseException as error:
        cause, words = _explained(error)
        with contextlib.suppress(UpsError, OSError):  # the error that is on its way says more
            record = file.end(step.name, FAILED if cause else INTERRUPTED, cause=cause, says=words)
            job.output.ended(record)
        raise
    failed = step.name == "gate" and job.gate_failed
    # What was made is looked at after the work: inputs of later steps come from the disk, too.
    record = file.end(
        step.name,
        GATE_FAILED if failed else DONE,
        outputs=step.outputs(job),
        cause=GateError.cause if failed else "",
        says=says,
    )
    job.output.ended(record)
    return True


def _still_holds(step: RecipeStep, job: Job, last: StepRecord, inputs: str) -> bool:
    """Whether a step was done with these inputs, and what it made is still there."""
    if last.outcome not in (DONE, GATE_FAILED) or last.inputs != inputs:
        return False
    outputs = step.outputs(job)
    return bool(outputs) and outputs == last.outputs


def _explained(error: BaseException) -> tuple[str, str]:
    """Cause and words of what ended a step; no cause for an interruption."""
    if isinstance(error, StoppedError):
        return error.cause, error.says
    if isinstance(error, UpsError):
        return error.cause, error.message
    if isinstance(error, Exception):
        return cause_of_error(error), " ".join(str(error).split())[:500]
    return "", type(error).__name__


def next_words(job: Job, *, stopped: bool = False) -> str:
    """One line for a run after its last step. stopped: the training did not come to its end."""
    run = path_text(job.run_dir)
    if stopped:
        # A run that was asked to stop has a checkpoint and no fault.
        goes_on = read_run(job.run_dir)["state"] in ("stopped", "preempted")
        return "next: the same command continues from the last checkpoint" if goes_on else f"next: ups why {run}"
    report = f"the report is {path_text(RunDir(job.run_dir).report_page)}"
    if job.gate_failed:
        return f"next: ups why {run} says what does not hold; {report}"
    tasks = job.resolved.recipe.data.tasks
    chosen = f" --task {tasks[0].name}" if len(tasks) > 1 else ""
    return f"next: ups rollout {run}{chosen} --picture {job.run_dir.name}.png; {report}"


_WIDTH = max(len(step.name) for step in STEPS) + 2


class StepLines(Output):
    """Results to `write`, by default on standard output; on standard error what a step does, and how far it is."""

    def __init__(self, write: Callable[[str], None] = write_lines, styled: Callable[..., str] = plain) -> None:
        self._write, self._styled = write, styled
        self._progress: ProgressLine | None = None

    def line(self, text: str) -> None:
        """Write whole lines, above the progress."""
        if self._progress is not None:
            self._progress.clear()
        self._write(text)

    @contextlib.contextmanager
    def working(self, name: str, does: str) -> Iterator[None]:
        try:
            with ProgressLine() as self._progress:
                self._progress.working(f"{name}: {does}")
                yield
        finally:
            self._progress = None

    @contextlib.contextmanager
    def scoring(self) -> Iterator[Callable[[str, int, int], None] | None]:
        yield None if self._progress is None else self._progress.count

    @contextlib.contextmanager
    def following(self, run_dir: Path, recipe: Recipe | None) -> Iterator[Callable[[str], None]]:
        assert recipe is not None  # a run over several hosts has no steps
        stages = [stage.type for stage in recipe.stages]
        line = self._progress or ProgressLine(quiet=True)
        with MetricsFollower(RunDir(run_dir).metrics, stages, line) as rows:
            yield before_gate(rows.say, recipe)

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        from ups.run.scoring import score_lines

        self.line(score_lines(results, self._styled))

    def ended(self, record: StepRecord) -> None:
        words = {DONE: record.says, GATE_FAILED: f"not passed: {record.says}"}
        text = words.get(record.outcome, f"{record.outcome}: {record.cause or record.says}")
        self.line(f"{record.name:<{_WIDTH}}{text} ({duration_text(record.seconds)})")

    def pronounced(self, line: str) -> None:
        self.line(line)

    def unchanged(self, record: StepRecord) -> None:
        words = f"not passed: {record.says}" if record.outcome == GATE_FAILED else record.says
        self.line(f"{record.name:<{_WIDTH}}unchanged: {words}")

    def closing(self, words: str) -> None:
        self.line(words)
