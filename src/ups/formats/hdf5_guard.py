"""Looks at an untrusted HDF5 file in a separate process before this one opens it.

The HDF5 library is C that follows pointers in the file: damaged metadata can end in a crash, an endless loop or a
huge allocation, none of which Python can catch (docs/decisions/0007-hdf5-is-read-behind-a-guard.md). So the
structure is read by a child with limits on memory and time, and this process learns only the result. Contiguous data
is then mapped at the surveyed offset without the library; only chunked data is opened here, with metadata that the
child walked to the last chunk.

    python -m ups.formats.hdf5_guard [--netcdf | --tree | --well]   names on standard input; one JSON line per file
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from ups.buckets.address import is_address
from ups.buckets.cached_objects import forget
from ups.buckets.path import data_path, plain_name
from ups.errors import DataError, UpsError, error_of_cause
from ups.formats.hdf5_survey import FileSurvey, survey_file
from ups.formats.hdf5_tree import TreeSurvey, survey_tree
from ups.formats.netcdf_survey import NetcdfSurvey, survey_netcdf
from ups.formats.the_well_survey import WellSurvey, survey_well
from ups.record.process_tree import module_command
from ups.record.untrusted_files import open_regular

MEMORY_LIMIT_BYTES = 1 << 30
TIMEOUT_SECONDS = 120.0
# Every block of metadata is a request there.
BUCKET_TIMES = 10
_HINT = "get the file again from its source, and compare its checksum"
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
MATLAB_TEXT = b"MATLAB"

FileKey = tuple[str, int, int, int]
_Survey = TypeVar("_Survey", FileSurvey, WellSurvey)
_surveys: dict[FileKey, FileSurvey | DataError] = {}
_well_surveys: dict[FileKey, WellSurvey | DataError] = {}


def file_key(path: str | Path) -> FileKey:
    """(path, size, time of change, inode): equal as long as nobody touched the file."""
    name = plain_name(path)
    forget(name)  # of an address it is asked again
    status = data_path(name).stat()
    return (name, status.st_size, status.st_mtime_ns, status.st_ino)


def starts_as_hdf5(file: IO[bytes]) -> bool:
    """Whether a file has the signature of HDF5: at its beginning, or after the 512 bytes that MATLAB puts before it."""
    return any(file.seek(place) == place and file.read(8) == HDF5_MAGIC for place in (0, 512))


def survey_files(paths: Sequence[str | Path]) -> list[FileSurvey | DataError]:
    """Structure of each file, or the reason why it is refused; files seen before by this process are not read again."""
    return _survey_all(paths, _surveys, FileSurvey.from_json)


def survey_well_files(paths: Sequence[str | Path]) -> list[WellSurvey | DataError]:
    """The same for files of The Well."""
    return _survey_all(paths, _well_surveys, WellSurvey.from_json, "--well")


def _survey_all(
    paths: Sequence[str | Path],
    known: dict[FileKey, _Survey | DataError],
    parse: Callable[[dict[str, Any]], _Survey],
    *options: str,
) -> list[_Survey | DataError]:
    keys: list[FileKey | DataError] = [_key_or_error(path) for path in paths]
    waiting = list(dict.fromkeys(k for k in keys if not isinstance(k, DataError) and k not in known))
    while waiting:
        answers, problem = _ask_child([key[0] for key in waiting], *options)
        found: list[_Survey | DataError] = [a if isinstance(a, DataError) else parse(a) for a in answers]
        if problem and len(found) < len(waiting):
            found.append(_blamed(waiting[len(found)], problem))
        known.update(zip(waiting, found, strict=False))
        waiting = waiting[len(found) :]
    return [k if isinstance(k, DataError) else known[k] for k in keys]


def survey_netcdf_file(path: str | Path) -> tuple[FileKey, NetcdfSurvey]:
    """Structure of a NetCDF-4 file, and what it belongs to. Raises DataError for a file that is refused."""
    key, answer = _survey_one(path, "--netcdf")
    return key, NetcdfSurvey.from_json(answer)


def survey_tree_file(path: str | Path) -> tuple[FileKey, TreeSurvey]:
    """All arrays of any HDF5 file, and what it belongs to. Raises DataError for a file that cannot be opened."""
    key, answer = _survey_one(path, "--tree")
    return key, TreeSurvey.from_json(answer)


def _survey_one(path: str | Path, option: str) -> tuple[FileKey, dict[str, Any]]:
    key = _key_or_error(path)
    if isinstance(key, DataError):
        raise key
    answers, problem = _ask_child([key[0]], option)
    answer = answers[0] if answers else _blamed(key, problem)
    if isinstance(answer, DataError):
        raise answer
    return key, answer


def _blamed(key: FileKey, problem: str) -> DataError:
    return DataError(f"{key[0]}: the HDF5 library {problem} while reading its structure", hint=_HINT)


def _key_or_error(path: str | Path) -> FileKey | DataError:
    try:
        with open_regular(data_path(path), follow_link=True) as file:
            if file is None:
                return DataError(f"{path} is not a regular file, so it is not read", hint="name an HDF5 file")
            start = file.read(8)
            is_hdf5 = starts_as_hdf5(file)
        if start[:3] == b"CDF" and start[3:4] in (b"\x01", b"\x02", b"\x05"):
            return DataError(
                f"{path} is a NetCDF classic file (version 3), which is not read",
                hint="convert it to NetCDF-4, for instance with: nccopy -k nc4 OLD.nc NEW.nc",
            )
        if not is_hdf5 and (start.startswith(MATLAB_TEXT) or Path(path).suffix == ".mat"):
            return DataError(
                f"{path} is a MATLAB file of version 7 or older, and only version 7.3 is read",
                hint="save it from MATLAB as HDF5: save('NAME.mat', '-v7.3')",
            )
        if not is_hdf5:
            return DataError(f"{path} is not an HDF5 file", hint="stores end in .zarr; others must be HDF5")
        return file_key(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        return DataError(f"{path} cannot be opened: {reason}")


def _ask_child(paths: list[str], *options: str) -> tuple[list[dict[str, Any] | DataError], str]:
    """Answers of one child in order, and how it ended if it did not reach the last file ('' if it did)."""
    command = module_command("ups.formats.hdf5_guard", *options)
    # Files, not pipes: thousands of groups make an answer of megabytes, and a killed child must not lose it.
    with tempfile.TemporaryFile() as names, tempfile.TemporaryFile() as output:
        names.write("\0".join(paths).encode())
        names.seek(0)
        # Threads of the client of a bucket reserve address space, of which the child has little.
        environment = {**os.environ, "TOKIO_WORKER_THREADS": "2", "MALLOC_ARENA_MAX": "2"}
        child = subprocess.Popen(command, stdin=names, stdout=output, stderr=subprocess.DEVNULL, env=environment)
        limit = TIMEOUT_SECONDS * (BUCKET_TIMES if any(map(is_address, paths)) else 1)
        try:
            _wait_while_it_answers(child, output, limit)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        output.seek(0)
        lines = output.read().split(b"\n")[:-1]
    answers: list[dict[str, Any] | DataError] = []
    for line in lines[: len(paths)]:
        data = json.loads(line)
        if "error" in data and data["cause"] != DataError.cause:
            raise error_of_cause(data["cause"], data["error"], data["hint"])
        answers.append(DataError(data["error"], hint=data["hint"] or _HINT) if "error" in data else data)
    code = child.returncode
    if code == 0 and len(answers) == len(paths):
        return answers, ""
    if code == -9:
        return answers, f"took longer than {limit:.0f} s"
    return answers, f"crashed (signal {-code})" if code < 0 else f"failed (exit code {code})"


def _wait_while_it_answers(child: subprocess.Popen[bytes], output: IO[bytes], limit: float) -> None:
    """Returns when the child has ended, or has answered nothing for `limit` seconds: it is for one file."""
    answered, deadline = 0, time.monotonic() + limit
    while time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=0.1)
            return
        size = os.fstat(output.fileno()).st_size
        if size != answered:
            answered, deadline = size, time.monotonic() + limit


def main() -> None:
    """The child: surveys the files that are named, one JSON line each."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    surveys: dict[str, Callable[[str], FileSurvey | NetcdfSurvey | TreeSurvey | WellSurvey]] = {
        "--netcdf": survey_netcdf,
        "--tree": survey_tree,
        "--well": survey_well,
    }
    survey = surveys.get(sys.argv[1] if len(sys.argv) > 1 else "", survey_file)
    # Names come through standard input: a command line has a limit.
    for path in sys.stdin.buffer.read().decode().split("\0"):
        try:
            answer = survey(path).to_json()
        except UpsError as error:
            answer = {"error": f"{path}: {error.message}", "hint": error.hint, "cause": error.cause}
        except MemoryError:
            answer = {"error": f"{path}: reading its structure needs absurdly much memory", "hint": "", "cause": "data"}
        except Exception as error:  # noqa: BLE001 - h5py raises nearly every type for damaged files
            answer = {"error": f"{path}: {type(error).__name__}: {str(error)[:200]}", "hint": "", "cause": "data"}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
