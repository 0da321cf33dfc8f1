"""`ups.train`: a supervised run on one or many ranks. `ups train` is this function with options.

No torch here: the ranks import it, and when torch is what is broken this process still says so.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ups import __version__
from ups.config.recipe import ResolvedRecipe
from ups.config.schema import Recipe
from ups.errors import GateError, MachineError, RunDirectoryLostError, TrainingError, UpsError
from ups.inference.stored_scores import stored_warnings, written_words
from ups.library.recipe import RecipeLike, resolve_recipe, run_dir_for
from ups.library.run import Run
from ups.record.identity import RunIdentity
from ups.record.log import log_shown_by, short_line
from ups.record.processes import module_command
from ups.record.run_dir import RunDir
from ups.record.text import last_line, path_text, printable
from ups.run import directory
from ups.run.preflight import check_data, check_machine, memory_available_bytes
from ups.run.progress_line import MetricsFollower, ProgressLine, plain
from ups.run.restoring import restore_run
from ups.run.steps_file import StepRecord
from ups.supervise.bucket_mirror import BucketMirror, check_mirror
from ups.supervise.fault import MICRO_BATCH_SIZE
from ups.supervise.follower import follow
from ups.supervise.head import dismiss
from ups.supervise.link_endpoints import head_link
from ups.supervise.options import HostInfo, Options
from ups.supervise.run_file import GATE_FAILED, hold_run, read_run, was_started
from ups.supervise.supervisor import supervise
from ups.supervise.tracker_feed import check_trackers
from ups.supervise.trackers import Trackers

if TYPE_CHECKING:
    from ups.formats.base import Reader


logger = logging.getLogger(__name__)
_REHEARSAL_SECONDS = 600


def train(recipe: RecipeLike, ranks: int = 1, *, progress: bool = False, **overrides: Any) -> Run:
    """Train a recipe on `ranks` processes until the verdict, or go on with a run that was interrupted.

    recipe: a file, a run directory, plain values or a Recipe; overrides as in `load_recipe`. The run is supervised: a
    rank that dies is explained and the run restarted from its last checkpoint. An interrupt saves and leaves. Returns
    the run whatever its verdict is: look at `run.state` and `run.why()`. Raises ConfigError, DataError or MachineError
    if the run cannot be started. With `progress` a line follows the run.

    The ranks are processes of their own: what this process has registered or changed in memory is not seen there.
    """
    resolved = resolve_recipe(recipe, overrides)
    run_dir = run_dir_for(recipe, resolved)
    with messages_shown(progress):
        train_resolved(resolved, run_dir, ranks, Printed() if progress else Output())
    if not run_dir.is_dir():
        raise RunDirectoryLostError(f"{run_dir} is gone: it was moved or removed while the run went on")
    return Run(run_dir)


def train_resolved(
    resolved: ResolvedRecipe,
    run_dir: Path,
    ranks: int,
    output: Output,
    host_info: HostInfo | None = None,
    *,
    bundle: bool = True,
    start: Callable[..., int] | None = None,
) -> int:
    """The same for a recipe that is resolved already; returns the exit code of the run.

    host_info: of this process, in a run over several hosts. The first host does all that is done once; the others
    only start and watch their ranks. bundle: whether it is also scored and bundled. start: instead of `start_ranks`.
    """
    if host_info is not None and not host_info.is_head:
        with output.following(run_dir, None) as say:
            return follow(_options(run_dir, resolved.recipe, ranks, host_info), say, __version__)
    with contextlib.ExitStack() as stack:
        try:
            identity = stack.enter_context(
                prepared(resolved, run_dir, ranks, 1 if host_info is None else host_info.count)
            )
        except UpsError as error:
            if host_info is not None:
                _release_followers_after(error, run_dir, ranks, host_info)
            raise
        if bundle:
            check_gate(run_dir, resolved.recipe, identity)
        done = directory.completed_step(run_dir, resolved.recipe, identity, bundled=bundle)
        mirror = BucketMirror(run_dir, resolved.recipe.checkpoint)
        if done is not None:
            with mirror:
                output.completed_before(run_dir, done)  # the bucket gets what it could not take when the run ended
            if host_info is not None:
                _release_followers(run_dir, ranks, host_info, f"{run_dir} is completed: step {done}")
            return 0
        with mirror, Trackers(run_dir, resolved.recipe.tracking.trackers) as trackers:
            start = start or start_ranks
            code = start(run_dir, resolved.recipe, ranks, identity, output, trackers, host_info, mirror)
            if code == 0 and bundle:
                # The verdict stands already: torch may come now.
                leave_bundle(run_dir, output)
    return code


@contextlib.contextmanager
def prepared(resolved: ResolvedRecipe, run_dir: Path, ranks: int, hosts: int = 1) -> Iterator[RunIdentity]:
    """Check machine and data, hold the run, and write what ranks read; gives the identity of the run."""
    from ups.data.open import open_tasks

    recipe = resolved.recipe
    check_trackers(recipe.tracking.trackers)
    check_mirror(recipe.checkpoint.mirror)
    directory.check_ranks(recipe, ranks)
    for warning in check_machine(recipe, ranks // hosts, run_dir):
        logger.warning("%s", warning)
    with contextlib.ExitStack() as stack:
        readers = stack.enter_context(open_tasks(recipe.data))
        check_data(recipe, readers)
        # Held first: what follows writes files that a living run reads.
        with hold_run(run_dir):
            before = [name for name in directory.INPUTS if (run_dir / name).exists()]
            known = RunDir(run_dir).has_run_json
            try:
                restore_run(run_dir, recipe)
                directory.prepare(run_dir, resolved, ranks)
                directory.ensure_run_statistics(run_dir, recipe, readers)
                if directory.from_outside(recipe):
                    from ups.run.warm_start import keep_starts

                    keep_starts(run_dir, recipe)
                check_latents(run_dir, recipe, readers)
                stack.close()  # ranks open the data themselves
                identity = directory.identify(run_dir, recipe)
            except BaseException:
                if not known and directory.never_stepped(run_dir):
                    directory.leave_no_trace(run_dir, before)
                raise
            yield identity


def check_gate(run_dir: Path, recipe: Recipe, identity: RunIdentity) -> None:
    """Raises GateError if the run is trained and its scores were judged as too bad: a bundle would hide that."""
    if not was_started(run_dir) or read_run(run_dir)["state"] != GATE_FAILED:
        return
    if directory.completed_step(run_dir, recipe, identity, bundled=False) is not None:
        raise GateError(
            f"{run_dir} is trained, and its scores did not pass the gate of its recipe: there is nothing to train",
            hint="`ups why` shows what does not hold; `ups run` judges again after a change of the gate, and makes the "
            "bundle once it is passed; to train longer give the last stage more steps",
        )


def check_latents(run_dir: Path, recipe: Recipe, readers: Sequence[Reader]) -> None:
    """Raises DataError if a cache of latents is not of the encoder, data and statistics of the run."""
    if any(stage.cache_place for stage in recipe.stages):
        from ups.run.assemble import OpenData
        from ups.run.latent_caching import check_encoders

        check_encoders(run_dir, recipe, OpenData(readers, directory.read_statistics(run_dir, readers)))


def start_ranks(
    run_dir: Path,
    recipe: Recipe,
    ranks: int,
    identity: RunIdentity,
    output: Output,
    trackers: Trackers,
    host_info: HostInfo | None,
    mirror: BucketMirror,
) -> int:
    """Start the ranks of a prepared run that is held, and stay until its verdict; returns the exit code of the run."""
    if not hasattr(os, "memfd_create"):
        raise MachineError("supervised ranks need Linux", hint="train in one process: ups.fit (docs/install.md)")
    share = -(-max(size for n in range(len(recipe.stages)) for size in recipe.data_of(n).batch_sizes) // ranks)
    options = _options(run_dir, recipe, ranks, host_info)
    chosen: dict[str, int] = {}
    if recipe.engine.micro_batch_size == "auto":
        # Hosts of a run are taken to be alike.
        size = auto_micro_batch(run_dir, ranks, memory_available_bytes() // len(options.local_ranks))
        logger.info("engine.micro_batch_size=auto: %d samples fit", size)
        chosen = {MICRO_BATCH_SIZE: size}
    options = replace(
        options,
        max_restarts=recipe.supervise.max_restarts,
        micro_batch_size=min(chosen.get(MICRO_BATCH_SIZE) or recipe.engine.fixed_micro_batch_size or share, share),
        chosen=chosen,
        identity=identity,
        check_inputs=lambda: directory.check_inputs(run_dir, recipe, identity),
        last_step=directory.last_step_of(recipe),
        trackers=trackers,
        mirror=mirror,
    )
    with output.following(run_dir, recipe) as say:
        if host_info is None:
            return supervise(options, say)
        with head_link(host_info, ranks, __version__, run_dir) as link:
            return supervise(options, say, link)


def auto_micro_batch(run_dir: Path, ranks: int, host_bytes: int) -> int:
    """Micro-batch size for a run whose directory is prepared. No torch in this process.

    host_bytes: memory of this host for each of its ranks. Raises MachineError if not even one sample fits.
    """
    command = module_command("ups.run.planning", str(run_dir), str(ranks), str(host_bytes))
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_REHEARSAL_SECONDS, check=False)
        problem = last_line(done.stderr) if done.returncode else ""
    except subprocess.TimeoutExpired:
        problem = f"the rehearsal took more than {_REHEARSAL_SECONDS} s"
    if problem:
        raise TrainingError(
            f"no micro-batch could be chosen for engine.micro_batch_size=auto: {problem}",
            hint="set engine.micro_batch_size to a number of samples; `ups plan` shows what stages need",
        )
    answer = json.loads(done.stdout.splitlines()[-1])
    if answer["micro_batch_size"] is None:
        raise MachineError(
            f"stage {answer['stage']} does not fit with one sample: {answer['usable_bytes'] / 2**30:.1f} GiB usable",
            hint="use engine.activation_checkpointing, engine.strategy=fsdp on more ranks, or a smaller model; "
            "`ups plan` shows what takes the memory",
        )
    return int(answer["micro_batch_size"])


def _release_followers(run_dir: Path, ranks: int, host_info: HostInfo, line: str, code: int = 0) -> None:
    """Tell the other hosts of a run that there is nothing to do."""
    with head_link(host_info, ranks, __version__, run_dir) as link:
        dismiss(link, line, code)


def _release_followers_after(error: UpsError, run_dir: Path, ranks: int, host_info: HostInfo) -> None:
    """Tell the other hosts why the run cannot start: they would wait for host 0 until their deadline."""
    made = not run_dir.exists()
    # Whatever goes wrong here, the error that is on its way is the one to show.
    with contextlib.suppress(UpsError), hold_run(run_dir):
        try:
            logger.warning("telling the other hosts that the run cannot start")
            _release_followers(
                run_dir, ranks, host_info, f"host 0 cannot start the run: {error.one_line()}", error.exit_code
            )
        finally:
            if made:
                directory.leave_no_trace(run_dir, directory.INPUTS)


def _options(run_dir: Path, recipe: Recipe, ranks: int, host_info: HostInfo | None) -> Options:
    """What every supervisor of the run knows about its ranks."""
    threads = recipe.engine.threads or (1 if ranks > 1 else None)
    return Options(
        run_dir=run_dir,
        ranks=ranks,
        command=tuple(module_command("ups.run.rank_main", str(run_dir))),
        environment={"OMP_NUM_THREADS": str(threads)} if threads and "OMP_NUM_THREADS" not in os.environ else {},
        show_rank=None,
        host_info=host_info,
    )


def leave_bundle(run_dir: Path, output: Output) -> None:
    """Score a completed run on its test split and write RUN/bundle."""
    from ups.run.scoring import bundle_of_run

    with output.scoring() as progress:
        path, results = bundle_of_run(str(run_dir), progress=progress)
    output.scored(results, path)


def fit(recipe: RecipeLike, *, progress: bool = True, **overrides: Any) -> Run:
    """Train a recipe here, on one rank, with a progress line; or go on with a run that was interrupted.

    recipe and overrides as in `train`; the losses are those of `train(recipe, ranks=1)`, bit by bit, for the same
    number of threads. An interrupt (Ctrl-C, "stop" in a notebook) saves and returns the run in state 'stopped'; a
    second one leaves at once and raises KeyboardInterrupt. An error is written into the run, for `run.why()`, and
    raised. Components that this process registered are visible; `train` starts new processes that do not see them.
    """
    resolved = resolve_recipe(recipe, overrides)
    run_dir = run_dir_for(recipe, resolved)
    with messages_shown(progress):
        train_resolved(resolved, run_dir, 1, Printed() if progress else Output(), start=_start_here)
    return Run(run_dir)


def _start_here(
    run_dir: Path, recipe: Recipe, ranks: int, identity: RunIdentity, output: Output, trackers: Trackers, *_: object
) -> int:
    """Train in this process; returns the exit code of the run."""
    from ups.run.in_process import train_in_process

    with output.following(run_dir, recipe) as say:
        return train_in_process(run_dir, recipe, identity, say, trackers)


class Output:
    """Keeps silent. `ups train`, `ups run` and `progress=True` put others in its place."""

    def completed_before(self, run_dir: Path, step: int) -> None:
        """There is nothing to do: the run was completed by an earlier start."""

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        """The scores of a completed run, and where its bundle is."""

    @contextlib.contextmanager
    def following(self, run_dir: Path, recipe: Recipe | None) -> Iterator[Callable[[str], None]]:
        """Show progress while entered; gives the function that takes whole lines (faults, the verdict).

        recipe: None on a host that follows another one, where lines are about its own ranks.
        """
        yield lambda line: None

    @contextlib.contextmanager
    def scoring(self) -> Iterator[Callable[[str, int, int], None] | None]:
        """Show progress while entered; gives the function that takes what is done, how much of it, of how much."""
        yield None

    @contextlib.contextmanager
    def working(self, name: str, does: str) -> Iterator[None]:
        """A step is being done while this is entered."""
        yield

    def ended(self, record: StepRecord) -> None:
        """A step was done, or has failed."""

    def pronounced(self, line: str) -> None:
        """The line of the verdict, after the gate."""

    def unchanged(self, record: StepRecord) -> None:
        """A step is left out: it was done, and nothing that it depends on has changed."""

    def closing(self, words: str) -> None:
        """Nothing is left to do, or the training has stopped: what to do next."""


def write_lines(text: str) -> None:
    """Write whole lines to standard output."""
    sys.stdout.write(printable(text, keep="\n") + "\n")
    sys.stdout.flush()


class Printed(Output):
    """Lines to `write`, by default on standard output; progress on standard error.

    more_steps: how the user gives a stage more steps.
    """

    def __init__(
        self,
        write: Callable[[str], None] = write_lines,
        styled: Callable[..., str] = plain,
        more_steps: str = "stages__{}__{}=MORE",
    ) -> None:
        self._write, self._styled, self._more_steps = write, styled, more_steps

    def completed_before(self, run_dir: Path, step: int) -> None:
        stages = directory.read_run_recipe(run_dir).recipe.stages
        way = self._more_steps.format(len(stages) - 1, "steps" if stages[-1].steps is not None else "budget_seconds")
        bundle = RunDir(run_dir).bundle
        head = f"{path_text(run_dir)} is completed: step {step}, verified; its bundle is {path_text(bundle)}"
        warnings = [f"WARNING: {text}" for text in stored_warnings(bundle)[1]]
        self._write("\n".join([head, f"to train it longer: {way}", *warnings]))

    def scored(self, results: Sequence[Mapping[str, Any]], bundle: Path) -> None:
        from ups.run.scoring import score_lines

        self._write(f"{score_lines(results, self._styled)}\n{written_words(bundle)}")

    @contextlib.contextmanager
    def following(self, run_dir: Path, recipe: Recipe | None) -> Iterator[Callable[[str], None]]:
        if recipe is None:
            yield lambda line: self._write(printable(line))
            return
        stages = [stage.type for stage in recipe.stages]
        with ProgressLine() as line, MetricsFollower(RunDir(run_dir).metrics, stages, line) as rows:
            line.show("starting", in_log=False)  # a rank needs some seconds for its imports
            yield rows.say

    @contextlib.contextmanager
    def scoring(self) -> Iterator[Callable[[str, int, int], None] | None]:
        with ProgressLine() as line:
            yield line.count


@contextlib.contextmanager
def messages_shown(progress: bool) -> Iterator[None]:
    """Show warnings on standard error to who asked for progress and has not configured logging."""

    def write(record: logging.LogRecord) -> None:
        sys.stderr.write(short_line(record) + "\n")

    with log_shown_by(write) if progress else contextlib.nullcontext():
        yield
