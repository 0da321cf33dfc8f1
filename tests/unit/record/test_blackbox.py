"""The black box: what a reader sees of a rank that runs, was killed, or is writing right now."""

import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ups.errors import IntegrityError, MachineError
from ups.record import blackbox
from ups.record.blackbox import BlackBox, BlackBoxReader, Mark, Phase, ring_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return ring_path(tmp_path / "boxes", 3)


def make(path: Path, capacity: int = 64) -> BlackBox:
    return BlackBox.create(path, rank=3, world_size=4, attempt=1, capacity=capacity)


def test_the_header_says_who_writes(path: Path) -> None:
    make(path)
    header = BlackBoxReader(path).header
    assert (header.rank, header.world_size, header.attempt, header.pid) == (3, 4, 1, os.getpid())
    assert header.host == os.uname().nodename


def test_a_new_box_says_init(path: Path) -> None:
    make(path)
    latest = BlackBoxReader(path).latest()
    assert latest is not None
    assert (latest.phase, latest.step, latest.mark) == (Phase.INIT, 0, Mark.NONE)


def test_the_reader_sees_what_was_written(path: Path) -> None:
    box = make(path)
    box.loss, box.total_steps = 0.25, 1000
    box.record(Phase.SAVE, 7, 2, 11, 2**63 + 5, deadline_seconds=300.0, usual_seconds=2.2)
    latest = BlackBoxReader(path).latest()
    assert latest is not None
    assert (latest.phase, latest.step, latest.stage, latest.collective) == (Phase.SAVE, 7, 2, 11)
    assert (latest.batch, latest.deadline_seconds, latest.usual_seconds) == (2**63 + 5, 300.0, 3)
    assert (latest.loss, latest.total_steps) == (0.25, 1000)


def test_a_box_that_nobody_reads_takes_the_same_records_and_leaves_no_file(tmp_path: Path) -> None:
    box = BlackBox.unread()
    for step in range(3):
        box.record(Phase.DATA, step)
        box.issue("all_reduce", Phase.SYNC, step, deadline_seconds=2.0)
    assert (box.last.step, box.last.phase, box.last.collective) == (2, Phase.SYNC, 3)
    box.close()
    assert not list(tmp_path.iterdir())


def test_numbers_that_do_not_fit_never_stop_the_loop(path: Path) -> None:
    box = make(path)
    for usual, reported in ((-1.0, 0), (math.nan, 0), (0.0, 0), (1e9, 65535), (math.inf, 65535)):
        box.record(Phase.DATA, -1, 2**40, 2**70, -5, usual_seconds=usual)
        latest = BlackBoxReader(path).latest()
        assert latest is not None
        assert latest.usual_seconds == reported


def test_the_ring_keeps_the_newest(path: Path) -> None:
    box = make(path, capacity=8)
    for step in range(100):
        box.record(Phase.FORWARD, step)
    reader = BlackBoxReader(path)
    assert [r.step for r in reader.tail(100)] == list(range(92, 100))
    assert [r.step for r in reader.since(0)] == list(range(92, 100))
    assert [r.step for r in reader.since(99)] == [98, 99]
    assert reader.since(101) == []


def test_a_torn_record_is_left_out(path: Path) -> None:
    box = make(path)
    for step in range(1, 6):
        box.record(Phase.FORWARD, step)
    start = blackbox._RECORDS_OFFSET + 5 * blackbox._RECORD_SIZE  # the record of step 5
    box._view[start + 32 : start + 34] = b"\xff\xff"
    latest = BlackBoxReader(path).latest()
    assert latest is not None
    assert latest.step == 4


def test_a_wrong_count_in_the_header_only_costs_a_search(path: Path) -> None:
    box = make(path)
    for step in range(1, 6):
        box.record(Phase.FORWARD, step)
    blackbox._COUNT.pack_into(box._view, blackbox._COUNT_OFFSET, 10**12)
    latest = BlackBoxReader(path).latest()
    assert latest is not None
    assert latest.step == 5


def test_collectives_are_counted_and_named(path: Path) -> None:
    box = make(path)
    box.issue("all_reduce(status, int64[3])", Phase.SYNC, 1)
    box.record(Phase.OPTIMIZER, 1)
    box.issue("all_reduce(norm, float32[1])", Phase.SYNC, 2)
    reader = BlackBoxReader(path)
    assert [(r.collective, reader.operation(r.operation)) for r in reader.tail(3)] == [
        (1, "all_reduce(status, int64[3])"),
        (1, ""),
        (2, "all_reduce(norm, float32[1])"),
    ]


def test_a_full_table_of_names_costs_only_the_names(path: Path) -> None:
    box = make(path)
    for number in range(200):
        box.issue(f"operation {number} " + "x" * 300, Phase.SYNC, number)
    reader = BlackBoxReader(path)
    latest = reader.latest()
    assert latest is not None
    assert (latest.collective, reader.operation(latest.operation)) == (200, "")
    assert reader.operation(1).startswith("operation 0 x")


def test_marks_tell_finished_from_left(path: Path) -> None:
    box = make(path)
    box.leave(12)
    left = BlackBoxReader(path).latest()
    box.finish(20)
    finished = BlackBoxReader(path).latest()
    assert left is not None
    assert finished is not None
    assert (left.mark, left.step) == (Mark.LEFT, 12)
    assert (finished.mark, finished.step) == (Mark.FINISHED, 20)


@pytest.mark.parametrize("content", [b"", b"short", b"\0" * 100_000])
def test_a_file_that_is_no_black_box_is_refused(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(IntegrityError):
        BlackBoxReader(path)


def test_a_cut_file_is_refused(path: Path) -> None:
    make(path)
    os.truncate(path, 7000)
    with pytest.raises(IntegrityError):
        BlackBoxReader(path)


def test_no_space_is_an_error_with_a_hint(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="black box") as caught:
        make(tmp_path / "file" / "rank.ring")
    assert "UPS_BLACKBOX_DIR" in caught.value.hint


WRITER = """
    import sys
    from pathlib import Path
    from ups.record.blackbox import BlackBox, Phase
    box = BlackBox.create(Path(sys.argv[1]), rank=0, world_size=1, attempt=0, capacity=8)
    print("ready", flush=True)
    step = 0
    while True:
        step += 1
        box.loss = float(step)
        box.record(Phase.FORWARD, step, step & 0xFFFF, step, step)
"""


@pytest.mark.processes
def test_a_reader_next_to_a_busy_writer_sees_whole_records_that_survive_sigkill(path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
        reader = BlackBoxReader(path)
        highest = 0
        for _ in range(20_000):
            for record in reader.since(highest):
                if record.step:
                    assert record.step == record.collective == record.batch == int(record.loss) == record.number - 1
                highest = record.number
        assert highest > 100
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        assert writer.stdout is not None
        writer.stdout.close()
    last = BlackBoxReader(path).latest()
    assert last is not None
    assert last.number >= highest
