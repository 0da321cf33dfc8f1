"""The steps from a recipe to a bundle that has passed its gate. Each does what a command does, by the same functions.

A step has inputs and outputs, as hashes. It is done again when its inputs have changed, or when what it made is not
there any more; the order and the record are in `run_recipe.py`. Another step is another row of STEPS. What needs torch
imports it inside: a call that finds nothing to do never does.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ups.buckets.path import data_path, matching_paths
from ups.config.description import SETTINGS, SourceConfig
from ups.config.identity import recipe_identity
from ups.config.recipe import ResolvedRecipe, plain_data
from ups.config.schema import Recipe, TaskConfig
from ups.data.content import content_sample
from ups.doctor.checks import CHECK_PROGRAMS
from ups.doctor.examine import Examination, examine
from ups.errors import ConfigError, DataChangedError, DataError, UpsError
from ups.inference.stored_scores import stored_warnings
from ups.library.train import Output, train_resolved
from ups.record.files import write_file_atomically
from ups.record.identity import file_sha256
from ups.record.manifest import read_manifest, verify
from ups.record.processes import module_command
from ups.record.run_dir import CALIBRATION_NAME, CONFIG_NAME, RunDir
from ups.record.text import counted, duration_text, last_line, path_text, size_text
from ups.run.gate import gate_words, judge, read_results
from ups.run.software import describe
from ups.run.steps_file import digest, read_steps
from ups.supervise.bucket_mirror import BucketMirror
from ups.supervise.run_file import GATE_FAILED, TRAINED, hold_run, note_gate, read_run, was_started

logger = logging.getLogger(__name__)

# Of a step that leaves nothing on the disk that could be looked at.
NOTHING = "-"
# In the attributes of a store that was imported: a hash of the files that it was made from.
MADE_FROM = "made_from"


def before_gate(say: Callable[[str], None], recipe: Recipe) -> Callable[[str], None]:
    """`say` without the verdict of a training that came to its end, where a gate is about to pronounce another."""

    def said(line: str) -> None:
        if not (recipe.gate and line.startswith("VERDICT state=completed ")):
            say(line)

    return said


class StoppedError(Exception):
    """The training did not come to its end; its verdict has been said. code: what the command returns."""

    def __init__(self, code: int, cause: str, says: str) -> None:
        super().__init__(says)
        self.code, self.cause, self.says = code, cause, says


@dataclass
class Job:
    """What the steps work on. gate_failed: what of the gate does not hold, '' if it was passed or not judged yet."""

    resolved: ResolvedRecipe
    run_dir: Path
    ranks: int
    output: Output
    gate_failed: str = ""
    _samples: dict[str, str] = field(default_factory=dict)
    # Hashes of the manifests of directories whose every byte was read in this call: each is read once.
    _hashed: set[str] = field(default_factory=set)

    @property
    def samples(self) -> dict[str, str]:
        """A hash of the content of each task's data, taken once the data is there."""
        if not self._samples:
            self._samples = {task.name: content_sample(task.paths)[0] for task in self.resolved.recipe.data.tasks}
        return self._samples

    @property
    def checkpoint(self) -> str:
        """Hash of the checkpoint with which the training ended; '' if there is none that is whole."""
        if not was_started(self.run_dir):
            return ""
        document = read_run(self.run_dir)
        if document["state"] not in TRAINED or document["checkpoint"] is None:
            return ""
        return self.committed(RunDir(self.run_dir).checkpoint(document["checkpoint"]))

    def committed(self, directory: Path) -> str:
        """Hash of the manifest of a committed directory; '' if it is not there, or a byte of it has changed."""
        try:
            manifest = verify(directory, deep=read_manifest(directory).sha256 not in self._hashed)
        except UpsError as error:
            if os.path.lexists(directory):
                logger.warning("%s is damaged: %s", path_text(directory), error.message)
            return ""
        self._hashed.add(manifest.sha256)
        return manifest.sha256

    def file(self, *names: str) -> str:
        """Hash of a file of the run, '' if it is not there."""
        return file_sha256(self.run_dir.joinpath(*names))

    def scores(self) -> str:
        """Hash of the scores of the run, '' if there are none."""
        return self.file(RunDir.scores.name)


