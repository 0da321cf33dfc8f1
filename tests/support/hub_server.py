"""A server on loopback with the part of the Hugging Face Hub that its client needs to publish and to download a model.

It keeps every commit. A test plays a hub that cheats by changing what a commit holds, or what it says about itself.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

REPO = r"(?P<repo>[^/]+/[^/]+)"


@dataclass
class Hub:
    """commits: repository -> [(hash, name -> content)], the newest last. requests: method and path of each."""

    commits: dict[str, list[tuple[str, dict[str, bytes]]]] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    answers_with: dict[str, str] = field(default_factory=dict)  # commit that is asked for -> commit that it claims
    sizes: dict[str, int] = field(default_factory=dict)  # name -> size that it claims
    shorter: set[str] = field(default_factory=set)  # names that it cuts short, by a byte
    status: int = 0  # of every answer, if not 0
    requests: list[str] = field(default_factory=list)
    tokens: set[str] = field(default_factory=set)
    url: str = ""

    def commit(self, repo: str, files: dict[str, bytes]) -> str:
        """A new commit; its hash depends on what it holds and on what came before."""
        before = self.commits.setdefault(repo, [])
        content = repr((before[-1][0] if before else "", sorted(files.items())))
        before.append((hashlib.sha1(content.encode()).hexdigest(), files))
        return before[-1][0]

    def at(self, repo: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        """The newest commit of the branch main, or that of the hash."""
        commits = self.commits.get(repo, [])
        known = dict(commits)
        if revision == "main" and commits:
            return commits[-1]
        return (revision, known[revision]) if revision in known else None


@contextmanager
def serve() -> Iterator[Hub]:
    """A hub on a free port, until the end of the block."""
    hub = Hub()

    class Handler(_Handler):
        state = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        hub, path = self.state, unquote(self.path.partition("?")[0])
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.requests.append(f"{self.command} {path}")
        hub.tokens.add(self.headers.get("Authorization", ""))
        if hub.status:
            self._answer(hub.status, {"error": "planted"})
            return
        routes = {
            r"/api/repos/create": self._create,
            r"/api/validate-yaml": lambda **_: self._answer(200, {"errors": [], "warnings": []}),
            rf"/api/models/{REPO}(?:/revision/(?P<revision>.+))?": self._info,
            rf"/api/models/{REPO}/preupload/(?P<revision>.+)": self._preupload,
            rf"/api/models/{REPO}/commit/(?P<revision>.+)": self._commit,
            rf"/{REPO}\.git/info/lfs/objects/batch": self._batch,
            r"/objects/(?P<oid>[0-9a-f]{64})": self._store,
            rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<name>.+)": self._resolve,
        }
        for pattern, route in routes.items():
            if found := re.fullmatch(pattern, path):
                route(body=body, **found.groupdict())
                return
        self._answer(404, {"error": f"no such path: {path}"})

    do_POST = do_PUT = do_HEAD = do_GET

    def _answer(self, status: int, content: Any, headers: dict[str, str] | None = None, length: int = -1) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length if length >= 0 else len(data)))
        if length > len(data):
            self.close_connection = True
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _missing(self, code: str) -> None:
        self._answer(404, {"error": code}, {"X-Error-Code": code})

    def _create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.state.commits:
            self._answer(409, {"error": "exists", "url": f"{self.state.url}/{repo}"})
            return
        self.state.commit(repo, {".gitattributes": b"*.safetensors filter=lfs\n"})
        self._answer(200, {"url": f"{self.state.url}/{repo}"})

    def _info(self, repo: str, revision: str | None, body: bytes) -> None:
        if repo not in self.state.commits:
            self._missing("RepoNotFound")
            return
        commit = self.state.at(repo, revision or "main")
        if commit is None:
            self._missing("RevisionNotFound")
            return
        sizes = self.state.sizes
        files = [{"rfilename": name, "size": sizes.get(name, len(data))} for name, data in commit[1].items()]
        sha = self.state.answers_with.get(commit[0], commit[0])
        self._answer(200, {"id": repo, "sha": sha, "siblings": files, "private": False, "tags": []})

    def _preupload(self, repo: str, revision: str, body: bytes) -> None:
        mode = {True: "lfs", False: "regular"}
        files = [
            {"path": one["path"], "uploadMode": mode[one["path"].endswith(".safetensors")], "shouldIgnore": False}
            for one in json.loads(body)["files"]
        ]
        self._answer(200, {"files": files})

    def _batch(self, repo: str, body: bytes) -> None:
        answers = []
        for one in json.loads(body)["objects"]:
            actions = {"actions": {"upload": {"href": f"{self.state.url}/objects/{one['oid']}"}}}
            answers.append(one | ({} if one["oid"] in self.state.objects else actions))
        self._answer(200, {"transfer": "basic", "objects": answers})

    def _store(self, oid: str, body: bytes) -> None:
        fits = hashlib.sha256(body).hexdigest() == oid
        self.state.objects |= {oid: body} if fits else {}
        self._answer(200 if fits else 400, {})

    def _commit(self, repo: str, revision: str, body: bytes) -> None:
        lines = [json.loads(line) for line in body.splitlines()]
        sha, files = self.state.commits[repo][-1]
        if lines[0]["value"].get("parentCommit", sha) != sha:
            self._answer(412, {"error": "a commit has happened since"})
            return
        files = dict(files)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.state.objects[value["oid"]]
            else:
                del files[value["path"]]
        commit = self.state.commit(repo, files)
        self._answer(
            200, {"success": True, "commitOid": commit, "commitUrl": f"{self.state.url}/{repo}/commit/{commit}"}
        )

    def _resolve(self, repo: str, revision: str, name: str, body: bytes) -> None:
        commit = self.state.at(repo, revision)
        if commit is None or name not in commit[1]:
            self._missing("EntryNotFound")
            return
        data = commit[1][name]
        headers = {"X-Repo-Commit": commit[0], "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
        self._answer(200, data[:-1] if name in self.state.shorter else data, headers, len(data))
