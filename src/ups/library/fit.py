"""`ups.fit`: the engine inside this process, for a notebook or a debugger. One rank, nobody restarts it."""

from __future__ import annotations

from typing import Any

from ups.library.output import Output, Printed, messages_shown
from ups.library.recipe import RecipeLike, resolve_recipe, run_dir_for
from ups.library.run import Run
from ups.library.train import leave_bundle, prepared


def fit(recipe: RecipeLike, *, progress: bool = True, **overrides: Any) -> Run:
    """Train a recipe here, on one rank, with a progress line; or go on with a run that was interrupted.

    recipe and overrides as in `train`; the losses are those of `train(recipe, ranks=1)`, bit by bit, for the same
    number of threads. An interrupt (Ctrl-C, "stop" in a notebook) saves and returns the run in state 'stopped'; a
    second one leaves at once and raises KeyboardInterrupt. An error is written into the run, for `run.why()`, and
    raised. Models, stages and readers that this process has registered are seen, other than by `train`.
    """
    from ups.run.directory import completed_step
    from ups.run.in_process import train_in_process
    from ups.supervise.bucket_mirror import BucketMirror
    from ups.supervise.trackers import Trackers

    resolved = resolve_recipe(recipe, overrides)
    run_dir, output = run_dir_for(recipe, resolved), Printed() if progress else Output()
    with messages_shown(progress), prepared(resolved, run_dir, 1) as identity:
        done = completed_step(run_dir, resolved.recipe, identity)
        if done is not None:
            output.completed_before(run_dir, done)
            return Run(run_dir)
        with (
            BucketMirror(run_dir, resolved.recipe.checkpoint),
            Trackers(run_dir, resolved.recipe.tracking.trackers) as trackers,
        ):
            with output.following(run_dir, resolved.recipe) as say:
                code = train_in_process(run_dir, resolved.recipe, identity, say, trackers)
            if code == 0:
                leave_bundle(run_dir, output)
    return Run(run_dir)
