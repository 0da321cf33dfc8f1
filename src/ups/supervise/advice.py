"""What to do about a cause, in one or two sentences; docs/failures.md says more under the same name."""

from __future__ import annotations

from ups.record.causes import CAUSES, base_name

ADVICE: dict[str, str] = {
    "exception": "Read the traceback below and fix the line that is named; if it lies inside ups, please report it.",
    "out_of_memory": "The run halves engine.micro_batch_size by itself. If it still does not fit: "
    "engine.strategy=fsdp, engine.activation_checkpointing=true, fewer data.loader.workers, or a smaller model.",
    "signal": "Native code crashed at the Python line that is named. Try `ups doctor RECIPE`; typical reasons are "
    "two builds of one library in a process, a file handle used across a fork, or /dev/shm that is too small.",
    "killed": "Something outside the run sent this signal: a scheduler, an administrator, a person. Look at the "
    "scheduler's log. It was not the kernel for lack of memory: its counter did not move.",
    "early_exit": "Something called exit in the middle of the run: look for sys.exit and os._exit in your code.",
    "exit": "The program left with this code by itself: look for sys.exit and os._exit, and at the log.",
    "stopped": "Somebody sent SIGSTOP to the process, or a debugger held it. Find out who; the run restarts by itself.",
    "stalled": "Look at the stack of the named rank: it shows what it waits for, often a file system or a lock.",
    "deadline": "A first save or evaluation may take an hour, the end of a run a minute; a run that was asked to leave "
    "has less time. Look at the stack: the usual reason is a file system that does not answer.",
    "collective_mismatch": "Code that all ranks must run alike ran differently on the named rank: look for a branch "
    "on the rank or the data, or a caught exception, around the named operation.",
    "worker_killed": "A reader process of the loader died. After a crash the line of the reader is named: check the "
    "file with `ups data validate`. After SIGKILL: fewer data.loader.workers, or a smaller data.loader.prefetch.",
    "connection_lost": "No rank on this host failed by itself. Look at the other hosts, then at the network between.",
    "host_lost": "See whether the host that is named runs, whether it is reached over the network, and what its own "
    "`ups train` has printed. Start the same commands again on all hosts: the run resumes.",
    "head_lost": "See what happened to host 0, then start the same commands again on all hosts: the run resumes.",
    "launcher_failed": "A rank, or the small process that starts it, could not be started or failed: see the message "
    "and the limits on processes and memory of this host.",
    "unproven": "All ranks left without an error, but the last checkpoint is missing or damaged. Do not use the "
    "result; start the run again, it goes on from the last whole checkpoint.",
    "supervisor_died": "The supervisor was killed, and all ranks with it. Start the same command again: it resumes.",
    "supervisor_error": "The supervisor itself met an error and ended all ranks; the message is in the verdict. "
    "Start the same command again: it resumes. If it is no lack of space or of processes, please report it.",
    "config": "Correct the recipe; `ups config check RECIPE` tests it without starting anything.",
    "plugin": "Repair or install the package that is named; `ups --version --verbose` lists all parts.",
    "recipe_changed": "Bring config.yaml of the run back as it was, or start a new run with the new recipe: "
    "--set run.dir=PATH. Settings that say how a run is done may change: `ups train RUN --set ...`.",
    "data": "Check the file that is named with `ups data validate`.",
    "data_changed": "Bring the data back as it was, or start a new run on the new data: --set run.dir=PATH. "
    "`ups data validate` reads every byte.",
    "statistics_changed": "Bring statistics.json of the run back as it was, or start a new run: --set run.dir=PATH.",
    "fetch_content": "The server sends something else than the file: try another one with --mirror.",
    "fetch_changed": "The file on the server changed on the way: start the same command again.",
    "fetch_refused": "The server says no: see the address in the message, or name another server with --mirror.",
    "fetch_unavailable": "Start the same command again later, or with --mirror: it goes on where it was.",
    "store_unavailable": "See whether the server that is named runs and is reached from this host, then start the same "
    "command again: it goes on from the last checkpoint.",
    "store_refused": "See whether the address is right, and whether the environment of the run has credentials that "
    "may read it (docs/object_stores.md).",
    "disk_full": "Free some space where the run is written and start the same command again: it goes on from the last "
    "checkpoint.",
    "run_held": "Another `ups train` works on this run: wait for it, or see `ups status`. Nothing was changed.",
    "instance_left": "Look for the machine that is named in the console of the provider, and destroy it there.",
    "environment": "The machine lacks something: see the message; `ups doctor` checks all of it before a run.",
    "missing_extra": "Install the extra that the message names.",
    "tracker": "Call `ups track sync RUN` again when the tracker can be reached; the run itself is not touched.",
    "bucket": "Check the network, the address and the credentials; then start the same command again.",
    "distributed": "See the message and the logs of all ranks; `ups doctor` tries each step of the start alone.",
    "training": "Lower the learning rate, use float32, or look at the data: the loss left the finite numbers.",
    "checkpoint": "Check space and permissions where checkpoints are written.",
    "foreign_checkpoint": "Somebody copied, renamed or replaced a checkpoint in this run directory. Remove the one "
    "that is named and start the same command again: it goes on from the one before it.",
    "integrity": "Bytes on disk changed after they were written. Check the disk; an older checkpoint is used instead.",
    "run_directory_lost": "Find out who moved or deleted the directory. Put it back where it was and start the run "
    "again: it goes on from the last checkpoint in it. What was trained after that checkpoint is lost.",
    "gate": "The result is below the bar that the recipe sets: train longer, or lower the bar on purpose.",
    "bundle": "The bundle is damaged or does not fit: export it again.",
    "error": "See the message and the traceback below.",
}


def meaning(cause: str) -> str:
    """What a cause means."""
    return CAUSES.get(base_name(cause), "a cause that this version does not know")


def what_to_do(cause: str) -> str:
    """The next step for a person."""
    return ADVICE.get(base_name(cause), "See the log and the evidence below.")