@dataclass(frozen=True)
class RecipeStep:
    """One step. does: for a line while it runs; work: returns a line about the result.

    outputs: a hash of what lies there now, '' if it must be made.
    """

    name: str
    does: str
    inputs: Callable[[Job], Any]
    outputs: Callable[[Job], str]
    work: Callable[[Job], str]
    # Whether it is done although the gate was not passed.
    after_failed_gate: bool = True


def source_facts(task: TaskConfig) -> dict[str, Any]:
    """What the store of a task would be made from; of files their content, not their place or time."""
    source = task.source
    if source is None:
        return {}
    if source.type == "import":
        return {"type": "import", "path": task.path, MADE_FROM: _made_from(task, source)}
    # Where it is fetched from changes nothing about what is fetched.
    said = SETTINGS[source.type] - {"mirror"}
    return {"type": source.type, "path": task.path, **source.model_dump(mode="json", include=said)}


def _source_files(source: SourceConfig) -> list[str]:
    return matching_paths(source.files or [])


def _made_from(task: TaskConfig, source: SourceConfig) -> str:
    """Hash of the content of the files and of what is said about them; '' if a file is not there any more."""
    if not all(Path(file).exists() for file in _source_files(source)):
        return ""
    said = source.model_dump(mode="json", include={"description"})
    return digest([content_sample(_source_files(source))[0], said, task.valid_fraction, task.test_fraction])


def make_data(task: TaskConfig, progress: Callable[[int, int], None] | None = None) -> str:
    """Make the data of a task if it is not there; returns what was done. Raises DataError if there is nothing.

    progress: called with the bytes fetched so far and the bytes in all.
    """
    path, source = task.paths[0], task.source
    if source is None:
        missing = [one for one in task.paths if not data_path(one).exists()]
        if missing:
            raise DataError(
                f"{missing[0]} of task '{task.name}' does not exist",
                hint="correct the path, or say in `source` of the task how it is made",
            )
        return f"{path} is there"
    if source.type == "fetch":
        return _fetch_store(task, source, progress)
    existed = Path(path).exists()
    if not existed:
        _check_name(task, source)
    if source.type == "generate":
        _generate_store(task, source)
    else:
        _import_store(task, source)
    return f"{path} was there" if existed else f"made {path}"


def _fetch_store(task: TaskConfig, source: SourceConfig, progress: Callable[[int, int], None] | None) -> str:
    from ups.data.fetch import fetch, find

    name = find(source.dataset or "").name
    targets = [_place_in(path, name, task.name) for path in task.paths]
    out, files = targets[0][0], [file for _, file in targets if file]
    if any(other != out for other, _ in targets):
        raise ConfigError(
            f"task '{task.name}': its paths lie in several copies of {name}", hint="name files of one directory"
        )
    if files and source.only:
        raise ConfigError(
            f"task '{task.name}': its path names files, and `only` of its source as well",
            hint="leave `only` out, or name the directory as path",
        )
    fetched = fetch(name, out, only=files or source.only, mirror=source.mirror, progress=progress)
    return f"fetched {fetched.num_fetched} of {len(fetched.paths)} files of {name}"


def _place_in(path: str, name: str, task: str) -> tuple[Path, str]:
    """The directory into which a data set is fetched so that it lies at `path`, and the file of it; '' for all."""
    parts, wanted = Path(path).parts, tuple(name.split("/"))
    for at in range(len(parts) - len(wanted), -1, -1):
        if parts[at : at + len(wanted)] == wanted:
            return Path(*parts[:at]), "/".join(parts[at + len(wanted) :])
    raise ConfigError(
        f"task '{task}': {path} is not where {name} would be fetched to",
        hint=f"let the path end in {name}, or in {name}/FILE",
    )


def _store_name(task: TaskConfig, source: SourceConfig) -> str:
    return f"{source.task or task.name}.zarr"


