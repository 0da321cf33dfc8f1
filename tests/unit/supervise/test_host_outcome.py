"""What several hosts make of one attempt: the first cause among all of them."""

from __future__ import annotations

import json

from ups.supervise.attempt import Outcome
from ups.supervise.fault import Fault
from ups.supervise.head import joined, outcome_from_json, outcome_to_json


def failed(rank: int, cause: str, *, cascade: bool, time_ns: int) -> Outcome:
    fault = Fault(attempt=0, rank=rank, world=2, host=f"{rank}:n{rank}", step=7, phase="sync", cause=cause)
    return Outcome("failed", fault, 7, {rank: 1}, cascade=cascade, time_ns=time_ns)


def test_a_host_that_only_lost_its_peer_is_a_consequence_whatever_its_time() -> None:
    lost = failed(0, "connection_lost", cascade=True, time_ns=10)
    killed = failed(1, "killed(SIGKILL)", cascade=False, time_ns=900)
    result = joined({0: lost, 1: killed}, [0, 1], None)
    assert result.state == "failed"
    assert result.fault is not None
    assert (result.fault.rank, result.fault.host, result.fault.cause) == (1, "1:n1", "killed(SIGKILL)")
    assert [(c["rank"], c["host"], c["cause"]) for c in result.fault.consequences] == [(0, "0:n0", "connection_lost")]
    assert result.exits == {0: 1, 1: 1}


def test_of_two_causes_the_first_counts_by_the_clock_of_the_head() -> None:
    ours = failed(0, "exception(ValueError)", cascade=False, time_ns=5_000)
    # Later by its own clock, earlier by ours.
    theirs = outcome_from_json(outcome_to_json(failed(1, "killed(SIGKILL)", cascade=False, time_ns=9_000), -6_000))
    assert theirs is not None
    result = joined({0: ours, 1: theirs}, [0, 1], None)
    assert result.fault is not None
    assert (result.fault.rank, result.fault.cause) == (1, "killed(SIGKILL)")


def test_all_hosts_must_have_finished_at_the_same_step() -> None:
    done = Outcome("finished", last_step=20)
    assert joined({0: done, 1: done}, [0, 2], None) == Outcome("finished", None, 20, {}, 0)
    behind = Outcome("finished", last_step=15)
    assert joined({0: done, 1: behind}, [0, 2], None).behind == 2
    assert joined({0: done, 1: Outcome("left", last_step=20)}, [0, 2], None).state == "left"


def test_an_outcome_goes_over_the_link_and_nothing_else_is_taken_for_one() -> None:
    outcome = failed(1, "stalled", cascade=False, time_ns=3)
    document = json.loads(json.dumps(outcome_to_json(outcome, 0)))
    assert outcome_from_json(document) == outcome
    for wrong in (
        {},
        {**document, "state": "completed"},
        {**document, "fault": {"rank": 1}},
        {**document, "exits": {"../x": 1}},
        {**document, "time_ns": "3"},
        [],
    ):
        assert outcome_from_json(wrong) is None
