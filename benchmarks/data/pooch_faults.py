"""What pooch does with servers that fail or lie, as in tests/unit/data: test_fetch.py and test_hostile_server.py.

    pip install pooch==1.9.0 && PYTHONPATH=. python benchmarks/data/pooch_faults.py

A file counts as wrong if pooch returns it and its bytes are not those of the server. `hang`: no end after SECONDS,
though each read has a time-out of half a second. Figures: docs/decisions/0024-downloads-keep-their-own-code.md.
"""

from __future__ import annotations

import hashlib
import io
import multiprocessing
import queue
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from tests.support.file_server import serve
from tests.support.hostile_server import SLOW, endless, serving

SECONDS = 12.0
FAULTS = [
    *[[], ["cut"], ["cut"] * 3, ["stall"], ["longer"], ["no_range"], ["cut", "no_range"], ["cut", "wrong_part"]],
    *[["503"] * 3, ["cut", "503", "cut"], ["page"], ["cut", "page"], ["page_as_data"], ["shorter"], ["packed"]],
    ["cut", "cut", "stall", "503", "cut", "no_range"],
]


def download(url: str, md5: str, folder: str, outcome: Any) -> None:
    """In a process of its own, which may hang."""
    import pooch  # type: ignore[import-not-found]

    pooch.get_logger().setLevel("CRITICAL")
    pooch.core.time.sleep = lambda seconds: None
    known = {"0.hdf5": f"md5:{md5}" if md5 else None}
    source = pooch.create(path=folder, base_url=f"{url}/there/", registry=known, retry_if_failed=8)
    try:
        path = source.fetch("0.hdf5", downloader=pooch.HTTPDownloader(timeout=0.5))
        outcome.put(hashlib.md5(Path(path).read_bytes(), usedforsecurity=False).hexdigest())
    except Exception as error:  # noqa: BLE001 - whatever it raises is an outcome
        outcome.put(type(error).__name__)


def outcome_of(url: str, md5: str) -> tuple[str, int]:
    """MD5 of the returned file, the name of an error or 'hang'; and the bytes on disk by then."""
    outcome: multiprocessing.Queue[str] = multiprocessing.Queue()
    with tempfile.TemporaryDirectory() as folder:
        process = multiprocessing.Process(target=download, args=(url, md5, folder, outcome))
        process.start()
        try:
            result = outcome.get(timeout=SECONDS)
        except queue.Empty:
            result = "hang"
        num_bytes = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
        process.kill()
        process.join()
    return result, num_bytes


def main() -> None:
    stream = io.BytesIO()
    with h5py.File(stream, "w") as file:
        file["tensor"] = np.random.default_rng(1).random(75_000)
    content = stream.getvalue()
    md5 = hashlib.md5(content, usedforsecurity=False).hexdigest()
    for known in (md5, ""):
        wrong = []
        for faults in FAULTS:
            with serve(content, other=content[:-8] + b"changed!") as server:
                server.faults = list(faults)
                result, _ = outcome_of(server.url, known)
                sent = server.sent
            right = result == md5
            wrong += [] if right else [f"{'-'.join(faults)}: {result}"]
            print(
                f"{'md5' if known else 'no hash'} {faults}: {result == md5}, {sent / len(content):.1f} times its bytes"
            )
        print(f"{'md5' if known else 'no hash'}: {len(wrong)} of {len(FAULTS)} wrong: {wrong}")
    for name, (head, piece) in SLOW.items():
        with serving(endless(head, piece)) as url:
            print(f"slow {name}: {outcome_of(url, md5)[0]}")
    with serving(endless(b"HTTP/1.1 200 OK\r\n\r\n", bytes(1 << 20), 0.0)) as url:
        result, num_bytes = outcome_of(url, md5)
        print(f"a body without an end: {result}, {num_bytes >> 20} MiB on disk")


if __name__ == "__main__":
    main()