def _check_name(task: TaskConfig, source: SourceConfig) -> None:
    """Raises ConfigError if the path that is missing is not what the source would make."""
    name = Path(task.paths[0]).name
    if not isinstance(task.path, str) or not name.endswith(".zarr"):
        raise ConfigError(
            f"task '{task.name}': its source makes a store, and {task.paths[0]} is not the name of one",
            hint="give one path that ends in .zarr",
        )
    if source.type == "generate" and name != _store_name(task, source):
        raise ConfigError(
            f"task '{task.name}': {task.paths[0]} does not exist, and its solver makes {_store_name(task, source)}",
            hint=f"end the path in {_store_name(task, source)}",
        )


def _generate_store(task: TaskConfig, source: SourceConfig) -> None:
    from ups.library.data import generate_data

    if Path(task.paths[0]).name != _store_name(task, source):
        return  # it is there (`_check_name`), and was moved there by the user
    # Also where the store is there: another data set under this name is refused.
    generate_data(
        source.task or task.name,
        Path(task.paths[0]).parent,
        trajectories=(source.trajectories[0], source.trajectories[1], source.trajectories[2]),
        resolution=source.resolution,
        frames=source.frames,
        parameters=source.parameters,
        seed=source.seed,
    )


def _import_store(task: TaskConfig, source: SourceConfig) -> None:
    from ups.data.pack import pack
    from ups.formats.zarr_store import read_store_attributes
    from ups.library.own_data import open_own

    path, now = Path(task.paths[0]), _made_from(task, source)
    if path.exists():
        generator = read_store_attributes(path).get("generator")
        known = generator.get(MADE_FROM) if isinstance(generator, dict) else None
        # A store that was made by other means says nothing; and files may be gone once they are imported.
        if known and now and known != now:
            raise DataChangedError(
                f"{path} was made from other files than {_source_files(source)[0]}, or by another description",
                hint="bring the old files back; or remove the store to import anew, and give the run another run.name",
            )
        return
    fractions = {"valid_fraction": task.valid_fraction, "test_fraction": task.test_fraction}
    reader, names = open_own(_source_files(source), source.description, **fractions)
    path.parent.mkdir(parents=True, exist_ok=True)
    pack(reader, path, generator={"source": names, MADE_FROM: now})


def _data_inputs(job: Job) -> Any:
    return {task.name: [task.path, source_facts(task)] for task in job.resolved.recipe.data.tasks}


def _data_outputs(job: Job) -> str:
    tasks = job.resolved.recipe.data.tasks
    if not all(Path(path).exists() for task in tasks for path in task.paths):
        return ""
    return digest(job.samples)


def _make_data(job: Job) -> str:
    job._samples = {}
    with job.output.scoring() as progress:
        return "; ".join(
            make_data(task, partial(progress, f"fetching {task.name}") if progress else None)
            for task in job.resolved.recipe.data.tasks
        )


def _validate_inputs(job: Job) -> Any:
    tasks = [task.model_dump(mode="json", exclude={"source", "weight"}) for task in job.resolved.recipe.data.tasks]
    return [job.samples, tasks]


def _validate(job: Job) -> str:
    from ups.data.validate import validate_paths

    count = 0
    with job.output.scoring() as progress:
        for task in job.resolved.recipe.data.tasks:
            report = validate_paths(
                task.paths,
                allow=task.allow,
                progress=partial(progress, f"validating {task.name}") if progress else None,
                problem=task.problem,
                format=task.format,
                description=task.description,
            )
            if report.num_findings:
                first = report.findings[0]
                more = f" (and {report.num_findings - 1} more)" if report.num_findings > 1 else ""
                raise DataError(
                    f"task '{task.name}': {first.kind}: {first.where}: {first.message}{more}",
                    hint=f"see all with: ups data validate {path_text(Path(task.paths[0]))}; what is right for "
                    "this data goes into `allow` of the task",
                )
            count += report.num_trajectories
    return f"{count} trajectories, nothing wrong"


def _doctor_inputs(job: Job) -> Any:
    libraries = {name: value for name, value in describe().items() if name != "extras"}
    return [plain_data(job.resolved.recipe)["engine"], job.ranks, os.uname().nodename, libraries]


