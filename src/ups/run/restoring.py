"""An empty run directory whose recipe names a mirror: the run in the bucket is brought back, if it is the same one.

The recipe of the copy must learn what this recipe learns, as for a run directory that exists. Of its run.json only what
explains the past and what checkpoints are held to is taken over: no process, no path and no setting of another machine
but the size of the micro-batch. No torch.
"""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

from ups.buckets.client import Bucket, open_bucket
from ups.buckets.run_copy import MAX_RECORD_BYTES, get, restore_bundle, restore_checkpoints, restore_record, steps_in
from ups.config.identity import first_difference, other_length
from ups.config.recipe import resolve
from ups.config.schema import Recipe
from ups.errors import CheckpointError, ConfigError, IntegrityError
from ups.record.files import MAX_RUN_BYTES, write_file_atomically
from ups.record.identity import RunIdentity, file_sha256
from ups.record.manifest import clean_temporaries
from ups.record.run_dir import CONFIG_NAME, RunDir
from ups.supervise.fault import MICRO_BATCH_SIZE, stored_overrides
from ups.supervise.run_file import RunDocument, parse_run

logger = logging.getLogger(__name__)
_MAX_CONFIG_BYTES = 16 * 2**20
_OTHER_PLACE = "give each run a place of its own: --set checkpoint.mirror=s3://BUCKET/OTHER-PREFIX"


def restore_run(run_dir: Path, recipe: Recipe) -> int | None:
    """Bring the run back from its mirror if the run directory has none; returns the step it continues from, None if it
    begins here. For who holds the run.

    run.json comes last: until then a killed start is done again. Raises ConfigError if the bucket has a run of another
    recipe, CheckpointError if nothing in it can be trusted, BucketError if it cannot be asked.
    """
    url = recipe.checkpoint.mirror
    if url is None or RunDir(run_dir).has_run_json:
        return None
    bucket = open_bucket(url)
    try:
        content = get(bucket, RunDir.run_json.name, MAX_RUN_BYTES)
    except IntegrityError as error:
        raise CheckpointError(error.message, hint=_OTHER_PLACE) from error
    if content is None or not steps_in(bucket):
        return None
    document, identity = _believed(bucket, content)
    config = _same_recipe(bucket, recipe)
    clean_temporaries(RunDir(run_dir).checkpoints)
    step = restore_checkpoints(bucket, run_dir, identity)
    write_file_atomically(RunDir(run_dir).config, config)
    restore_record(bucket, run_dir, MAX_RECORD_BYTES)
    if identity.statistics and file_sha256(RunDir(run_dir).statistics) != identity.statistics:
        RunDir(run_dir).statistics.unlink(missing_ok=True)  # measured again, and compared with the identity
    restore_bundle(bucket, RunDir(run_dir).bundle)
    document["name"] = run_dir.name
    write_file_atomically(RunDir(run_dir).run_json, (json.dumps(document, indent=1) + "\n").encode())
    # A warning: a new run directory that begins in the middle is a surprise.
    logger.warning("%s was empty: the run continues from checkpoint %s of %s", run_dir, step, bucket.url)
    return step


def _believed(bucket: Bucket, content: bytes) -> tuple[RunDocument, RunIdentity]:
    """What is taken over from the run.json of the copy, and the identity of the run."""
    try:
        document = parse_run(content)
    except ValueError as error:
        raise CheckpointError(
            f"{bucket.url}/{RunDir.run_json.name} cannot be used: {error}", hint=_OTHER_PLACE
        ) from error
    identity = RunIdentity.from_json(document.get("identity"))
    if identity is None:
        raise CheckpointError(f"{bucket.url}/{RunDir.run_json.name} does not say which run this is", hint=_OTHER_PLACE)
    for name in ("hosts", "machine", "mirror", "trackers"):
        document.pop(name, None)  # type: ignore[misc]
    micro_batch_size = stored_overrides(document.get("overrides", {})).get(MICRO_BATCH_SIZE)
    overrides = {MICRO_BATCH_SIZE: micro_batch_size} if type(micro_batch_size) is int and micro_batch_size > 0 else {}
    document |= {"supervisor_pid": 0, "supervisor_started": 0, "blackbox_dir": "", "host": "", "overrides": overrides}
    return document, identity


def _same_recipe(bucket: Bucket, recipe: Recipe) -> bytes:
    """The config.yaml of the copy. Raises ConfigError if it learns something else than `recipe`."""
    content = get(bucket, CONFIG_NAME, _MAX_CONFIG_BYTES)
    if content is None:
        raise CheckpointError(f"{bucket.url} has checkpoints but no {CONFIG_NAME}", hint=_OTHER_PLACE)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / CONFIG_NAME
        file.write_bytes(content)
        stored = resolve(file, other_files=False).recipe
    difference = first_difference(stored, recipe)
    if difference and other_length(stored, recipe) is None:
        raise ConfigError(f"{bucket.url} holds a run of another recipe: {difference}", hint=_OTHER_PLACE)
    return content
