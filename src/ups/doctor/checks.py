"""The checks of `ups doctor` in their order: which process runs which, what each proves, and what a failure means.

Names only: the checks themselves are `ups.doctor.probes`, started and never imported. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from ups.errors import (
    CheckpointError,
    DataError,
    DistributedError,
    MachineError,
    OutOfMemoryError,
    TrainingError,
    UpsError,
)


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that is proved; `means` and `advice` are for a failure that does not explain itself.

    The function `check_NAME` of its program's file in `ups.doctor.probes` does it.
    """

    name: str
    means: str
    advice: str = "see the message"
    error: type[UpsError] = TrainingError

    @property
    def exit_code(self) -> int:
        """The code of `ups doctor` if this fails: that of the error with which a run would end."""
        return self.error.exit_code


@dataclass(frozen=True, slots=True)
class CheckProgram:
    """One process, or one per rank, that runs `checks` in order: `python -m ups.doctor.probes MODULE WORK_DIR`.

    file: the module of `ups.doctor.probes` that has the checks, if it is not called like the program.
    """

    module: str
    checks: tuple[Check, ...]
    ranks: bool = False
    recipe: bool = True
    seconds: float = 300.0
    file: str = ""


_VALIDATE = "look at it with `ups data validate`"
_MACHINE = Check("machine", "this machine lacks something that every run needs", error=MachineError)
_LIBRARIES = Check(
    "libraries",
    "an import fails or crashes: the installation is broken, whatever the recipe says",
    "make a fresh environment and install everything from one source",
    MachineError,
)
_ACCELERATOR = Check(
    "accelerator",
    "the driver, CUDA or a GPU does not work, even alone",
    "check nvidia-smi and the system log, or use --set engine.device=cpu",
    MachineError,
)
_WORKERS = "try --set data.loader.workers=0"
_GROUP = Check(
    "group",
    "ranks cannot find each other on this machine",
    "check that the loopback device is up and that nothing forbids local sockets",
    DistributedError,
)
_COLLECTIVE = Check(
    "collective",
    "ranks find each other, but cannot exchange data",
    "NCCL: try NCCL_DEBUG=INFO, NCCL_P2P_DISABLE=1, NCCL_IB_DISABLE=1; gloo: GLOO_SOCKET_IFNAME=lo",
    DistributedError,
)
_MODEL = (
    Check("model", "the model cannot be built or does not compute", "check the section `model`"),
    Check("backward", "the loss of a stage cannot be differentiated as it must", "check the stage"),
    Check("alone", "even one rank cannot train two steps", "try `ups train` with --ranks 1 for the whole log"),
)
_SMALLER = "use a smaller engine.micro_batch_size"
_WRAP = (
    Check(
        "wrap",
        "the model computes alone, but not when it is spread over ranks",
        "try --set engine.strategy=ddp, engine.compile=false, or one rank",
    ),
    Check("memory", "the ranks need more memory than there is", _SMALLER, OutOfMemoryError),
    Check(
        "checkpoint",
        "a checkpoint cannot be written and read back where the run would live",
        "check the disk, or choose another place with --set run.dir=PATH",
        CheckpointError,
    ),
)
_PARITY = (
    Check("parity", "many ranks do not train as one rank does"),
    Check("equal", "ranks drift apart"),
    Check("evaluation", "metrics depend on the number of ranks"),
)
_DATA = (
    Check("data", "the data cannot be read as the recipe says", _VALIDATE, DataError),
    Check("loader", "reading in worker processes fails or crashes", _WORKERS, DataError),
)
_SAMPLES = Check("samples", "ranks do not share the data as the recipe says", error=DataError)
# In the order of an examination. `data` measures tasks that were never measured; `wrap` may compile, and meet a slow
# disk.
CHECK_PROGRAMS = (
    CheckProgram("machine", (_MACHINE,), recipe=False, file="libraries"),
    CheckProgram("libraries", (_LIBRARIES, _ACCELERATOR), recipe=False),
    CheckProgram("data", _DATA, seconds=1800.0),
    CheckProgram("group", (_GROUP, _COLLECTIVE), ranks=True, recipe=False, file="ranks"),
    CheckProgram("samples", (_SAMPLES,), ranks=True, file="ranks"),
    CheckProgram("model", _MODEL),
    CheckProgram("wrap", _WRAP, ranks=True, seconds=1800.0),
    CheckProgram("parity", _PARITY, ranks=True),
)
_OPENED = Check("opened", "the data cannot be opened or measured", _VALIDATE, DataError)
_REHEARSAL = Check("rehearsal", "the first steps of the run fail", "ups doctor RECIPE --bisect")
# Of `--bisect`.
OPENED = CheckProgram("opened", (_OPENED,), file="data")
REHEARSAL = CheckProgram("rehearse", (_REHEARSAL,), ranks=True)


def names(*, recipe: bool) -> list[str]:
    """Names of the checks, with or without a recipe."""
    return [check.name for program in CHECK_PROGRAMS if recipe or not program.recipe for check in program.checks]