def _examine(job: Job) -> str:
    # The part that the recipe does not change. What the recipe adds, the first step of the training shows as well.
    quick = ("machine", "libraries", *(("group",) if job.ranks > 1 else ()))
    verdicts = examine(Examination(job.ranks, job.run_dir, job.resolved.text, only=quick))
    failed = verdicts[-1] if verdicts and not verdicts[-1].ok else None
    if failed is None:
        return f"{counted(len(verdicts), 'check')} with {counted(job.ranks, 'rank')}"
    errors = {check.name: check.error for program in CHECK_PROGRAMS for check in program.checks}
    raise errors[failed.check](f"the doctor's check '{failed.check}': {failed.says}", hint=failed.advice)


def _plan_inputs(job: Job) -> Any:
    plain = plain_data(job.resolved.recipe)
    how = {name: plain[name] for name in ("engine", "checkpoint")}
    return [recipe_identity(job.resolved.recipe), job.samples, how, job.ranks, os.uname().nodename]


def _plan(job: Job) -> str:
    """Plan the recipe for this machine. A plan stops nothing: times are estimates, and a run that does not fit halves
    its micro-batch by itself.
    """
    with tempfile.TemporaryDirectory(prefix="ups-plan-") as folder:
        path = Path(folder) / CONFIG_NAME
        path.write_text(job.resolved.text)
        # In a separate process: this one works when torch is what is broken.
        command = module_command("ups", "plan", str(path), "--gpus", str(job.ranks), "--json")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = last_line(done.stderr)
        _write_plan(job, {"problem": last})
        return f"none could be made: {last}"
    plan = json.loads(done.stdout)
    _write_plan(job, plan)
    seconds = sum(stage["seconds"] for stage in plan["stages"])
    peak = max(stage["memory_bytes"]["peak"] for stage in plan["stages"])
    fits = all(stage["fits"] for stage in plan["stages"])
    return f"about {duration_text(seconds)} of training, {size_text(peak)} of tensors on a rank" + (
        "" if fits else ", which do not fit"
    )


def _write_plan(job: Job, plan: dict[str, Any]) -> None:
    write_file_atomically(RunDir(job.run_dir).plan, (json.dumps(plan, indent=1) + "\n").encode())


def _train_inputs(job: Job) -> Any:
    return [recipe_identity(job.resolved.recipe), job.samples]


def _train(job: Job) -> str:
    code = train_resolved(job.resolved, job.run_dir, job.ranks, job.output, bundle=False)
    document = read_run(job.run_dir)
    if code:
        raise StoppedError(code, document["cause"] or document["state"], document["verdict"])
    return f"step {document['checkpoint']}, verified"


def _evaluate_inputs(job: Job) -> Any:
    return [job.checkpoint, job.samples]


def _evaluate(job: Job) -> str:
    from ups.run.scoring import add_cost, report_folder, score, write_scores
    from ups.run.trained import load_trained

    with hold_run(job.run_dir), job.output.scoring() as progress:
        trained = load_trained(str(job.run_dir))
        results = score(trained, progress=progress)
        add_cost(trained, results)
        path = write_scores(report_folder(job.run_dir), trained, results, page=False)[0]
    job.output.scored(results, path)
    return f"{counted(len(results), 'task')} on the test split"


def _gate_inputs(job: Job) -> Any:
    conditions = [condition.model_dump(mode="json") for condition in job.resolved.recipe.gate]
    return [conditions, job.scores()]


def _gate_outputs(job: Job) -> str:
    document = read_run(job.run_dir)
    if job.resolved.recipe.gate:
        return digest(document["gate"]) if "gate" in document else ""
    return NOTHING if "gate" not in document and document["state"] != GATE_FAILED else ""


