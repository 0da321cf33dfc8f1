"""A distributed test is one call: `launch(check, ranks=2, deadline=30)` runs `check` on real ranks and returns results.

`check` is a function of a test module, called as `check(arguments)` in one process per rank; what it returns (JSON)
comes back in rank order. No rank outlives its deadline. Ranks are forked from a server process that has imported torch
once, because an import costs more than most checks. The store of the rendezvous lives in the calling process on a port
that the system chose, so that two launches never fight for one.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Self

from torch.distributed import TCPStore  # type: ignore[attr-defined]

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["ups.run.assemble", "torch._dynamo"])
Check = Callable[[dict[str, Any]], Any]


class Launched:
    """Ranks that are running `check`; leaving the `with` block kills what is left of them."""

    def __init__(self, check: Check, ranks: int, arguments: dict[str, Any] | None = None) -> None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._folder = tempfile.TemporaryDirectory(prefix="ups-ranks-")
        self.folder = Path(self._folder.name)
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        environment = {
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        text = json.dumps(arguments or {})
        self.processes: list[ForkServerProcess] = []
        for rank in range(ranks):
            variables = {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = _CONTEXT.Process(
                target=_run_rank, args=(check.__module__, check.__name__, text, variables, str(self.folder), rank)
            )
            process.start()
            self.processes.append(process)

    def wait(self, deadline: float) -> list[int | None]:
        """Exit codes by rank (-9 after SIGKILL); raises AssertionError with the logs at the deadline."""
        end = time.monotonic() + deadline
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            assert process.exitcode is not None, f"ranks did not finish within {deadline} s\n{self.logs()}"
        return [process.exitcode for process in self.processes]

    def results(self) -> list[Any]:
        """What `check` returned, by rank; None for a rank that did not get so far."""
        paths = [self.folder / f"result_{rank}.json" for rank in range(len(self.processes))]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    def logs(self) -> str:
        """The end of every rank's output."""
        texts = []
        for rank in range(len(self.processes)):
            path = self.folder / f"rank_{rank}.log"
            texts.append(f"--- rank {rank}\n{path.read_text()[-4000:] if path.exists() else '(did not start)'}")
        return "\n".join(texts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join(10)
        self._folder.cleanup()


def launch(check: Check, ranks: int, deadline: float = 300.0, arguments: dict[str, Any] | None = None) -> list[Any]:
    """Run `check` on `ranks` ranks; its results by rank. Fails with every rank's log if one does not exit with 0."""
    with Launched(check, ranks, arguments) as launched:
        codes = launched.wait(deadline)
        assert codes == [0] * ranks, f"exit codes {codes}\n{launched.logs()}"
        return launched.results()


def _run_rank(module: str, name: str, arguments: str, environment: dict[str, str], folder: str, rank: int) -> None:
    os.environ.update(environment)
    log = os.open(Path(folder) / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    value = getattr(importlib.import_module(module), name)(json.loads(arguments))
    temporary = Path(folder) / f"result_{rank}.tmp"
    with contextlib.suppress(FileNotFoundError):  # the caller may be gone already
        temporary.write_text(json.dumps(value))
        temporary.rename(temporary.with_suffix(".json"))
