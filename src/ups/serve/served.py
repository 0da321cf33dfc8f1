"""What a server does with a request between HTTP and the engine: simulator, limits, memory, jobs and their disk."""

from __future__ import annotations

import contextlib
import functools
import json
import secrets
import shutil
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ups.errors import BundleError, BusyError, DiskFullError, LimitError, UpsError
from ups.inference.inputs import Start, suggestion
from ups.inference.page import page_document
from ups.inference.results import Layout, MemorySink, Sink
from ups.inference.simulator import Rolling, Simulator
from ups.record.files import machine_errors
from ups.serve.engine import Engine, Ticket
from ups.serve.requests import JSON, Limits, RolloutRequest, check_limit
from ups.serve.results import StoreSink
from ups.spec.task import TaskSpec

LEVEL = 0.9
# What is stated about a frame of a sample: p-value, errors, bands and quantities of a few fields.
STATED_BYTES = 128


class Served(Simulator):
    """A simulator whose `rollout` returns what is to be rolled out, and takes an `Admission` as `out`."""

    def _roll(self, rolling: Rolling, progress: object) -> Rolling:
        return rolling

    def _accept(self, layout: Layout, out: Any) -> None:
        out.accept(layout)

    def _open_sink(self, layout: Layout, out: Any) -> Sink:
        return cast(Sink, out.sink(layout))

    def _level(
        self, spec: TaskSpec, start: Start, level: float | None, on_doubt: str, members: int | None
    ) -> float | None:
        """Without a level in the request error bars are stated where they were measured."""
        if level is not None or on_doubt == "stop":
            return super()._level(spec, start, level, on_doubt, members)
        with contextlib.suppress(BundleError):
            level = super()._level(spec, start, LEVEL, on_doubt, members)
            self._bundle.calibrations[spec.name].check_level(LEVEL)
            return level
        return None

    def describe(self) -> dict[str, Any]:
        """What a client has to know."""
        info = self._bundle.info
        return {
            "bundle": self._bundle.hash,
            "context_frames": self.context_frames,
            "is_ensemble": self.is_ensemble,
            "tasks": [task.to_json() for task in info.tasks],
            "coordinates": {name: [axis.tolist() for axis in axes] for name, axes in info.coordinates.items()},
            "card": self.card,
        }


class Budget:
    """Bytes that are held for requests, at most so many."""

    def __init__(self, what: str, most: int) -> None:
        self._what, self._most, self._lock = what, most, threading.Lock()
        self.held = 0

    def take(self, count: int) -> None:
        """Raises LimitError for what can never fit, and BusyError for what does not fit now."""
        check_limit(f"bytes of {self._what}", count, self._most)
        with self._lock:
            if self.held + count > self._most:
                raise BusyError(f"the server's {self._what} is used up", hint="try again later")
            self.held += count

    def give(self, count: int) -> None:
        """Back."""
        with self._lock:
            self.held -= count


@dataclass
class Admission:
    """The place of one request: in memory, or for a job in a directory that is made. most: bytes of its frames."""

    limits: Limits
    budget: Budget
    most: int
    path: Path | None = None
    held: int = 0

    def accept(self, layout: Layout) -> None:
        """Raises LimitError or BusyError before anything is allocated."""
        check_limit("samples and members", layout.num_rows, self.limits.samples)
        check_limit("bytes of frames", layout.num_bytes, self.most)
        count = layout.num_bytes + STATED_BYTES * layout.num_rows * layout.num_frames
        if self.path is not None:
            with machine_errors("cannot use the directory for jobs"):
                free = shutil.disk_usage(self.path.parent).free
            if count > free:
                raise DiskFullError(f"the disk of {self.path.parent} has no room for the frames of this job")
        self.budget.take(count)
        self.held = count

    def sink(self, layout: Layout) -> Sink:
        return MemorySink(layout) if self.path is None else StoreSink(layout, self.path)

    def release(self) -> None:
        """Give back what was taken; again does nothing."""
        count, self.held = self.held, 0
        self.budget.give(count)


@dataclass
class Job:
    """A rollout whose result is a store on disk. ended: when, by `time.monotonic`."""

    id: str
    client: str
    ticket: Ticket
    admission: Admission
    created: float = field(default_factory=time.time)
    ended: float | None = None
    error: str = ""

    @property
    def sink(self) -> StoreSink:
        return cast(StoreSink, self.ticket.rolling.sink)

    def document(self) -> dict[str, Any]:
        """What a client is told."""
        rolling, attributes = self.ticket.rolling, self.sink.layout.attributes | self.sink.divergence.attributes()
        steps = {"steps_done": rolling.steps_done, "steps": rolling.steps}
        frames = {"frames_done": self.sink.written, "frames": self.sink.layout.num_frames}
        told = {name: attributes[name] for name in ("task", "bundle", "warnings", "notes")}
        state = {"id": self.id, "status": self.sink.status, "error": self.error, "created": self.created}
        return state | steps | frames | told | {"store": f"/jobs/{self.id}/store"}


