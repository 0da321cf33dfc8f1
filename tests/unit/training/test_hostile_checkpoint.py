"""A checkpoint from an untrusted source, with hashes that fit: what it asks for is never run, and the error says so."""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from ups.config.schema import EngineConfig
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.errors import CheckpointError
from ups.record.manifest import COMMITTED_NAME, MANIFEST_NAME, commit_directory
from ups.training.checkpoint import Checkpointer, read_weights
from ups.training.checkpoint_metadata import METADATA_NAME, read_metadata

STATE = {"model/w": torch.arange(6.0).reshape(3, 2), "model/b": torch.ones(4, dtype=torch.bfloat16)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "step_00000001"
    save(dict(STATE), storage_writer=FileSystemWriter(path, sync_files=False, thread_count=1), no_dist=True)
    return committed(path)


def committed(path: Path) -> Path:
    """With a manifest that fits: what a malicious author can do."""
    for name in (MANIFEST_NAME, COMMITTED_NAME):
        (path / name).unlink(missing_ok=True)
    other = path.with_name("temporary")
    path.rename(other)
    commit_directory(other, path)
    return path


def planted(path: Path, content: bytes) -> Path:
    (path / METADATA_NAME).write_bytes(content)
    return committed(path)


def test_metadata_of_python_before_3_11_4_is_read(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes a member of an enumeration as `getattr(class, name)`."""
    metadata = pickle.loads((checkpoint / METADATA_NAME).read_bytes())
    by_name: Any = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    planted(checkpoint, pickle.dumps(metadata))
    assert b"getattr" in (checkpoint / METADATA_NAME).read_bytes()
    assert set(read_metadata(checkpoint).state_dict_metadata) == set(STATE)


class Runs:
    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.canary}'",)


def with_storage(change: Callable[[Any], None]) -> Callable[[Path, Path], bytes]:
    def make(path: Path, canary: Path) -> bytes:
        metadata = pickle.loads((path / METADATA_NAME).read_bytes())
        change((metadata, Runs(canary)))
        return pickle.dumps(metadata)

    return make


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value)) + value.encode()


def command(canary: Path) -> bytes:
    return text(f"touch '{canary}'")


def put(target: Any, name: str) -> Callable[[Any], None]:
    return lambda pair: setattr(target(pair[0]), name, pair[1])


FIRST = with_storage(put(lambda m: next(iter(m.storage_data.values())), "relative_path"))
METADATA = "torch.distributed.checkpoint.metadata"
RUNNING: dict[str, Callable[[Path, Path], bytes]] = {
    "reduce": lambda path, canary: pickle.dumps(Runs(canary)),
    "reduce, protocol 0": lambda path, canary: pickle.dumps(Runs(canary), protocol=0),
    "global": lambda path, canary: b"cposix\nsystem\n" + command(canary) + b"\x85R.",
    "inst": lambda path, canary: b"(" + command(canary) + b"iposix\nsystem\n.",
    "obj": lambda path, canary: b"(cposix\nsystem\n" + command(canary) + b"o.",
    "newobj_ex": lambda path, canary: (
        b"\x80\x04csubprocess\nPopen\n" + text("touch") + text(str(canary)) + b"\x86\x85}" + b"\x92."
    ),
    "newobj": lambda path, canary: (
        b"\x80\x04csubprocess\nPopen\n(" + text("touch") + text(str(canary)) + b"l\x85\x81" + b"."
    ),
    "dotted": lambda path, canary: (
        b"\x80\x04" + text(METADATA) + text("os.system") + b"\x93" + command(canary) + b"\x85R."
    ),
    "getattr": lambda path, canary: (
        b"\x80\x04cbuiltins\ngetattr\n(cposix\nsystem\n" + text("__call__") + b"tR" + command(canary) + b"\x85R."
    ),
    "build": lambda path, canary: (
        b"\x80\x04c" + METADATA.encode() + b"\nMetadata\n)\x81}" + text("__setstate__") + b"cposix\nsystem\nsb"
        + command(canary) + b"b."
    ),
    "extension": lambda path, canary: b"\x80\x02\x82\xfa" + command(canary) + b"\x85R.",
    "storage data": FIRST,
    "planner data": with_storage(put(lambda m: m, "planner_data")),
    "storage meta": with_storage(put(lambda m: m.storage_meta, "checkpoint_id")),
    "a state": with_storage(put(lambda m: next(iter(m.state_dict_metadata.values())), "size")),
}  # fmt: skip


@pytest.mark.parametrize("name", RUNNING)
def test_no_code_of_the_metadata_runs(checkpoint: Path, tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    if name == "extension":
        copyreg.add_extension("posix", "system", 0xFA)
    try:
        content = RUNNING[name](checkpoint, canary)
        if name not in ("dotted", "newobj", "newobj_ex"):  # the attack is a real one
            try:
                got = pickle.loads(content)
                getattr(got, "wait", int)()
            except Exception:  # noqa: BLE001 - it ran before it failed
                pass
            assert canary.exists()
            canary.unlink()
        planted(checkpoint, content)
        with pytest.raises(CheckpointError, match="Nothing in it was run") as caught:
            read_weights(checkpoint)
        assert (caught.value.cause, caught.value.exit_code) == ("checkpoint", 8)
        with Runtime.start(EngineConfig(device="cpu"), RankEnvironment()) as runtime, pytest.raises(CheckpointError):
            Checkpointer(runtime, tmp_path).load(checkpoint, dict(STATE))
        assert not canary.exists()
    finally:
        if name == "extension":
            copyreg.remove_extension("posix", "system", 0xFA)


def test_the_fallback_of_torch_to_metadata_of_a_rank_is_closed(checkpoint: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    (checkpoint / "__0.metadata").write_bytes(pickle.dumps(Runs(canary)))
    planted(checkpoint, b"damaged")
    with pytest.raises(CheckpointError):
        read_weights(checkpoint)
    assert not canary.exists()


def test_an_entry_that_is_not_a_tensor_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    """torch reads such entries with a full unpickler."""
    canary, buffer = tmp_path / "canary", io.BytesIO()
    torch.save(Runs(canary), buffer)
    with (checkpoint / "__0_0.distcp").open("r+b") as file:
        file.seek(0, 2)
        start = file.tell()
        file.write(buffer.getvalue())
    metadata = pickle.loads((checkpoint / METADATA_NAME).read_bytes())
    metadata.state_dict_metadata["model/w"] = BytesStorageMetadata()
    place = next(iter(metadata.storage_data.values()))
    place.offset, place.length = start, len(buffer.getvalue())
    metadata.storage_data = {MetadataIndex("model/w"): place}
    planted(checkpoint, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="is not a tensor"):
        read_weights(checkpoint)
    assert not canary.exists()


def test_a_tensor_that_is_a_pickle_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    canary = tmp_path / "canary"
    metadata = pickle.loads((checkpoint / METADATA_NAME).read_bytes())
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Runs(canary), protocol=2))
        archive.writestr("archive/version", "3\n")
    (checkpoint / "__0_0.distcp").write_bytes(buffer.getvalue())
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(buffer.getvalue())
    planted(checkpoint, pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_weights(checkpoint)
    assert not canary.exists()


def set_on(kind: str, name: str, value: Any) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        if kind == "place":
            setattr(next(iter(metadata.storage_data.values())), name, value)
        elif kind == "tensor":
            setattr(metadata.state_dict_metadata["model/w"], name, value)
        elif kind == "chunk":
            setattr(metadata.state_dict_metadata["model/w"].chunks[0], name, value)
        else:
            setattr(metadata, name, value)

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_on("place", "relative_path", "../step_00000002/__0_0.distcp"),
        set_on("place", "relative_path", "/etc/passwd"),
        set_on("place", "relative_path", "a\0b"),
        set_on("place", "relative_path", ""),
        set_on("place", "relative_path", 7),
        set_on("place", "offset", -1),
        set_on("place", "length", 10**30),
        set_on("place", "length", True),
        set_on("place", "transform_descriptors", ["zstd"]),
        set_on("tensor", "size", torch.Size([2**40, 2])),
        set_on("tensor", "size", (3, 2)),
        set_on("tensor", "chunks", []),
        set_on("tensor", "chunks", None),
        set_on("tensor", "properties", None),
        set_on("chunk", "sizes", torch.Size([3])),
        set_on("chunk", "offsets", torch.Size([9, 9])),
        set_on("metadata", "storage_data", None),
        set_on("metadata", "storage_data", {}),
        set_on("metadata", "state_dict_metadata", ["model/w"]),
        set_on("metadata", "state_dict_metadata", {}),
    ],
)
def test_claims_that_do_not_fit_the_files_are_refused(checkpoint: Path, change: Callable[[Any], None]) -> None:
    metadata = pickle.loads((checkpoint / METADATA_NAME).read_bytes())
    change(metadata)
    planted(checkpoint, pickle.dumps(metadata))
    if metadata.state_dict_metadata == {}:
        assert read_weights(checkpoint) == {}
        return
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_weights(checkpoint)


DEEP = 400_000
BOMBS = {
    "nested tuples as a key": b"\x80\x04})" + b"\x85" * DEEP + b"Ns.",
    "nested lists": b"\x80\x04" + b"]" * DEEP + b"a" * (DEEP - 1) + b".",
    "marks": b"\x80\x04" + b"(" * DEEP,
    "doubled": b"\x80\x04]\x94" + b"(" + b"h\x00" * 1000 + b"e.",
    "a long number": b"\x80\x04\x8b" + struct.pack("<i", DEEP) + b"\xff" * DEEP + b".",
    "a long text that is not there": b"\x80\x04X\xff\xff\xff\xff.",
    "a memo of its own number": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "empty": b"",
    "cut": b"\x80\x04\x95\x00",
}


@pytest.mark.processes
@pytest.mark.timeout(600)
def test_bombs_end_within_bounded_memory(tmp_path: Path) -> None:
    """In a process of its own: a stack overflow or an allocation without bound would end it."""
    program = (
        "import sys, resource; from pathlib import Path;"
        "from ups.training.checkpoint_metadata import UnknownPickleError, read_pickle\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, used + 2**30))\n"
        "for path in sys.argv[1:]:\n"
        "    try: read_pickle(Path(path).read_bytes(), frozenset())\n"
        "    except UnknownPickleError as error: print(error)\n"
        "    else: print('plain data')\n"
    )
    paths = []
    for number, content in enumerate(BOMBS.values()):
        (tmp_path / f"bomb_{number}").write_bytes(content)
        paths.append(str(tmp_path / f"bomb_{number}"))
    done = subprocess.run([sys.executable, "-c", program, *paths], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(done.stdout.splitlines()) == len(BOMBS), done.stdout


def test_metadata_that_is_no_regular_file_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = checkpoint / METADATA_NAME
    content = path.read_bytes()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(content)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_metadata(checkpoint)
    path.unlink()
    path.symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match=r"\.metadata"):
        read_metadata(checkpoint)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(10 * 2**30)  # sparse: takes no space
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match="are not read"):
        read_metadata(checkpoint)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 * 2**10  # KiB


def test_metadata_comes_out_as_torch_wrote_it(checkpoint: Path) -> None:
    with (checkpoint / METADATA_NAME).open("rb") as file:
        theirs = pickle.load(file)
    ours = read_metadata(checkpoint)
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    for name, tensor in read_weights(checkpoint).items():
        assert torch.equal(tensor, STATE[f"model/{name}"])
