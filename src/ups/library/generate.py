"""`ups.generate_data`: data of a task from its reference solver, to try things on.

The solvers run under `ups data generate`, not in this process: they bring JAX, and their pool of processes would start
a script without `if __name__ == "__main__"` again in every worker.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping

from ups.errors import ConfigError, DataError, MachineError, MissingExtraError, UpsError
from ups.library.data import Dataset, open_data

_ERRORS: dict[str, type[UpsError]] = {
    kind.cause: kind for kind in (ConfigError, DataError, MachineError, MissingExtraError)
}


def generate_data(
    task: str,
    out: str | os.PathLike[str] = "data",
    *,
    trajectories: tuple[int, int, int] = (512, 64, 64),
    resolution: int | None = None,
    frames: int | None = None,
    parameters: Mapping[str, float] | None = None,
    seed: int = 0,
    processes: int | None = None,
    overwrite: bool = False,
) -> Dataset:
    """Make OUT/TASK.zarr like `ups data generate`, and open it. What is there already is kept.

    trajectories: of train, valid and test. resolution: stored points of each axis; frames: stored frames. parameters:
    values to give instead of drawing them. processes: of the solver, default one for each core.
    """
    options = {"--trajectories": ",".join(map(str, trajectories)), "--resolution": resolution, "--frames": frames}
    options |= {"--seed": seed, "--processes": processes, "--out": os.fspath(out)}
    words = [f"{name}={value}" for name, value in options.items() if value is not None]
    words += [f"--parameter={name}={value!r}" for name, value in (parameters or {}).items()]
    words += ["--overwrite"] if overwrite else []
    command = processes.module_command("ups", "data", "generate", task, *words, "--json")
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        # Who is killed leaves no solver behind, which would hold the store against the next try.
        preexec_fn=processes.bound_to(os.getpid()),
    )
    try:
        found = json.loads(done.stdout)
    except ValueError:
        raise MachineError(f"the generation of '{task}' ended without a result: {done.stderr[-500:].strip()}") from None
    if done.returncode:
        error = found["error"]
        raise _ERRORS.get(error["cause"], MachineError)(error["message"], hint=error["hint"])
    return open_data(found[0]["path"])
