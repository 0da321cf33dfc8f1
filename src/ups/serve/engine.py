"""The scheduler of a server: rollouts of unequal length share batches, and their samples join and leave at every step.

A rollout that waits costs one state, so any may be left out of a step: when not all fit, those of the clients that were
served least take part. One thread runs the steps; what it is given was checked before (`ups.serve.served`). It knows
nothing of HTTP.

B samples, T context frames, C channels, S space.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ups.errors import BundleError, DataError
from ups.inference.simulator import Rolling
from ups.models.stepper import following
from ups.spec.batch import Batch, Memo

# Steps between two choices of who takes part, while not all fit: a new batch costs about as much as a tenth of a step.
TURN = 4


@dataclass(eq=False)
class Ticket:
    """A rollout on its way. group: rollouts that may share a batch. result: set after the last frame, or the error."""

    rolling: Rolling
    client: str
    group: Hashable
    state: Tensor
    result: Future[None] = field(default_factory=Future)
    is_canceled: bool = False

    def __post_init__(self) -> None:
        self.result.set_running_or_notify_cancel()  # who waits for it cannot take it from the engine

    @property
    def cost(self) -> int:
        """Of a step, to share the machine by: the numbers in a frame of all samples."""
        return self.state[:, :1].numel() or self.rolling.batch.static.numel()


class Engine:
    """Rolls out tickets in batches of at most `max_samples`.

    deterministic: each rollout is a batch of its own, as in a process of its own, so that results are equal to the bit.
    on_step: called after every step with its samples and seconds.
    """

    def __init__(
        self, max_samples: int = 64, deterministic: bool = False, on_step: Callable[[int, float], None] | None = None
    ) -> None:
        self._max_samples, self._deterministic = max_samples, deterministic
        self._on_step = on_step or (lambda samples, seconds: None)
        self._lock = threading.Condition()
        self._waiting: list[Ticket] = []  # all that are not finished, in the order they came
        self._served: dict[str, float] = {}  # client -> cost of its steps so far
        self._clock = 0.0  # what the client that was served least has had: a new one starts there
        self._changed = self._stopped = False
        self._chosen: list[Ticket] = []
        self._fits = True
        self._turn = 0
        self._batch: Batch | None = None

    def submit(self, rolling: Rolling, client: str, group: Hashable = None) -> Ticket:
        """Add a rollout. group: of those that have the same predictor, task and grid; None shares with no other."""
        alone = self._deterministic or group is None
        ticket = Ticket(rolling, client, object() if alone else group, rolling.batch.state)
        with self._lock:
            if self._stopped:
                raise CancelledError
            if not any(other.client == client for other in self._waiting):
                self._served[client] = max(self._served.get(client, 0.0), self._clock)
            self._waiting.append(ticket)
            self._changed = True
            self._lock.notify()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Its samples are in no step after the present one."""
        with self._lock:
            ticket.is_canceled = self._changed = True
            self._lock.notify()

    def run(self) -> None:
        """Steps until `stop`. For a thread of its own."""
        while True:
            with self._lock:
                while not self._waiting and not self._stopped:
                    self._lock.wait()
                if self._stopped:
                    for ticket in self._waiting:
                        ticket.is_canceled = True
                    self._sweep()
                    return
            try:
                self.step()
            except Exception as error:  # noqa: BLE001 - such as no memory for a batch: later rollouts are still served
                self._batch = None
                for ticket in self._chosen:
                    if not ticket.result.done():
                        self._fail(ticket, error)

    def stop(self) -> None:
        """End `run`; what is not finished is canceled."""
        with self._lock:
            self._stopped = True
            self._lock.notify()

    @torch.inference_mode()
    def step(self) -> bool:
        """One step of one batch; False if nothing waits."""
        with self._lock:
            self._turn += 1
            if self._changed or (not self._fits and self._turn >= TURN):
                self._leave()
                self._sweep()
                self._choose()
            tickets = self._chosen
        if not tickets:
            return False
        began = time.perf_counter()
        if self._batch is None:
            self._batch = replace(joined([replace(t.rolling.batch, state=t.state) for t in tickets]), memo=Memo())
        if len(tickets) == 1:  # a predictor that draws counts the steps of its rollout
            self._batch = replace(self._batch, stage_step=tickets[0].rolling.steps_done)
        self._advance(tickets, self._batch)
        for ticket in tickets:
            self._served[ticket.client] = self._served.get(ticket.client, 0.0) + ticket.cost
        self._on_step(sum(t.rolling.batch.num_samples for t in tickets), time.perf_counter() - began)
        return True

    def _advance(self, tickets: list[Ticket], batch: Batch) -> None:
        predictor = tickets[0].rolling.predictor
        try:
            frame = predictor(batch)
        except Exception as error:  # noqa: BLE001 - goes to who asked; neighbors continue without
            self._changed = True
            if len(tickets) == 1:
                self._fail(tickets[0], error)
                return
            self._leave()
            for ticket in tickets:
                self._advance([ticket], replace(ticket.rolling.batch, state=ticket.state, memo=Memo()))
            return
        numbers = getattr(predictor, "numbers", None)
        if len(tickets) == len(self._chosen):
            self._batch = replace(batch, state=following(batch.state, frame))
        first = 0
        for ticket in tickets:
            rows = slice(first, first := first + ticket.rolling.batch.num_samples)
            if len(tickets) != len(self._chosen):
                ticket.state = following(ticket.state, frame[rows])
            try:
                ticket.rolling.take(frame[rows], None if numbers is None else numbers[rows])
                if ticket.rolling.is_done:
                    self._changed = True
                    ticket.result.set_result(None)
            except Exception as error:  # noqa: BLE001 - such as a full disk: of this rollout alone
                self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: Exception) -> None:
        self._changed = True
        ticket.rolling.sink.abandon()
        ticket.result.set_exception(BundleError(error.message) if isinstance(error, DataError) else error)

    def _leave(self) -> None:
        """Every rollout takes its state out of the batch."""
        if self._batch is not None:
            first = 0
            for ticket in self._chosen:
                rows = slice(first, first := first + ticket.rolling.batch.num_samples)
                ticket.state = self._batch.state[rows]
        self._batch = None

    def _sweep(self) -> None:
        """Forget what is finished or canceled. Holds the lock."""
        self._changed, self._turn = False, 0
        for ticket in [t for t in self._waiting if t.is_canceled and not t.result.done()]:
            ticket.rolling.sink.abandon()
            ticket.result.set_exception(CancelledError())
        self._waiting = [t for t in self._waiting if not t.result.done()]
        clients = {t.client for t in self._waiting}
        self._served = {client: cost for client, cost in self._served.items() if client in clients}

    def _choose(self) -> None:
        """Who takes part: again and again the client that was served least adds its oldest rollout. Holds the lock."""
        cost = dict(self._served)
        queues = {client: [t for t in self._waiting if t.client == client] for client in cost}
        self._clock = min(cost.values(), default=self._clock)
        chosen: list[Ticket] = []
        room = self._max_samples
        while queues:
            client = min(queues, key=lambda name: cost[name])
            group = chosen[0].group if chosen else None
            fitting = (
                t for t in queues[client] if not chosen or (t.group == group and t.rolling.batch.num_samples <= room)
            )
            ticket = next(fitting, None)
            if ticket is None:
                del queues[client]
                continue
            queues[client].remove(ticket)
            chosen.append(ticket)
            cost[client] += ticket.cost
            room -= ticket.rolling.batch.num_samples
        self._chosen, self._fits = chosen, len(chosen) == len(self._waiting)


def joined(batches: list[Batch]) -> Batch:
    """The samples of batches of one task and grid, one batch behind the other."""
    if len(batches) == 1:
        return batches[0]
    parts: dict[str, Any] = {
        name: torch.cat([getattr(batch, name) for batch in batches])
        for name in ("state", "static", "target", "parameters", "dt", "numbers")
    }
    return replace(batches[0], **parts)
