"""Shared batches: who takes part in a step, that results do not change by it, and that no rollout disturbs another."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import xarray
from torch import Tensor

import ups
from tests.support.calibrated_bundle import calibrated_bundle
from ups.errors import BundleError, DataError
from ups.inference.simulator import Rolling
from ups.serve.engine import Engine, Ticket
from ups.serve.requests import Limits
from ups.serve.served import Admission, Budget, Served
from ups.spec.batch import Batch

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calibrated_bundle(tmp_path_factory.mktemp("bundle") / "b")


@pytest.fixture(scope="module")
def served(bundle: Path) -> Served:
    return Served.load(bundle)


@pytest.fixture(scope="module")
def simulator(bundle: Path) -> ups.Simulator:
    return ups.Simulator.load(bundle)


def given(number: int, steps: int, task: str = "advection", samples: int | None = None) -> dict[str, Any]:
    """What a rollout is asked for."""
    draw = np.random.default_rng(number)
    lead = () if samples is None else (samples,)
    if task == "darcy":
        return {"task": task, "static": draw.normal(size=(*lead, 1, 16, 16))}
    if task == "flow":
        fields = {"state": draw.normal(size=(*lead, 3, 16, 16)), "static": draw.normal(size=(*lead, 1, 16, 16))}
        return {"task": task, "steps": steps, "parameters": {"nu": 0.02, "rho": 1.5}, **fields}
    return {"task": task, "steps": steps, "state": draw.normal(size=(*lead, 1, 16)), "parameters": {"beta": 1.0}}


def start(engine: Engine, served: Served, client: str, group: Any = "g", **request: Any) -> Ticket:
    limits = Limits()
    admission = Admission(limits, Budget("memory", 2**30), 2**30)
    rolling = served.rollout(**request, out=cast(Any, admission))
    return engine.submit(rolling, client, group)


def finish(engine: Engine, limit: int = 1000) -> None:
    for _ in range(limit):
        if not engine.step():
            return
    raise AssertionError("the engine does not come to an end")


def same(found: xarray.Dataset, expected: xarray.Dataset, tolerance: float) -> None:
    assert set(found.variables) == set(expected.variables)
    assert found.attrs == expected.attrs
    for name, variable in expected.variables.items():
        if variable.dtype.kind in "OU":
            continue
        size = max(1e-30, float(np.nanmax(np.abs(variable.values.astype(float)), initial=0)))
        np.testing.assert_allclose(
            found[name].values.astype(float) / size, variable.values.astype(float) / size, rtol=0, atol=tolerance
        )


@pytest.mark.parametrize("deterministic", [False, True])
def test_rollouts_of_unequal_length_that_come_and_go_are_those_of_a_process_of_its_own(
    served: Served, simulator: ups.Simulator, deterministic: bool
) -> None:
    seen: list[int] = []
    engine = Engine(8, deterministic, lambda samples, seconds: seen.append(samples))
    requests = [given(n, 3 + 5 * (n % 4), samples=None if n % 2 else 2) for n in range(6)]
    requests += [given(9, 4, "flow"), given(10, 1, "darcy", samples=3)]
    tickets = []
    for number, request in enumerate(requests):
        tickets.append(start(engine, served, f"c{number % 3}", request["task"], **request))
        engine.step()
    finish(engine)
    assert (max(seen) > 3) is not deterministic
    for ticket, request in zip(tickets, requests, strict=True):
        ticket.result.result(0)
        expected = simulator.rollout(**request, level=0.9)
        same(ticket.rolling.sink.finish(), expected, 0.0 if deterministic else TOLERANCE)
        assert "p_value" in expected


def test_a_client_with_many_rollouts_does_not_keep_another_one_waiting(served: Served) -> None:
    engine = Engine(4)
    many = [start(engine, served, "greedy", **given(n, 200)) for n in range(12)]
    for _ in range(10):
        engine.step()
    short = start(engine, served, "modest", **given(99, 20))
    steps = 0
    while not short.result.done():
        engine.step()
        steps += 1
    assert steps <= 30
    assert not any(ticket.result.done() for ticket in many)


def test_clients_get_equal_shares_however_many_rollouts_each_has(served: Served) -> None:
    engine = Engine(4)
    tickets = {
        client: [start(engine, served, client, **given(n, 1000)) for n in range(count)]
        for client, count in (("a", 1), ("b", 3), ("c", 12))
    }
    for _ in range(240):
        engine.step()
    done = {client: sum(t.rolling.steps_done for t in mine) for client, mine in tickets.items()}
    assert sum(done.values()) == 4 * 240
    assert done["a"] == 240  # it cannot use more
    assert abs(done["b"] - done["c"]) <= 40


def test_other_tasks_take_turns(served: Served) -> None:
    engine = Engine(64)
    one = start(engine, served, "a", "advection", **given(0, 400))
    other = start(engine, served, "b", "flow", **given(1, 400, "flow"))
    for _ in range(100):
        engine.step()
    assert one.rolling.steps_done > 50 > other.rolling.steps_done > 1  # by what a step costs


def test_a_canceled_rollout_is_in_no_further_step(served: Served) -> None:
    engine = Engine(4)
    tickets = [start(engine, served, "a", **given(n, 100)) for n in range(4)]
    waiting = start(engine, served, "a", **given(9, 100))
    engine.step()
    engine.cancel(tickets[0])
    engine.step()
    assert tickets[0].rolling.steps_done == 1
    assert waiting.rolling.steps_done == 1
    assert isinstance(tickets[0].result.exception(0), CancelledError)


class Raising:
    """A predictor that cannot take the samples whose first value is large."""

    def __init__(self, predictor: Any) -> None:
        self._predictor = predictor

    def __call__(self, batch: Batch) -> Tensor:
        if bool((batch.state[:, 0, 0, 0] > 100).any()):
            raise DataError("too large", hint="train again")
        frame: Tensor = self._predictor(batch)
        return frame


def test_a_rollout_that_raises_fails_alone(served: Served, simulator: ups.Simulator) -> None:
    engine = Engine(8)
    requests = [given(n, 20) | {"on_doubt": "ignore"} for n in range(3)]
    requests[1]["state"][0, 0] = 1000.0
    tickets = []
    for request in requests:
        tickets.append(start(engine, served, "a", **(request | {"on_doubt": "warn"})))
        rolling = tickets[-1].rolling
        rolling.sink.layout.watch = None
        rolling.predictor = Raising(simulator._stepper)
    finish(engine)
    assert isinstance(tickets[1].result.exception(0), BundleError)
    for ticket, request in zip(tickets[::2], requests[::2], strict=True):
        expected = simulator.rollout(**request)
        np.testing.assert_allclose(ticket.rolling.sink.finish()["u"], expected["u"], rtol=1e-4, atol=1e-5)


def test_a_sample_that_is_not_finite_does_not_change_its_neighbors(served: Served, simulator: ups.Simulator) -> None:
    engine = Engine(8)
    bad = start(engine, served, "a", **given(0, 12))
    bad.state = torch.full_like(bad.state, torch.nan)
    good = start(engine, served, "b", **given(1, 12))
    finish(engine)
    assert "diverged at step 1" in bad.rolling.sink.finish().attrs["blew_up"]
    same(good.rolling.sink.finish(), simulator.rollout(**given(1, 12), level=0.9), TOLERANCE)


def test_a_batch_that_cannot_be_made_does_not_end_the_thread(served: Served, simulator: ups.Simulator) -> None:
    engine = Engine(8)
    broken = [start(engine, served, "a", **given(n, 5)) for n in range(2)]
    broken[0].state = broken[0].state[..., :7]
    thread = threading.Thread(target=engine.run)
    thread.start()
    assert all(isinstance(ticket.result.exception(60), RuntimeError) for ticket in broken)
    good = start(engine, served, "a", **given(3, 5))
    good.result.result(60)
    engine.stop()
    thread.join(60)
    same(good.rolling.sink.finish(), simulator.rollout(**given(3, 5), level=0.9), TOLERANCE)


def test_a_full_disk_fails_one_rollout(served: Served) -> None:
    engine = Engine(8)
    tickets = [start(engine, served, "a", **given(n, 30)) for n in range(2)]

    def full(frame: object) -> None:
        raise OSError(28, "No space left on device")

    tickets[0].rolling.sink.add = full  # type: ignore[method-assign]
    finish(engine)
    assert isinstance(tickets[0].result.exception(0), OSError)
    assert tickets[1].result.result(0) is None


def test_a_predictor_of_another_kind_takes_the_place_of_the_network(served: Served) -> None:
    """Such as an exported step."""
    engine = Engine(8)
    ticket = start(engine, served, "a", **given(0, 5))
    ticket.rolling.sink.layout.watch = None
    ticket.rolling.predictor = lambda batch: batch.state[:, -1]
    finish(engine)
    result = ticket.rolling.sink.finish()
    assert bool((result["u"] == result["u"][0]).all())


def test_the_thread_ends_and_cancels_what_waits(served: Served) -> None:
    engine = Engine(8)
    thread = threading.Thread(target=engine.run)
    thread.start()
    ticket = start(engine, served, "a", **given(0, 10**5))
    engine.stop()
    thread.join(20)
    assert not thread.is_alive()
    assert isinstance(ticket.result.exception(0), CancelledError)
    with pytest.raises(CancelledError):
        engine.submit(cast(Rolling, SimpleNamespace(batch=ticket.rolling.batch)), "a")
