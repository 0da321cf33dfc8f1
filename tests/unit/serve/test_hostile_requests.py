"""Hostile requests and connections: each is refused, and the server goes on with bounded memory and says no secret."""

from __future__ import annotations

import contextlib
import io
import json
import random
import socket
import struct
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis.checks import not_a_server_error

from tests.support.serving import Served, serving
from tests.support.small_bundle import make_bundle
from ups.serve.requests import JSON, NPZ
from ups.serve.results import write_npz

pytestmark = pytest.mark.processes
SECRET = "a-secret-of-the-client-123"
SLOW_SECONDS = 1.5
LIMITS = {"body_seconds": SLOW_SECONDS, "json_bytes": 2**20, "body_bytes": 2**22, "connections": 40}
GOOD = {"task": "advection", "state": [[0.1 * n for n in range(16)]], "parameters": {"beta": 1.0}, "steps": 2}
ALLOWED = {400, 401, 404, 405, 413, 415, 422, 431, 503}
# A server of this size has about 300 MiB.
MOST_GROWTH = 200 * 2**20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("server")
    tokens = folder / "tokens"
    tokens.write_text(f"ann {SECRET}\n")
    tokens.chmod(0o600)
    with serving(make_bundle(folder / "b"), folder / "s", LIMITS, "--tokens", str(tokens)) as running:
        post(running, "/rollout", GOOD)
        yield running


AUTH = {"Authorization": f"Bearer {SECRET}"}


def post(server: Served, path: str, body: Any, kind: str = JSON) -> int:
    status, _, content = server.request("POST", path, body, AUTH | {"Content-Type": kind}, timeout=20)
    if status >= 400:
        assert {"error", "message", "hint"} == set(json.loads(content)), content
    return status


def is_well(server: Served) -> None:
    assert server.process.poll() is None
    assert post(server, "/rollout", GOOD) == 200


def wrong_fields() -> list[dict[str, Any]]:
    """Good requests with one wrong value."""
    values: list[Any] = [
        None,
        "x",
        "\0",
        "../../etc/passwd",
        -1,
        0,
        0.5,
        1e308,
        -1e308,
        10**30,
        2**63,
        True,
        [],
        {},
        [[]],
        [[[]]],
        [None],
        ["x"],
        {"u": None},
        {"u": []},
        {"v": [1.0]},
        [[1.0] * 15],
        [[1.0] * 17],
        [[1.0] * 3],
        [[1e39] * 16],
        [[1.0] * 16, [1.0]],
        [[[1.0] * 16]] * 200,
        {"": 1},
        "A" * 10_000,
        [1] * 100_000,
        {"beta": "1"},
        {"beta": [1.0] * 1000},
        {"beta": [[1.0]]},
        {"beta": None},
        {"beta": 1.0, "gamma": 2.0},
        {"x": [1.0] * 16},
        {"x": list(range(16))},
        {"x": [0.0] * 16},
        [[float("nan")] * 16],
        [[float("inf")] * 16],
    ]
    names = (
        "state",
        "static",
        "parameters",
        "coordinates",
        "steps",
        "every",
        "members",
        "level",
        "on_doubt",
        "task",
        "dt",
    )
    return [GOOD | {name: value} for name in names for value in values]


def wrong_bodies() -> list[bytes]:
    good = json.dumps(GOOD).encode()
    deep = b'{"state": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"1",
        b'"x"',
        b"\xff\xfe",
        b"\0" * 1000,
        deep,
        b'{"steps": ' + b"9" * 50_000 + b"}",
    ]
    bodies += [
        good[:-1],
        good + b"}",
        good.replace(b"2", b"2e400"),
        b'{"a":' * 50_000,
        b"[" * 2**20,
        b'{"state": [[NaN]]}',
    ]
    bodies += [good.replace(b'"steps"', b'"steps\\u0000"'), b'{"parameters": {"beta": 1e999}}', b" " * (2**20 + 1)]
    return bodies


