"""Success is proven, not believed: what speaks against a run that says it is done."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ups.errors import UpsError
from ups.record.causes import base_name
from ups.record.identity import RunIdentity
from ups.supervise.checkpoints import prove_step
from ups.supervise.restart import NOT_RETRIED


def missing_proof(
    run_dir: Path,
    last_step: int,
    expected: int | None,
    identity: RunIdentity | None,
    check_inputs: Callable[[], None] | None,
) -> tuple[str, str]:
    """Cause and message of what speaks against the success; two empty texts if nothing does.

    last_step: where the ranks say they are done; expected: where they must be, if the recipe fixes it.
    """
    if expected is not None and last_step != expected:
        return "unproven(last_step)", f"the ranks are done at step {last_step} of {expected}"
    error = prove_step(run_dir, last_step, identity)
    try:
        if error is None and check_inputs is not None:
            check_inputs()
    except UpsError as problem:
        error = problem
    if error is None:
        return "", ""
    # What names a substitution keeps its name; damage and absence mean that nothing is proven.
    named = base_name(error.cause) in NOT_RETRIED
    return (error.cause if named else "unproven(final_checkpoint)"), error.message
