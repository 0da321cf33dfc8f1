"""Names of causes: stable, and never a consequence taken for a cause."""

from typing import NamedTuple

import pytest

from ups import errors
from ups.record import causes

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] "


class OutOfMemoryError(RuntimeError):
    """Stands for torch.OutOfMemoryError, which is known by name because torch may not be imported here."""


class DistNetworkError(RuntimeError):
    """Stands for torch.distributed.DistNetworkError."""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (FileNotFoundError("x"), "exception(FileNotFoundError)"),
        (MemoryError(), "out_of_memory"),
        (OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"), "out_of_memory"),
        (errors.DataError("a file is cut"), "data"),
        (errors.OutOfMemoryError("no space"), "out_of_memory"),
        (RuntimeError("Detected mismatch between collectives on ranks. Rank 1 is running"), "collective_mismatch"),
        (SystemExit(0), "early_exit(0)"),
        (SystemExit(None), "early_exit(0)"),
        (SystemExit("words"), "exit(1)"),
        (SystemExit(3), "exit(3)"),
    ],
)
def test_an_exception_has_a_cause_name(error: BaseException, cause: str) -> None:
    assert causes.cause_of_error(error) == cause


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (0, "early_exit(0)"),
        (3, "exit(3)"),
        (-11, "signal(SIGSEGV)"),
        (-6, "signal(SIGABRT)"),
        (-9, "killed(SIGKILL)"),
        (-15, "killed(SIGTERM)"),
        (-99, "killed(SIG99)"),
    ],
)
def test_an_exit_code_has_a_cause_name(code: int, cause: str) -> None:
    assert causes.cause_of_exit(code) == cause


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:4242"),
        RuntimeError(GLOO + "Read error [127.0.0.1]:4242: Connection reset by peer"),
        RuntimeError(
            "[../gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 30000ms for recv operation to complete"
        ),
        DistNetworkError("failed to recv, got 0 bytes"),
        RuntimeError(
            "NCCL error: ncclRemoteError: A call failed possibly due to a network error or a remote process exited"
        ),
    ],
)
def test_a_lost_peer_is_a_consequence(error: BaseException) -> None:
    assert causes.is_cascade(error)


def test_an_error_raised_because_of_a_lost_peer_is_a_consequence() -> None:
    error = ValueError("loss is not there")
    error.__cause__ = RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:4242")
    assert causes.is_cascade(error)


@pytest.mark.parametrize(
    "error",
    [ConnectionResetError(104, "Connection reset by peer"), OSError("Broken pipe"), RuntimeError("shape mismatch")],
)
def test_a_broken_connection_of_somebodys_data_source_is_a_cause(error: BaseException) -> None:
    assert not causes.is_cascade(error)


def test_every_cause_of_the_error_tree_is_documented() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.UpsError)]
    assert {kind.cause for kind in kinds} <= causes.CAUSES.keys()


def test_every_cause_made_here_is_documented() -> None:
    made = [causes.cause_of_exit(code) for code in (0, 3, -11, -9)]
    made += [causes.cause_of_error(e) for e in (KeyError("x"), MemoryError(), SystemExit(4))]
    assert {causes.base_name(name) for name in made} <= causes.CAUSES.keys()


def test_causes_come_before_consequences_and_then_by_time() -> None:
    class Seen(NamedTuple):
        time_ns: int
        cascade: bool

    lost, late, early = Seen(1, True), Seen(3, False), Seen(2, False)
    assert causes.causes_first([lost, late, early]) == [early, late, lost]