def npy(shape: str, dtype: str = "<f8", content: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    header = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY" + version + struct.pack("<H", len(header)) + header + content


def wrong_archives() -> list[bytes]:
    def archive(entries: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> bytes:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", compression) as file:
            for name, content in entries.items():
                file.writestr(name, content)
        return stream.getvalue()

    good = write_npz({"task": np.array("advection"), "state": np.ones((1, 16)), "parameters.beta": 1.0})
    bomb = archive({"state.npy": npy("(33554432,)", content=bytes(2**28))}, zipfile.ZIP_DEFLATED)
    lying = bytearray(archive({"state.npy": npy("(1, 16)", content=bytes(128))}))
    at = lying.rindex(b"PK\x01\x02")
    lying[at + 20 : at + 28] = struct.pack("<II", 2**31, 2**31)
    heads = [
        npy("(10000000000000,)"),
        npy("(-1,)"),
        npy("(1, 16)"),
        npy("(0,)"),
        npy("()"),
        npy("(1, 16)", "|O", bytes(128)),
        npy("(1, 16)", "<f8", bytes(127)),
        npy("'x'"),
        npy("(1, 16)", "<U1000000000"),
        npy("(1e9,)"),
        b"\x93NUMPY",
        b"",
        npy("__import__('os').system('true')"),
        npy("(1,)" * 1000),
        npy("(1, 16)", "<c16", bytes(256)),
        npy("(1, 16)", "<f8", bytes(128), b"\x09\x00"),
        npy("(1, 16)", "[('a', '<f8')]", bytes(128)),
        npy("(" + "1," * 100 + ")", "<f8", bytes(8)),
        npy("(1, 16)", "<f8", b"\xff" * 128),
        npy("(16,)", "<M8[s]", bytes(128)),
    ]
    bodies = [archive({"state.npy": head}) for head in heads]
    bodies += [
        archive({name: npy("(1, 16)", content=bytes(128))})
        for name in ("../../x.npy", "/etc/x.npy", "a.b.c.npy", ".npy")
    ]
    bodies += [good[:n] for n in (0, 10, 100, len(good) // 2, len(good) - 1)] + [
        bomb,
        bytes(lying),
        b"PK\x05\x06" + bytes(18),
    ]
    bodies += [
        archive({f"a{n}.npy": npy("()", content=bytes(8)) for n in range(2000)}),
        archive({"state.npy": b"x"}, zipfile.ZIP_LZMA),
    ]
    return [
        *bodies,
        archive({"parameters.npy": npy("()", content=bytes(8)), "parameters.beta.npy": npy("()", content=bytes(8))}),
    ]


def test_wrong_requests_are_refused_and_the_server_stays_well(server: Served) -> None:
    before, count = server.resident(), 0
    for request in wrong_fields():
        for path in ("/rollout", "/jobs") if count % 7 == 0 else ("/rollout",):
            status = post(server, path, request)
            assert status in ALLOWED | {200, 202}, (request, status)
            count += 1
    for body in wrong_bodies():
        assert post(server, "/rollout", body) in ALLOWED
        count += 1
    for body in wrong_archives():
        assert post(server, "/rollout", body, NPZ) in ALLOWED | {200}
        count += 1
    assert count > 200
    is_well(server)
    assert server.resident() - before < MOST_GROWTH
    text = server.log.read_text()
    assert SECRET not in text
    assert "Traceback" not in text


def test_requests_of_random_bytes_are_refused(server: Served) -> None:
    draw = random.Random(0)
    good = write_npz({"task": np.array("advection"), "state": np.ones((1, 16)), "steps": 1, "parameters.beta": 1.0})
    for _ in range(100):
        body = bytearray(good)
        for _ in range(draw.randint(1, 6)):
            body[draw.randrange(len(body))] = draw.randrange(256)
        assert post(server, "/rollout", bytes(body), NPZ) in ALLOWED | {200}
    is_well(server)


PATHS = [
    "/rollout/",
    "/jobs/../../etc/passwd",
    "/jobs/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "/jobs/..%2f/store/zarr.json",
    "/jobs/x/store/../../../x",
    "/jobs/%00",
    "/jobs/" + "a" * 5000,
    "/jobs//store/",
    "/jobs/x/store/u/c/0",
    "//etc/passwd",
    "/%ff%fe",
    "/jobs/\u00fc".encode().decode("latin-1"),
]
KEYS = [
    "../zarr.json",
    "..%2f..%2fzarr.json",
    "u/../../x",
    "u/c/..",
    "u/c/-1/0",
    "u/c/0/99999999999999",
    "u/c/0/0/0",
    "U/c/0/0",
    "u/c/0%00/0",
    "/etc/passwd",
    "u/zarr.json/..",
    ".zgroup",
    "u.c.0.0",
    "u/c/٠/0",
    "u//c/0/0",
    "gone/zarr.json",
    "u/c/0/0.partial",
    "%2e/zarr.json",
]


def test_paths_lead_nowhere(server: Served) -> None:
    job = server.json("POST", "/jobs", GOOD, AUTH)
    for path in PATHS + [f"{job['store']}/{key}" for key in KEYS]:
        quoted = path.encode("utf-8", "surrogateescape").decode("latin-1")
        status, content = raw(
            server, f"GET {quoted} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n\r\n".encode("latin-1")
        )
        assert status in ALLOWED, (path, status)
        assert b"root:" not in content
    assert server.request("GET", f"{job['store']}/zarr.json", None, AUTH)[0] == 200
    is_well(server)


def raw(server: Served, content: bytes, wait: float = 10) -> tuple[int, bytes]:
    """Status and answer to plain bytes; status 0 for a connection that is closed without."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=wait) as connection:
        connection.sendall(content)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while part := connection.recv(65536):
                answer += part
        except ConnectionResetError:
            pass
    return (int(answer.split()[1]) if answer.startswith(b"HTTP/") else 0), answer


def heads() -> list[bytes]:
    start = f"POST /rollout HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\nContent-Type: {JSON}\r\n".encode()
    return [
        b"\r\n",
        b"GET /rollout HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00" * 50,
        b"GET  HTTP/1.1\r\n\r\n",
        b"A" * 100_000,
        b"GET /nothing HTTP/1.1\r\n" + b"X: y\r\n" * 10_000 + b"\r\n",
        b"GET /nothing HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        start + b"Content-Length: -1\r\n\r\n",
        start + b"Content-Length: 99999999999999999999\r\n\r\n{}",
        start + b"Content-Length: 10\r\nContent-Length: 20\r\n\r\n{}",
        start + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        start + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        start + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\n\x1f\x8b",
        start + b"Transfer-Encoding: chunked\r\n\r\nFFFFFFFFFF\r\n" + b"x" * 1000,
        start + b"Content-Length: 1000\r\n\r\n{}",
        start + b"Upgrade: websocket\r\nConnection: Upgrade\r\nContent-Length: 2\r\n\r\n{}",
        start + b"Expect: 100-continue\r\nContent-Length: 5000000000\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + b"x" * 10_000 + b"\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Basic YTpi\r\n\r\n",
        b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: \xff\xff\r\n\r\n",
        b"DELETE /rollout HTTP/1.1\r\nHost: x\r\n\r\n",
        b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    ]


def test_broken_http_ends_the_connection(server: Served) -> None:
    for content in heads():
        status, _ = raw(server, content)
        assert status in ALLOWED | {0}, (content[:200], status)
    is_well(server)


def test_a_client_that_does_not_read_its_answer_is_disconnected(server: Served) -> None:
    job = server.json("POST", "/jobs", GOOD | {"steps": 100_000, "every": 100}, AUTH)
    line = f"GET {job['store']}/zarr.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\n\r\n"
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.settimeout(1)
        ended, end = False, time.monotonic() + 8 * SLOW_SECONDS
        while not ended and time.monotonic() < end:
            try:
                connection.sendall(line.encode() * 50)  # many answers of one connection fill its buffers
            except TimeoutError:
                pass
            except OSError:
                ended = True
    assert ended
    assert server.request("DELETE", f"/jobs/{job['id']}", None, AUTH)[0] == 204
    is_well(server)


def test_slow_senders_are_disconnected(server: Served) -> None:
    start = f"POST /rollout HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {SECRET}\r\nContent-Type: {JSON}\r\n".encode()
    begins = [b"", b"GET / HT", start, start + b"Content-Length: 100000\r\n\r\n{"]
    begins += [b"POST /none HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n\r\n"]
    connections = [socket.create_connection(("127.0.0.1", server.port), timeout=0.2) for _ in begins]
    for connection, content in zip(connections, begins, strict=True):
        connection.sendall(content)
    end, waiting = time.monotonic() + 6 * SLOW_SECONDS, list(connections)
    while waiting and time.monotonic() < end:
        for connection in list(waiting):
            try:
                connection.sendall(b"x")  # a byte now and then keeps no connection
                if connection.recv(65536) == b"":
                    waiting.remove(connection)
            except TimeoutError:
                pass
            except OSError:
                waiting.remove(connection)
    assert waiting == []
    is_well(server)


def test_more_connections_than_allowed_are_refused_at_once(server: Served) -> None:
    idle = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(60)]
    refused = 0
    for connection in idle:
        with contextlib.suppress(TimeoutError, ConnectionResetError):
            refused += connection.recv(100).startswith(b"HTTP/1.1 503")
        if refused:
            break
    assert refused
    for connection in idle:
        connection.close()
    time.sleep(0.2)
    is_well(server)


def test_names_of_other_sites_do_not_reach_an_open_server(tmp_path: Path) -> None:
    with serving(make_bundle(tmp_path / "b"), tmp_path / "s") as running:
        assert running.request("GET", "/models")[0] == 200
        assert running.request("GET", "/models", None, {"Host": "evil.example"})[0] == 400


def test_no_request_that_follows_from_the_schema_breaks_the_server(server: Served) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json", headers=AUTH)
    few = settings(
        max_examples=25, deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
    )
    for operation in schema.get_all_operations():
        strategy = operation.ok().as_strategy()

        from hypothesis import given

        @few
        @given(case=strategy)
        def run(case: Any) -> None:
            case.call_and_validate(headers=AUTH, checks=[not_a_server_error], timeout=20)

        run()
    is_well(server)
