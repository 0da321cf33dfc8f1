"""Stands in for the `vastai` client where it is not installed: the calls that `ups launch vast` makes, and no others.

Like the client it leaves with 0 when the server refuses, and prints the reason as JSON on standard error; a server that
cannot be reached is a traceback. Standard library only: `python vastai_program.py show instances --raw`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any


def call(method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """One request with the key of the account; leaves the program where the server refuses."""
    headers = {"Authorization": f"Bearer {os.environ['VAST_API_KEY']}", "Content-Type": "application/json"}
    content = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(os.environ["VAST_URL"] + path, content, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.loads(answer.read())
    except urllib.error.HTTPError as error:
        said = json.loads(error.read()).get("msg")
        print(json.dumps({"error": True, "status_code": error.code, "msg": said}), file=sys.stderr)
        sys.exit(0)


def main() -> None:
    words = sys.argv[1:]
    parser = argparse.ArgumentParser()
    for option in ("--image", "--disk", "--label", "--onstart", "--retry", "--tail", "--type", "--storage", "--order"):
        parser.add_argument(option)
    for flag in ("--raw", "--ssh", "--direct", "--cancel-unavail", "--yes"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--limit")
    parser.add_argument("words", nargs="+")
    options = parser.parse_args(words)
    match options.words:
        case ["show", "env-vars"]:
            result: Any = dict.fromkeys(call("GET", "/api/v0/secrets/")["secrets"], "*****")
        case ["search", "offers", query]:
            result = call("POST", "/api/v0/bundles/", {"q": query})["offers"]
        case ["create", "instance", offer]:
            asked = {"image": options.image, "label": options.label, "onstart": Path(options.onstart).read_text()}
            result = call("PUT", f"/api/v0/asks/{offer}/", asked)
        case ["show", "instances"]:
            result = call("GET", "/api/v1/instances/")["instances"]
        case ["show", "instance", number]:
            row = call("GET", f"/api/v0/instances/{number}/?owner=me")["instances"]
            result = row if row is not None else {"instances": None}
        case ["destroy", "instance", number]:
            call("DELETE", f"/api/v0/instances/{number}/", {})
            result = None
        case ["logs", number]:
            url = call("PUT", f"/api/v0/instances/request_logs/{number}/", {})["result_url"]
            with urllib.request.urlopen(url, timeout=120) as answer:
                print(answer.read().decode())
            return
        case ["copy", source, target]:
            reply = call("PUT", "/api/v0/commands/rsync/", {"src_path": source, "dst_path": target})
            Path(target).mkdir(parents=True, exist_ok=True)
            number, _, path = source.partition(":")
            subprocess.run(["rsync", f"vastai_kaalia@{reply['src_addr']}::{number}/{path}", target], check=False)
            return
        case _:
            sys.exit(f"no such call: {options.words}")
    if result is not None:
        print(json.dumps(result))


if __name__ == "__main__":
    main()
