"""A checkpoint that is being written when its process dies, or when the disk is full, is never loaded.

A process is ended by the kernel at a chosen byte of a file (SIGXFSZ at the limit of the file size, which nothing can
catch here) or kills itself at a chosen fsync or rename: every stage of a commit is hit, not only those that are slow.
"""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.toy_training import train
from ups.record.checkpoints import latest_verified, list_checkpoints, read_progress
from ups.testing.ranks import Launched, launch

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1500)]

SIZE = 137_000  # bytes; just below the size of the largest file of such a checkpoint
OFFSETS = [int(SIZE * part / 9) for part in range(10)]
CALLS = [("fsync", n) for n in (1, 2, 3, 4, 6, 8)] + [("rename", n) for n in (1, 2, 3, 4)]


def train_until_killed(arguments: dict[str, Any]) -> Any:
    """Train; die in the save of step 4, after step 2 was committed."""
    run_dir = Path(arguments["run_dir"])
    trial = {k: v for k, v in arguments.items() if k not in ("offset", "call", "count", "survive")}
    arm = _limit if "offset" in arguments else _count_calls
    import ups.training.checkpoint as module

    real = module.Checkpointer.save

    def save(self: Any, tensors: Any, progress: Any) -> None:
        if progress.step == 4:
            self.wait()
            assert latest_verified(run_dir) is not None
            arm(arguments)
        real(self, tensors, progress)

    module.Checkpointer.save = save  # type: ignore[method-assign]
    return train(trial)


def _limit(arguments: dict[str, Any]) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN if arguments.get("survive") else signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (arguments["offset"], arguments["offset"]))


def _count_calls(arguments: dict[str, Any]) -> None:
    name = arguments["call"]
    real, left = getattr(os, name), [arguments["count"]]

    def counted(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    setattr(os, name, counted)


@pytest.fixture(scope="module")
def straight() -> list[Any]:
    """The run that nothing happens to."""
    return launch(train, 1, arguments={"steps": 6, "strategy": "single"})


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_process_that_dies_anywhere_in_a_save_leaves_an_older_whole_checkpoint(
    tmp_path: Path, straight: list[Any], asynchronous: bool
) -> None:
    hits: list[dict[str, Any]] = [{"offset": offset} for offset in OFFSETS]
    hits += [{"call": call, "count": count} for call, count in CALLS]
    died = 0
    for number, hit in enumerate(hits[int(asynchronous) :: 2]):
        run_dir = tmp_path / str(number)
        trial = {"steps": 6, "strategy": "single", "run_dir": str(run_dir), "asynchronous": asynchronous}
        with Launched(train_until_killed, 1, trial | hit) as launched:
            code = launched.wait(300)[0]
            died += code in (-signal.SIGXFSZ, -signal.SIGKILL)
        found = latest_verified(run_dir)
        assert found is not None
        assert read_progress(found)["progress"]["step"] in (2, 4, 6)
        resumed = launch(train, 1, arguments=trial)
        assert resumed[0]["hash"] == straight[0]["hash"]
    assert died == len(hits[int(asynchronous) :: 2])


@pytest.mark.parametrize(("strategy", "ranks"), [("single", 1), ("fsdp", 2)])
def test_a_full_disk_costs_saves_and_not_the_run_until_three_have_failed(
    tmp_path: Path, strategy: str, ranks: int
) -> None:
    trial = {"strategy": strategy, "run_dir": str(tmp_path), "interval": 2, "offset": 5000, "survive": True}
    with Launched(train_until_killed, ranks, trial | {"steps": 20}) as launched:
        codes = launched.wait(300)
        logs = launched.logs()
    assert codes == [1] * ranks, logs
    assert logs.count("CheckpointError: 3 saves in a row failed, the last at step 8") == ranks
    assert "File too large" in logs
    assert [step for step, _ in list_checkpoints(tmp_path)] == [2]
    assert latest_verified(tmp_path) is not None
    left = [p.name for p in (tmp_path / "checkpoints").iterdir()]
    assert left == ["step_00000002"], left