class Service:
    """Simulators by name, one engine, and jobs."""

    def __init__(
        self, simulators: Mapping[str, Served], engine: Engine, limits: Limits, jobs: str | None = None
    ) -> None:
        """jobs: a directory for the stores of jobs; default that for temporary files."""
        self.simulators, self.engine, self.limits = dict(simulators), engine, limits
        self.memory = Budget("memory for requests and replies", limits.memory_bytes)
        self._disk = Budget("disk for jobs", limits.job_bytes)
        self._directory = Path(tempfile.mkdtemp(prefix="ups-serve-", dir=jobs))
        self.jobs: dict[str, Job] = {}
        self.is_draining = False
        self._clients: Counter[str] = Counter()
        self._lock = threading.Lock()

    @functools.cached_property
    def page_data(self) -> bytes:
        """What the page at / shows: tasks, calibration and states to start from."""
        models = {name: page_document(simulator._bundle) for name, simulator in self.simulators.items()}
        return json.dumps({"models": models}, allow_nan=False).encode()

    def enter(self, client: str) -> None:
        """Take a place in the queue. Raises BusyError."""
        with self._lock:
            if self.is_draining:
                raise BusyError("the server is stopping", hint="ask another server, or this one later")
            mine, all_waiting = self._clients[client], self.num_waiting
            if mine >= self.limits.waiting_of_client:
                error = BusyError(f"you have {mine} rollouts under way, and no more are allowed", hint="wait for one")
                error.status = 429
                raise error
            if all_waiting >= self.limits.waiting:
                raise BusyError(f"{all_waiting} rollouts are under way: no more are allowed", hint="try again later")
            self._clients[client] += 1

    def leave(self, client: str) -> None:
        """Give it back."""
        with self._lock:
            self._clients -= Counter([client])  # and forget who has none

    @property
    def num_waiting(self) -> int:
        """Rollouts that were accepted and have no result yet."""
        return self._clients.total()

    def find(self, request: RolloutRequest) -> tuple[str, Served]:
        """The simulator of a request. Raises BundleError."""
        names = list(self.simulators)
        if request.bundle is not None:
            if request.bundle not in names:
                raise BundleError(
                    f"no bundle '{request.bundle}'{suggestion(request.bundle, names)}", hint=", ".join(names)
                )
        elif len(names) > 1:
            names = [name for name in names if request.task in self.simulators[name].tasks]
            if len(names) != 1:
                raise BundleError(f"{len(names)} bundles know this task", hint="name it: bundle, task (GET /models)")
        name = request.bundle or names[0]
        return name, self.simulators[name]

    def _start(self, request: RolloutRequest, client: str, admission: Admission) -> Ticket:
        name, simulator = self.find(request)
        spec = simulator.task(request.task)
        arguments = request.arguments(self.limits, len(spec.axes))
        try:
            rolling = simulator.rollout(**arguments, out=cast(Any, admission))
        except BaseException:
            admission.release()
            raise
        space = rolling.batch.space
        watched = rolling.sink.layout.watch is not None
        return self.engine.submit(rolling, client, None if request.members else (name, spec.name, space, watched))

    def roll(self, request: RolloutRequest, client: str, media_type: str) -> tuple[Ticket, Admission]:
        """Start a rollout whose result is sent back; the caller has entered, and releases the admission."""
        most = self.limits.reply_bytes // (8 if media_type == JSON else 1)
        admission = Admission(self.limits, self.memory, most)
        try:
            return self._start(request, client, admission), admission
        except LimitError as error:
            error.hint = error.hint or "keep fewer frames with every, or start a job: POST /jobs"
            raise

    def start_job(self, request: RolloutRequest, client: str) -> Job:
        """Start a job. Raises BusyError."""
        self.enter(client)
        try:
            self.expire()
            if len(self.jobs) >= self.limits.jobs:
                raise BusyError(f"{len(self.jobs)} jobs are kept, and no more are allowed", hint="DELETE one")
            name = secrets.token_urlsafe(16)
            admission = Admission(self.limits, self._disk, self.limits.job_bytes, self._directory / name)
            ticket = self._start(request, client, admission)
        except BaseException:
            self.leave(client)
            raise
        job = self.jobs[name] = Job(name, client, ticket, admission)
        ticket.result.add_done_callback(lambda _: self._finish(job))
        return job

    def _finish(self, job: Job) -> None:
        """In the thread of the engine, after the last frame of a job."""
        status = "done"
        try:
            job.ticket.result.result()
            job.sink.finish()
        except CancelledError:
            status = "canceled"
        except UpsError as error:
            status, job.error = "failed", error.one_line()
        except Exception as error:  # noqa: BLE001 - whoever asks for the job is told
            status, job.error = "failed", f"internal: {type(error).__name__}"
        job.sink.status, job.ended = status, time.monotonic()
        self.leave(job.client)
        if job.id not in self.jobs:  # it was removed while it ran
            self._remove(job)

    def remove_job(self, job: Job) -> None:
        """Cancel a job, if it runs, and remove its store."""
        self.jobs.pop(job.id, None)
        if job.ended is None:
            self.engine.cancel(job.ticket)
        else:
            self._remove(job)

    def _remove(self, job: Job) -> None:
        job.sink.remove()
        job.admission.release()

    def expire(self) -> None:
        """Remove jobs that have ended long ago."""
        now = time.monotonic()
        for job in list(self.jobs.values()):
            if job.ended is not None and now - job.ended > self.limits.keep_seconds:
                self.remove_job(job)

    def close(self) -> None:
        """Stop the engine, and remove all stores."""
        self.engine.stop()
        shutil.rmtree(self._directory, ignore_errors=True)
