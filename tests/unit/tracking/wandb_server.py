"""A stand-in for the server of Weights & Biases on loopback: what the client asks for one run, and what it streams."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Server:
    """Keeps the history of one run as the service does: lines at their offsets. It can be closed and opened again."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.exit_codes: list[int] = []
        self.preempting = False
        self.uploads: dict[str, Any] = {}
        self.files: dict[str, bytes] = {}
        self.summary: dict[str, Any] = {}
        self.started = 0
        self.open(0)

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines]

    def open(self, port: int | None = None) -> None:
        self._http = ThreadingHTTPServer(("127.0.0.1", self.port if port is None else port), _handler(self))
        self.port = self._http.server_port
        self.uri = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path.endswith("/file_stream"):
            self._take(body)
            return {"exitcode": None, "limits": {}}
        if path != "/graphql":
            return {}
        name, variables = body.get("operationName"), body.get("variables", {})
        owner = {"id": "1", "name": "flow", "entity": {"id": "2", "name": "team"}}
        if name == "RunResumeStatus":
            return {"data": {"model": {**owner, "bucket": self._bucket() if self.lines else None}}}
        if name == "UpsertBucket":
            self.started += 1
            changes = {key: variables.get(key) for key in ("name", "tags", "groupName")}
            self.uploads.update({key: value for key, value in changes.items() if value})  # later calls send a part
            bucket = {"id": "3", "name": variables["name"], "displayName": "small", "description": None, "config": None}
            bucket |= {"sweepName": None, "project": owner, "historyLineCount": len(self.lines)}
            return {"data": {"upsertBucket": {"bucket": bucket, "inserted": not self.lines}}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.uri}/put/{file}"} for file in variables["files"]]
            return {"data": {"createRunFiles": {"runID": "3", "uploadHeaders": [], "files": files}}}
        return {"data": {}}

    def _bucket(self) -> dict[str, Any]:
        tail = json.dumps(self.lines[-1:])
        counts = {"logLineCount": 0, "historyLineCount": len(self.lines), "eventsLineCount": 0}
        texts = {"summaryMetrics": "{}", "config": "{}", "wandbConfig": '{"t": 1}', "notes": None, "tags": []}
        return {
            "id": "3",
            "name": "x",
            "displayName": "small",
            **counts,
            **texts,
            "historyTail": tail,
            "eventsTail": "[]",
        }

    def _take(self, body: dict[str, Any]) -> None:
        files = body.get("files") or {}
        history = files.get("wandb-history.jsonl")
        if history:
            self.lines[history["offset"] :] = history["content"]
        if "wandb-summary.json" in files:
            self.summary = json.loads(files["wandb-summary.json"]["content"][-1])
        self.preempting = self.preempting or bool(body.get("preempting"))
        if body.get("complete"):
            self.exit_codes.append(int(body["exitcode"]))


def _handler(server: Server) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            server.files[self.path.removeprefix("/put/")] = self._body()
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def _body(self) -> bytes:
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))

        def do_POST(self) -> None:
            data = self._body()
            if self.headers.get("Content-Encoding") == "gzip":
                data = gzip.decompress(data)
            content = json.dumps(server.answer(self.path, json.loads(data or b"{}"))).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: Any) -> None:
            return

    return Handler
