"""One HTTP request for a part of a file, and what the server's answer means (standard library).

A server may cut the connection, say nothing, ignore the range, send an error page with a good status, or another file
than before. Everything that is not the wanted bytes of one file is an exception here; what to do about it is decided in
`fetch_file`.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

from ups.data.fetch_connection import Watch, handlers
from ups.errors import FetchContentError, FetchRefusedError
from ups.record.text import printable

# For a connection, for a whole header, and for the next bytes of a file with all that HTTP may put before them.
STALL_SECONDS = 30.0
READ_BYTES = 1 << 20
_AGENT = "universal-simulator"
_PASSING = {408, 425, 429, 500, 502, 503, 504}


class TryAgainError(Exception):
    """The request failed in a way that may pass. wait_seconds: how long the server asks to wait, 0 if it does not."""

    def __init__(self, message: str, wait_seconds: float = 0.0) -> None:
        super().__init__(message)
        self.wait_seconds = wait_seconds


class BeginAgainError(Exception):
    """The part that is there cannot be continued: the server has another file now, or not that part."""


@dataclass(frozen=True, slots=True)
class Answer:
    """start: position of the first byte. total: size of the whole file, None if not said. validator: what tells this
    version of the file from another ('' if the server does not say)."""

    start: int
    total: int | None
    validator: str
    body: IO[bytes]
    watch: Watch

    def read(self) -> bytes:
        """The next bytes; b'' at the end. Raises TryAgainError if the connection is cut or stalls, KeyboardInterrupt
        on a stop request."""
        self.watch.renew()
        try:
            return self.body.read1(READ_BYTES)  # type: ignore[attr-defined,no-any-return]
        except TimeoutError as error:
            raise TryAgainError(f"no byte came for {STALL_SECONDS:.0f} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TryAgainError(f"the connection was cut ({type(error).__name__})") from error


@contextlib.contextmanager
def request(
    url: str,
    start: int = 0,
    validator: str = "",
    end: int | None = None,
    *,
    stop: threading.Event | None = None,
) -> Iterator[Answer]:
    """Ask for the bytes from `start` on (before `end`). validator: of the version whose beginning is there.

    stop: ends the request with KeyboardInterrupt when it is set. Raises TryAgainError, BeginAgainError,
    FetchRefusedError or FetchContentError.
    """
    headers = {"Accept-Encoding": "identity", "User-Agent": _AGENT}
    if start or end is not None:
        headers["Range"] = f"bytes={start}-" + ("" if end is None else str(end - 1))
    if start and validator:
        headers["If-Range"] = validator
    asked = urllib.request.Request(url, headers=headers)  # noqa: S310 - the scheme is checked by the opener
    watch = Watch(STALL_SECONDS, stop)
    try:
        response = _opener(watch).open(asked, timeout=STALL_SECONDS)
    except urllib.error.HTTPError as error:
        error.close()  # not `with`: the page of a redirect is closed already
        raise _refusal(error, url, start) from error
    except TimeoutError as error:
        raise TryAgainError(f"no whole answer in {STALL_SECONDS:.0f} s") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or type(error).__name__
        raise TryAgainError(f"no connection ({str(reason)[:100]})") from error
    except ValueError as error:  # of urllib, the codec of host names, or the socket: all mean the address
        raise FetchRefusedError(
            f"{shown(url)} leads to an address that cannot be used ({printable(str(error)[:100])})",
            hint="the file may have moved: try --mirror with another place that has it",
        ) from error
    with response:
        yield _understood(response, url, start, validator, watch)


def shown(url: str) -> str:
    """An address without what may be a secret in it, or what a terminal would obey."""
    parts = urllib.parse.urlsplit(url)
    return printable(f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}")


def _understood(response: Any, url: str, start: int, validator: str, watch: Watch) -> Answer:
    headers = response.headers
    kind = headers.get_content_type()
    if kind in ("text/html", "application/xhtml+xml") or headers.get("Content-Encoding", "identity") != "identity":
        raise FetchContentError(
            f"{shown(url)} answers with a page or packed bytes ({kind}) instead of the file",
            hint="look at that address in a browser: the file may have moved, or need a login",
        )
    found = _validator(headers)
    length = headers.get("Content-Length", "")
    size = int(length) if re.fullmatch(r"\d{1,15}", length) else None
    if response.status == 206:
        part = re.fullmatch(r"bytes (\d{1,15})-(\d{1,15})/(\d{1,15}|\*)", headers.get("Content-Range", "").strip())
        if part is None or int(part.group(1)) != start:
            raise BeginAgainError("the server sent another part than was asked for")
        if start and validator and found and found != validator:
            raise BeginAgainError("the file on the server changed")
        total = None if part.group(3) == "*" else int(part.group(3))
        return Answer(start, total, found, response, watch)
    if response.status != 200:
        raise TryAgainError(f"the server answers with status {response.status}")
    return Answer(0, size, found, response, watch)  # the whole file: no ranges there, or it changed


def _validator(headers: Any) -> str:
    """A strong ETag, else the time of the last change: what `If-Range` takes."""
    etag = headers.get("ETag", "").strip()
    if etag and not etag.startswith("W/"):
        return str(etag)[:500]
    return str(headers.get("Last-Modified", "").strip())[:100]


def _refusal(error: urllib.error.HTTPError, url: str, start: int) -> Exception:
    if error.code == 416 and start:
        return BeginAgainError("the server does not have that part of the file")
    if error.code in _PASSING:
        wait = error.headers.get("Retry-After", "") if error.headers else ""
        seconds = float(wait) if re.fullmatch(r"[0-9]{1,9}", wait) else 0.0  # it may be a date, or anything
        return TryAgainError(f"the server answers with status {error.code}", seconds)
    redirected = 300 <= error.code < 400
    return FetchRefusedError(
        f"{shown(url)} is refused by the server with status {error.code}"
        + (": redirects lead in a circle, or nowhere" if redirected else ""),
        hint="the file may have moved: try --mirror with another place that has it",
    )


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to HTTP addresses, and none from a secure one to one that is not."""

    max_redirections = 5

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        before, after = urllib.parse.urlsplit(req.full_url).scheme, urllib.parse.urlsplit(newurl).scheme
        if after not in ("http", "https") or (before == "https" and after != "https"):
            raise FetchRefusedError(f"{shown(req.full_url)} leads to an address that is not secure: {shown(newurl)}")
        if "@" in urllib.parse.urlsplit(newurl).netloc:  # urllib would ask the resolver for it, password and all
            raise FetchRefusedError(f"{shown(req.full_url)} leads to an address with a user in it: {shown(newurl)}")
        fp.close()  # urllib would read the page of the redirect into memory, however long it is
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener(watch: Watch) -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_Redirects, *handlers(watch))