def _judge(job: Job) -> str:
    """Judge the scores that are there, and put the verdict into run.json."""
    judged = judge(job.resolved.recipe.gate, read_results(RunDir(job.run_dir).scores))
    job.gate_failed = gate_words(judged)
    with hold_run(job.run_dir):
        # The recipe learns the same as the run has (the training is done); its gate may be a new one.
        if job.file(CONFIG_NAME) != job.resolved.hash:
            write_file_atomically(RunDir(job.run_dir).config, job.resolved.text.encode())
        verdict = note_gate(job.run_dir, [one.to_json() for one in judged], job.gate_failed)
    if judged:
        job.output.pronounced(verdict)
    return job.gate_failed or (f"{len(judged)} conditions hold" if judged else "the recipe sets no bar")


def _calibrate_outputs(job: Job) -> str:
    sets_aside = any(task.calibration_fraction for task in job.resolved.recipe.data.tasks)
    return job.file(CALIBRATION_NAME) if sets_aside else NOTHING


def _calibrate(job: Job) -> str:
    if _calibrate_outputs(job) == NOTHING:
        return "no task sets trajectories aside (calibration_fraction): no error bars"
    from ups.inference.calibration import write_calibration
    from ups.run.calibrate import calibrate, choose
    from ups.run.trained import load_trained

    with hold_run(job.run_dir), job.output.scoring() as progress:
        trained = load_trained(str(job.run_dir))
        found = calibrate(trained, choose(trained, {}), progress=progress)
        write_calibration(job.run_dir / CALIBRATION_NAME, found)
    return "; ".join(f"{task}: {one.document.words()}" for task, one in found.items())


def _bundle_inputs(job: Job) -> Any:
    return [job.checkpoint, job.scores(), *filter(None, [job.file(CALIBRATION_NAME)])]


def _bundle_outputs(job: Job) -> str:
    return job.committed(RunDir(job.run_dir).bundle)


def _bundle(job: Job) -> str:
    from ups.inference.calibration import read_calibration
    from ups.run.scoring import make_bundle, stored_results
    from ups.run.trained import load_trained

    results = stored_results(RunDir(job.run_dir).scores)
    with hold_run(job.run_dir), BucketMirror(job.run_dir, job.resolved.recipe.checkpoint):
        trained = load_trained(str(job.run_dir))
        stated = read_calibration(job.run_dir / CALIBRATION_NAME, trained.stepper.tasks)
        path = make_bundle(RunDir(job.run_dir).bundle, trained, results, stated)
    step, texts = stored_warnings(path)
    return "; WARNING: ".join([f"{path_text(path)} {_bundle_outputs(job)[:12]} after {step} steps", *texts])


def _report(job: Job) -> str:
    from ups.run.scoring import stored_results, write_page
    from ups.run.trained import load_trained

    results = stored_results(RunDir(job.run_dir).scores)
    with hold_run(job.run_dir):
        scoring = next((step.seconds for step in read_steps(job.run_dir) if step.name == "evaluate"), 0.0)
        return path_text(write_page(RunDir(job.run_dir).report, load_trained(str(job.run_dir)), results, scoring))


STEPS: Sequence[RecipeStep] = (
    RecipeStep("data", "making the data that is missing", _data_inputs, _data_outputs, _make_data),
    RecipeStep("validate", "reading all data once", _validate_inputs, lambda job: NOTHING, _validate),
    RecipeStep("doctor", "trying machine, libraries and ranks", _doctor_inputs, lambda job: NOTHING, _examine),
    RecipeStep("plan", "estimating memory and time", _plan_inputs, lambda job: job.file(RunDir.plan.name), _plan),
    RecipeStep("train", "training the stages", _train_inputs, lambda job: job.checkpoint, _train),
    RecipeStep("evaluate", "scoring on the test split", _evaluate_inputs, lambda job: job.scores(), _evaluate),
    RecipeStep("gate", "holding the scores against the gate", _gate_inputs, _gate_outputs, _judge),
    RecipeStep(
        "calibrate", "measuring errors", _evaluate_inputs, _calibrate_outputs, _calibrate, after_failed_gate=False
    ),
    RecipeStep("bundle", "writing the bundle", _bundle_inputs, _bundle_outputs, _bundle, after_failed_gate=False),
    RecipeStep(
        "report", "drawing the worst cases", _bundle_inputs, lambda job: job.file(RunDir.report_page.name), _report
    ),
)
