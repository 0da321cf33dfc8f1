"""Whether there is anything left to do for a run: it is completed, that is proven again, and its bundle is there."""

from __future__ import annotations

from pathlib import Path

from ups.config.schema import Recipe
from ups.errors import UpsError
from ups.record.files import load_object
from ups.record.identity import RunIdentity
from ups.record.manifest import verify
from ups.record.run_dir import BUNDLE_FILE, RunDir
from ups.run.directory import last_step_of
from ups.run.identity import check_inputs
from ups.supervise.checkpoints import missing_proof
from ups.supervise.run_file import TRAINED, read_run, was_started


def completed_step(run_dir: Path, recipe: Recipe, identity: RunIdentity, *, bundled: bool = True) -> int | None:
    """The last step of a run that needs nothing more; None if it has to be trained, proven or bundled (again).

    bundled: whether it needs a bundle, too.
    """
    if not was_started(run_dir):
        return None
    document = read_run(run_dir)
    step = document["checkpoint"]
    if document["state"] not in TRAINED or step is None or (bundled and not _has_bundle_of(run_dir, step)):
        return None
    if any(extension["step"] == step for extension in document.get("extensions", [])[-1:]):
        return None  # it was given a longer last stage since
    cause, _ = missing_proof(
        run_dir, step, last_step_of(recipe), identity, lambda: check_inputs(run_dir, recipe, identity)
    )
    return None if cause else step


def _has_bundle_of(run_dir: Path, step: int) -> bool:
    bundle = RunDir(run_dir).bundle
    try:
        verify(bundle)
        provenance = load_object(bundle / BUNDLE_FILE).get("provenance")
    except (UpsError, OSError, ValueError):
        return False
    return isinstance(provenance, dict) and provenance.get("step") == str(step)
