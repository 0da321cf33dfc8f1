"""The one restarter: progress earns new tries, the same fault does not, and lack of memory has a cure."""

from typing import Any

import pytest

from ups.supervise.fault import Fault, RestartPolicy


def fault(cause: str = "killed(SIGKILL)", step: int = 7, checkpoint: int | None = 5, **more: Any) -> Fault:
    return Fault(0, 1, 2, "h", step, "data", cause, checkpoint=checkpoint, **more)


def test_restarts_are_counted_since_the_last_commit() -> None:
    policy = RestartPolicy(max_restarts=2)
    assert policy.decide(fault(step=1)).action == "restart 1/2"
    assert policy.decide(fault(step=2)).action == "restart 2/2"
    assert policy.decide(fault(step=3)).action == "stop(no_restarts_left)"


def test_a_new_commit_starts_the_count_again() -> None:
    policy = RestartPolicy(max_restarts=1)
    for commit in (5, 10, 15, 20):
        assert policy.decide(fault(step=commit + 2, checkpoint=commit)).action == "restart 1/1"


def test_the_same_fault_stops_at_the_third_time_without_progress() -> None:
    policy = RestartPolicy(max_restarts=100)
    decisions = [policy.decide(fault("exception(ValueError)", at="a.py:3")) for _ in range(3)]
    assert [d.restart for d in decisions] == [True, True, False]
    assert decisions[-1].action == "stop(same_fault_3_times)"


def test_the_same_fault_with_progress_in_between_goes_on() -> None:
    policy = RestartPolicy(max_restarts=3)
    assert all(policy.decide(fault(checkpoint=commit)).restart for commit in range(5, 60, 5))


def test_without_restarts_the_first_fault_stops() -> None:
    assert RestartPolicy(max_restarts=0).decide(fault()).action == "stop(restarts_off)"


@pytest.mark.parametrize("cause", ["config", "missing_extra", "environment", "training", "gate"])
def test_what_does_not_heal_is_not_tried_again(cause: str) -> None:
    assert not RestartPolicy(max_restarts=3).decide(fault(cause)).restart


def test_lack_of_memory_halves_the_micro_batch_until_nothing_is_left() -> None:
    policy = RestartPolicy(max_restarts=10, micro_batch_size=12)
    sizes = []
    while (decision := policy.decide(fault("out_of_memory"))).restart:
        sizes.append(decision.overrides["engine.micro_batch_size"])
    assert sizes == [6, 3, 1]
    assert decision.action == "stop(smallest_micro_batch)"


def test_lack_of_memory_without_a_known_micro_batch_is_an_ordinary_fault() -> None:
    decision = RestartPolicy(max_restarts=1).decide(fault("out_of_memory"))
    assert (decision.action, decision.overrides) == ("restart 1/1", {})


def test_the_one_line_has_the_documented_form() -> None:
    one = Fault(
        0, 2, 4, "n1", 1207, "data", "exception(FileNotFoundError)", "formats/pdebench.py:88", 1205, 2,
        "restart 1/3", "logs/attempt_0/rank_00002.err",
    )  # fmt: skip
    assert one.one_line() == (
        "FAILED rank=2/4 step=1207 phase=data host=n1 cause=exception(FileNotFoundError) "
        "at=formats/pdebench.py:88 ckpt=1205 lost=2 action=restart 1/3 log=logs/attempt_0/rank_00002.err"
    )
    assert Fault.from_document(one.document()) == one
