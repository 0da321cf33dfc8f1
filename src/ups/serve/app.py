"""The HTTP interface of a server: routes, tokens, metrics and a log line for each request, without its payload."""

from __future__ import annotations

import asyncio
import hmac
import json
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, cast

from fastapi import FastAPI, Request, Response
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from ups import __version__
from ups.errors import BundleError, BusyError, DiskFullError, LimitError, UpsError
from ups.inference.page import page_html
from ups.inference.results import MemorySink
from ups.serve.requests import JSON, NETCDF, NPZ, RolloutRequest, check_limit, read_request
from ups.serve.results import encode
from ups.serve.served import Job, Service

OPEN_PATHS = ("/healthz", "/readyz")
PAGE = "/"
RETRY_SECONDS = 1


class Metrics:
    """What /metrics shows."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        to: Any = {"registry": self.registry}
        self.requests = Counter("ups_requests", "Requests by route and status.", ["route", "status"], **to)
        self.seconds = Histogram("ups_request_seconds", "Seconds of a request.", ["route"], **to)
        self.waiting = Gauge("ups_waiting_rollouts", "Rollouts that were accepted and are not finished.", **to)
        self.jobs = Gauge("ups_jobs", "Jobs that are kept.", **to)
        self.memory = Gauge("ups_held_bytes", "Memory that is held for requests and replies.", **to)
        sizes, seconds = [2**n for n in range(9)], [1e-3 * 2**n for n in range(12)]
        self.batch = Histogram("ups_batch_samples", "Samples in the batch of a step.", buckets=sizes, **to)
        self.step = Histogram("ups_step_seconds", "Seconds of a step of a batch.", buckets=seconds, **to)
        self.sample_steps = Counter("ups_sample_steps", "Steps of samples.", **to)

    def on_step(self, samples: int, seconds: float) -> None:
        """For the engine."""
        self.batch.observe(samples)
        self.step.observe(seconds)
        self.sample_steps.inc(samples)


def log(**facts: Any) -> None:
    """A line of JSON on standard error."""
    sys.stderr.write(json.dumps({"time": round(time.time(), 3), **facts}) + "\n")
    sys.stderr.flush()


class Gate:
    """Lets in who has a token, counts and logs. tokens: token -> name of the client; without any all are let in."""

    def __init__(self, app: Any, tokens: Mapping[str, str], metrics: Metrics) -> None:
        self._app, self._tokens, self._metrics = app, tokens, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began, sent = time.perf_counter(), {"status": 499, "bytes": 0}  # 499: the client left

        async def counted(message: Message) -> None:
            sent["status"] = message.get("status", sent["status"])
            sent["bytes"] += len(message.get("body", b""))
            await send(message)

        client = self._client(scope)
        state = scope["state"] = {"client": client, "facts": {}}
        app = self._app
        if client is None and scope["path"] not in (*OPEN_PATHS, PAGE):
            app = _error(401, "token", "a valid token is needed", "send the header Authorization: Bearer TOKEN")
            app.headers["WWW-Authenticate"] = "Bearer"
        try:
            await app(scope, receive, counted)
        except ClientDisconnect:
            pass
        finally:
            seconds, route = time.perf_counter() - began, getattr(scope.get("route"), "path", "") or "none"
            self._metrics.requests.labels(route, sent["status"]).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            if route not in OPEN_PATHS:
                facts = {"client": client, "method": scope["method"][:10], "route": route, **sent, **state["facts"]}
                log(event="request", **facts, seconds=round(seconds, 4))

    def _client(self, scope: Scope) -> str | None:
        if not self._tokens:
            return str((scope.get("client") or ("local",))[0])
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        kind, _, token = given.partition(b" ")
        names = [n for known, n in self._tokens.items() if hmac.compare_digest(known.encode(), token.strip())]
        return names[0] if names and kind.lower() == b"bearer" else None


def _error(status: int, cause: str, message: str, hint: str = "") -> JSONResponse:
    headers = {"Retry-After": str(RETRY_SECONDS)} if status in (429, 503) else None
    return JSONResponse({"error": cause, "message": message, "hint": hint}, status, headers)


def _status(error: UpsError) -> int:
    if isinstance(error, LimitError):
        return error.status
    return 422 if isinstance(error, BundleError) else 507 if isinstance(error, DiskFullError) else 503


@asynccontextmanager
async def _body(request: Request, service: Service) -> AsyncIterator[RolloutRequest]:
    """The checked request; its bytes are held in the meantime."""
    limits, parts, held = service.limits, [], 0
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type not in (JSON, NPZ):
        raise HTTPException(415, f"send {JSON} or {NPZ}")
    most = limits.json_bytes if content_type == JSON else limits.body_bytes
    check_limit("bytes of a body", int(request.headers.get("content-length", 0)), most)
    try:
        async for part in request.stream():
            service.memory.take(len(part))
            held += len(part)
            check_limit("bytes of a body", held, most)
            parts.append(part)
        yield await run_in_threadpool(read_request, b"".join(parts), content_type, limits)
    finally:
        service.memory.give(held)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(service: Service, tokens: Mapping[str, str], metrics: Metrics) -> Any:
    """The ASGI application."""
    app = FastAPI(title="ups serve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)

    @app.exception_handler(UpsError)
    async def on_error(request: Request, error: UpsError) -> JSONResponse:
        return _error(_status(error), error.cause, error.message, error.hint)

    @app.exception_handler(HTTPException)
    async def on_http_error(request: Request, error: HTTPException) -> JSONResponse:
        return _error(error.status_code, "http", str(error.detail))

    @app.post("/rollout", openapi_extra=_BODY, responses=_responses(_RESULT, *_REFUSED, 504), summary="A short rollout")
    async def rollout(request: Request) -> Response:
        media_type = request.headers.get("accept", JSON).partition(",")[0].partition(";")[0].strip().lower()
        media_type = media_type if media_type in _RESULT["content"] else JSON
        client, engine = request.state.client, service.engine
        service.enter(client)
        try:
            async with _body(request, service) as wanted:
                ticket, admission = await run_in_threadpool(service.roll, wanted, client, media_type)
            batch, sink = ticket.rolling.batch, cast(MemorySink, ticket.rolling.sink)
            facts = {"task": batch.task.name, "samples": batch.num_samples, "steps": ticket.rolling.steps}
            request.state.facts |= facts
            done, gone = asyncio.wrap_future(ticket.result), asyncio.ensure_future(_gone(request))
            try:
                seconds = service.limits.reply_seconds
                await asyncio.wait({done, gone}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                if done.done():
                    done.result()
                    return Response(await run_in_threadpool(encode, sink, media_type), media_type=media_type)
                if gone.done():
                    raise ClientDisconnect
                return _error(504, "time", f"the rollout took more than {seconds:g} s", "start a job: POST /jobs")
            finally:
                gone.cancel()
                engine.cancel(ticket)
                admission.release()
        finally:
            service.leave(client)

    @app.post(
        "/jobs", status_code=202, openapi_extra=_BODY, responses=_responses(None, *_REFUSED, 507), summary="A job"
    )
    async def start(request: Request) -> JSONResponse:
        async with _body(request, service) as wanted:
            job = await run_in_threadpool(service.start_job, wanted, request.state.client)
        return JSONResponse(job.document(), 202, {"Location": f"/jobs/{job.id}"})  # a proxy learns who has it

    def jobs_of(request: Request) -> dict[str, Job]:
        service.expire()
        return {name: job for name, job in service.jobs.items() if job.client == request.state.client}

    def job_of(request: Request, job_id: str) -> Job:
        job = jobs_of(request).get(job_id)
        if job is None:
            raise HTTPException(404, "no such job; a job is removed an hour after its end, and lost with its server")
        return job

    @app.get("/jobs", summary="Your jobs")
    async def jobs(request: Request) -> JSONResponse:
        return JSONResponse({"jobs": [job.document() for job in jobs_of(request).values()]})

    @app.get("/jobs/{job_id}", responses=_responses(None, 401, 404), summary="Status of a job")
    async def status(request: Request, job_id: str) -> JSONResponse:
        return JSONResponse(job_of(request, job_id).document())

    @app.delete("/jobs/{job_id}", status_code=204, responses=_responses(None, 401, 404), summary="Cancel and remove it")
    async def remove(request: Request, job_id: str) -> Response:
        await run_in_threadpool(service.remove_job, job_of(request, job_id))
        return Response(status_code=204)

    @app.api_route("/jobs/{job_id}/store", methods=["GET", "HEAD"], include_in_schema=False)
    @app.api_route("/jobs/{job_id}/store/{key:path}", methods=["GET", "HEAD"], responses=_responses(None, 401, 404))
    async def store(request: Request, job_id: str, key: str = "") -> Response:
        """A key of the Zarr store of a job."""
        sink = job_of(request, job_id).sink
        if not key.strip("/"):  # a listing, for readers that do not use consolidated metadata
            return HTMLResponse("".join(f'<a href="{name}/">{name}</a>\n' for name in sink.arrays))
        name, _, end = ("/" + key).rpartition("/")
        document = sink.document(name.strip("/")) if end == "zarr.json" else None
        if document is not None:
            return JSONResponse(document)
        path = sink.file(key)
        if path is None or not path.is_file():
            raise HTTPException(404, "no such key: frames that are not computed yet are absent")
        return FileResponse(path, media_type="application/octet-stream")

    @app.get(PAGE, include_in_schema=False)
    async def page() -> Response:
        """The page of `ups export page`, which holds no data here and asks this server for all."""
        headers = {"X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer"}
        return HTMLResponse(page_html("Simulator", {}), headers=headers)

    @app.get("/page", summary="What the page at / shows", responses=_responses(None, 401))
    async def page_data() -> Response:
        return Response(await run_in_threadpool(lambda: service.page_data), media_type=JSON)

    @app.get("/models", summary="What can be simulated")
    async def models() -> JSONResponse:
        return JSONResponse({name: simulator.describe() for name, simulator in service.simulators.items()})

    @app.get("/healthz", summary="Whether the server is alive")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", summary="Whether the server takes requests", responses=_responses(None, 503))
    async def readyz() -> dict[str, str]:
        if service.is_draining:
            raise BusyError("the server is stopping")
        return {"status": "ready"}

    @app.get("/metrics", summary="Metrics for Prometheus")
    async def show_metrics() -> Response:
        metrics.waiting.set(service.num_waiting)
        metrics.jobs.set(len(service.jobs))
        metrics.memory.set(service.memory.held)
        return Response(generate_latest(metrics.registry), media_type="text/plain; version=0.0.4")

    return Gate(app, tokens, metrics)


_EXAMPLE = {"state": [[0.0, 0.5, 1.0, 0.5, 0.0, -0.5, -1.0, -0.5]], "parameters": {"nu": 0.02}, "steps": 20, "every": 5}
_FORMATS: Any = {
    JSON: {"schema": RolloutRequest.model_json_schema(), "example": _EXAMPLE},
    NPZ: {"schema": {"type": "string", "format": "binary"}},
}
_BODY = {"requestBody": {"required": True, "content": _FORMATS}}
_RESULT: dict[str, Any] = {
    "description": "The result as the header Accept says: JSON for `xarray.Dataset.from_dict`, npz or NetCDF",
    "content": {JSON: {"schema": {"type": "object"}}, NPZ: {}, NETCDF: {}},
}
_REFUSED = (401, 413, 415, 422, 429, 503)


def _responses(result: Any, *refusals: int) -> Any:
    """What the schema says of answers."""
    properties = {name: {"type": "string"} for name in ("error", "message", "hint")}
    example = {"error": "bundle", "message": "parameter 'nu' of task 'burgers1d' is missing", "hint": ""}
    content = {JSON: {"schema": {"type": "object", "properties": properties}, "example": example}}
    refused = {status: {"description": HTTPStatus(status).phrase, "content": content} for status in refusals}
    return refused | ({} if result is None else {200: result})
