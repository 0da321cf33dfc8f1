"""Looks at an HDF5 file of a stranger in a process of its own before this one opens it.

The HDF5 library is C that follows pointers in the file: damaged metadata can end in a crash, an endless loop or a
huge allocation, none of which Python can catch (docs/decisions/0007-hdf5-is-read-behind-a-guard.md). So the
structure is read by a child with limits on memory and time, and this process learns only the result. Contiguous data
is then mapped at the surveyed offset without the library; only chunked data is opened here, with metadata that the
child walked to the last chunk.

    python -m ups.data.readers.hdf5_guard FILE...      one JSON line per file
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from ups.data.readers.hdf5_survey import FileSurvey, survey_file
from ups.errors import DataError, UpsError

MEMORY_LIMIT_BYTES = 1 << 30
TIMEOUT_SECONDS = 120.0
_HINT = "get the file again from its source, and compare its checksum"

FileKey = tuple[str, int, int, int]
_surveys: dict[FileKey, FileSurvey | DataError] = {}


def file_key(path: str | Path) -> FileKey:
    """(path, size, time of change, inode): equal as long as nobody touched the file."""
    status = os.stat(path)
    return (os.path.abspath(path), status.st_size, status.st_mtime_ns, status.st_ino)


def survey_files(paths: Sequence[str | Path]) -> list[FileSurvey | DataError]:
    """Structure of each file, or the reason why it is refused; files seen before by this process are not read again."""
    keys: list[FileKey | DataError] = [_key_or_error(path) for path in paths]
    results: dict[FileKey, FileSurvey | DataError] = {
        k: _surveys[k] for k in keys if not isinstance(k, DataError) and k in _surveys
    }
    waiting = list(dict.fromkeys(k for k in keys if not isinstance(k, DataError) and k not in results))
    while waiting:
        answers, problem = _ask_child([key[0] for key in waiting])
        if problem and len(answers) < len(waiting):
            where = waiting[len(answers)][0]
            answers.append(DataError(f"{where}: the HDF5 library {problem} while reading its structure", hint=_HINT))
        results.update(zip(waiting, answers, strict=False))
        waiting = waiting[len(answers) :]
    _surveys.update(results)
    return [k if isinstance(k, DataError) else results[k] for k in keys]


def _key_or_error(path: str | Path) -> FileKey | DataError:
    try:
        with Path(path).open("rb") as file:
            # The signature may also stand at 512, 1024, ... but no file of the formats we read has such a user block.
            if file.read(8) != b"\x89HDF\r\n\x1a\n":
                return DataError(f"{path} is not an HDF5 file", hint="stores end in .zarr; others must be HDF5")
        return file_key(path)
    except OSError as error:
        return DataError(f"{path} cannot be opened: {error.strerror}")


def _ask_child(paths: list[str]) -> tuple[list[FileSurvey | DataError], str]:
    """Answers of one child in order, and how it ended if it did not reach the last file ('' if it did)."""
    command = [sys.executable, "-m", "ups.data.readers.hdf5_guard"]
    # Files, not pipes: thousands of groups make an answer of megabytes, and a killed child must not lose it.
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as output:
        names.write("\0".join(paths).encode())
        names.seek(0)
        child = subprocess.Popen(command, stdin=names, stdout=output, stderr=subprocess.DEVNULL)
        try:
            _wait_while_it_answers(child, output)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        output.seek(0)
        lines = output.read().split(b"\n")[:-1]
    answers: list[FileSurvey | DataError] = []
    for line in lines[: len(paths)]:
        data = json.loads(line)
        if "error" in data:
            answers.append(DataError(data["error"], hint=_HINT))
        else:
            answers.append(FileSurvey.from_json(data))
    code = child.returncode
    if code == 0 and len(answers) == len(paths):
        return answers, ""
    if code == -9:
        return answers, f"took longer than {TIMEOUT_SECONDS:.0f} s"
    return answers, f"crashed (signal {-code})" if code < 0 else f"failed (exit code {code})"


def _wait_while_it_answers(child: subprocess.Popen[bytes], output: IO[bytes]) -> None:
    """Returns when the child has ended, or has answered nothing for TIMEOUT_SECONDS: the limit is for one file."""
    answered, deadline = 0, time.monotonic() + TIMEOUT_SECONDS
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.1)
            return
        size = os.fstat(output.fileno()).st_size
        if size != answered:
            answered, deadline = size, time.monotonic() + TIMEOUT_SECONDS


def main() -> None:
    """The child: surveys the files that are named, one JSON line each."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # Names come through standard input when there are many: a command line has a limit.
    for path in sys.argv[1:] or sys.stdin.buffer.read().decode().split("\0"):
        try:
            answer = survey_file(path).to_json()
        except UpsError as error:
            answer = {"error": f"{path}: {error.message}"}
        except MemoryError:
            answer = {"error": f"{path}: reading its structure needs absurdly much memory"}
        except Exception as error:  # noqa: BLE001 - h5py raises nearly every type for damaged files
            answer = {"error": f"{path}: {type(error).__name__}: {str(error)[:200]}"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
