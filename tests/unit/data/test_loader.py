"""A loader delivers exactly the planned windows in order, with or without workers, and reports what it cannot read."""

from __future__ import annotations

import itertools
import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # worker processes inherit it and find planted_readers
import planted_readers as planted

from ups.config.schema import DataConfig
from ups.data.loader import Loader, build_loader, first_batch
from ups.errors import CheckpointError, ConfigError, DataError, MachineError
from ups.formats.zarr_store import StoreReader
from ups.record.causes import cause_of_error
from ups.record.failure import location_of_error
from ups.spec.batch import Batch, RankInfo

ALONE = RankInfo(0, 1)


@pytest.fixture(scope="module")
def wave(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.write_wave(tmp_path_factory.mktemp("wave") / "wave.zarr")


@pytest.fixture(scope="module")
def darcy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted.write_darcy(tmp_path_factory.mktemp("darcy") / "darcy.zarr")


def data_config(*paths: Path, batch_size: int = 8, workers: int = 0, timeout: float = 30.0) -> DataConfig:
    tasks = [{"name": path.stem, "path": str(path)} for path in paths]
    loader = {"workers": workers, "prefetch": 2, "timeout_seconds": timeout}
    return DataConfig.model_validate({"tasks": tasks, "batch_size": batch_size, "loader": loader})


def loader_of(
    *readers: StoreReader,
    rank_info: RankInfo = ALONE,
    workers: int = 0,
    timeout: float = 30.0,
    micro_batch_size: int | None = None,
    start_step: int = 0,
) -> Loader:
    data = data_config(*(r.path for r in readers), workers=workers, timeout=timeout)
    return build_loader(
        data, readers, rank_info, seed=3, window_frames=3, micro_batch_size=micro_batch_size, start_step=start_step
    )


def take(loader: Loader, count: int) -> list[Batch]:
    """The only batches of the next micro-batches."""
    return [batch for group in itertools.islice(loader, count) for batch in group]


def numbers(batches: list[Batch]) -> list[list[int]]:
    return [batch.numbers.tolist() for batch in batches]


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def failure_of(loader: Loader, batches: int = 200) -> DataError:
    with pytest.raises(DataError) as caught:
        take(loader, batches)
    return caught.value


# What is delivered


def test_a_batch_holds_the_frames_that_its_numbers_name(wave: Path) -> None:
    for batch in take(loader_of(StoreReader(wave)), 5):
        trajectories, starts = batch.numbers // 7, batch.numbers % 7  # 9 frames, windows of 3
        expected = trajectories * 1000.0 + starts
        assert torch.equal(batch.state[:, 0, 0, 0], expected)
        assert torch.equal(batch.state[:, 2, 0, 5], expected + 2)
        assert torch.equal(batch.static[:, 0, 0], trajectories.float())
        assert batch.state.shape == (8, 3, 2, 16)
        assert batch.target.shape == (8, 0, 16)
        assert batch.parameters.shape == (8, 2)
        assert batch.dt.tolist() == pytest.approx([0.05] * 8)
        assert (batch.dt.dtype, batch.numbers.dtype) == (torch.float32, torch.int64)
        assert batch.coordinates[0].dtype == torch.float64


def test_a_steady_task_has_no_frames(darcy: Path) -> None:
    (batch,) = take(loader_of(StoreReader(darcy)), 1)
    assert batch.state.shape == (8, 0, 0, 4, 6)
    assert torch.equal(batch.static[:, 0, 0, 0], batch.numbers.float())
    assert torch.equal(batch.target, -batch.static)


def test_steps_and_tasks_follow_the_plan(wave: Path, darcy: Path) -> None:
    loader = loader_of(StoreReader(wave), StoreReader(darcy), micro_batch_size=4)
    assert [loader.batches_in_step(step) for step in range(3)] == [4, 4, 4]
    batches = take(loader, 8)
    assert [b.stage_step for b in batches] == [0] * 4 + [1] * 4
    assert [b.task.name for b in batches] == ["wave", "wave", "darcy", "darcy"] * 2


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_and_micro_batches_only_cut_the_same_global_batch(wave: Path, darcy: Path, world_size: int) -> None:
    readers = StoreReader(wave), StoreReader(darcy)
    whole = numbers(take(loader_of(*readers), 6))
    parts = [
        numbers(take(loader_of(*readers, rank_info=RankInfo(r, world_size), micro_batch_size=1), 48 // world_size))
        for r in range(world_size)
    ]
    per_block = 8 // world_size
    for block, expected in enumerate(whole):
        rows = [n for part in parts for batch in part[block * per_block : (block + 1) * per_block] for n in batch]
        assert rows == expected


def test_tasks_of_equal_grids_share_a_micro_batch_where_the_model_takes_them_together(wave: Path, darcy: Path) -> None:
    tasks = [
        {"name": "wave", "path": str(wave), "batch_size": 4},
        {"name": "darcy", "path": str(darcy), "batch_size": 2},
        {"name": "other", "path": str(wave)},
    ]
    data = DataConfig.model_validate({"tasks": tasks, "batch_size": 8})
    readers = [StoreReader(wave), StoreReader(darcy), StoreReader(wave)]
    loader = build_loader(data, readers, ALONE, seed=3, window_frames=3, micro_batch_size=4, grouped=True)
    assert loader.batches_in_step(0) == 3
    groups = list(itertools.islice(loader, 6))
    assert [[(b.task.name, b.num_samples) for b in group] for group in groups[:3]] == [
        [("wave", 4), ("wave", 4)],
        [("wave", 4)],  # the larger block continues alone
        [("darcy", 2)],
    ]
    assert [group[0].stage_step for group in groups] == [0, 0, 0, 1, 1, 1]
    assert sum(b.sample_weight * b.num_samples for group in groups[:3] for b in group) == pytest.approx(1.0)
    with build_loader(
        data.model_copy(update={"loader": data.loader.model_copy(update={"workers": 2})}),
        readers, ALONE, seed=3, window_frames=3, micro_batch_size=4, grouped=True,
    ) as workers:  # fmt: skip
        again = list(itertools.islice(workers, 6))
    assert [numbers(list(group)) for group in again] == [numbers(list(group)) for group in groups]


def test_the_position_is_the_step_and_another_world_continues_with_the_next_windows(wave: Path) -> None:
    reader = StoreReader(wave)
    through = numbers(take(loader_of(reader), 6))
    first = loader_of(reader)
    take(first, 4)
    state = first.state_dict()
    assert state == {"step": 4}
    ranks = [loader_of(reader, rank_info=RankInfo(r, 2)) for r in range(2)]
    for loader in ranks:
        loader.load_state_dict(state)
    again = [numbers(take(loader, 2)) for loader in ranks]
    assert [a + b for a, b in zip(*again, strict=True)] == through[4:]
    assert numbers(take(loader_of(reader, start_step=4), 2)) == through[4:]


def test_a_step_of_which_a_batch_is_missing_is_repeated(wave: Path) -> None:
    loader = loader_of(StoreReader(wave), micro_batch_size=2)
    take(loader, 6)
    assert loader.state_dict() == {"step": 1}


@pytest.mark.parametrize("step", [-1, None, "3", 1.5])
def test_a_position_that_is_no_step_is_refused(wave: Path, step: object) -> None:
    with pytest.raises(CheckpointError):
        loader_of(StoreReader(wave)).load_state_dict({"step": step})


def test_each_task_needs_its_reader(wave: Path, darcy: Path) -> None:
    with pytest.raises(ConfigError, match="2 tasks need as many readers"):
        build_loader(data_config(wave, darcy), [StoreReader(wave)], RankInfo(0, 1), seed=0, window_frames=2)


def test_windows_longer_than_the_trajectories_are_refused(wave: Path) -> None:
    with pytest.raises(DataError, match="do not fit"):
        build_loader(data_config(wave), [StoreReader(wave)], RankInfo(0, 1), seed=0, window_frames=10)


def test_a_first_batch_has_the_first_window_of_each_trajectory(wave: Path) -> None:
    batch = first_batch(StoreReader(wave), "valid", window_frames=9, batch_size=2)
    assert batch.state[:, 0, 0, 0].tolist() == [0.0, 1000.0]
    assert batch.state.shape[1] == 9


# What goes wrong, in the loop


def test_an_error_names_file_trajectory_and_frames(wave: Path) -> None:
    error = failure_of(loader_of(planted.RaisingReader(wave)))
    assert f"task 'wave', {wave} train trajectory 7, frames" in error.message
    assert "ValueError: planted" in error.message


def test_an_error_that_cannot_be_repeated_says_so(wave: Path) -> None:
    error = failure_of(loader_of(planted.FlakyReader(wave)))
    assert "though each window alone could" in error.message
    assert "Input/output error" in error.message


def test_a_loader_that_failed_stays_failed(wave: Path) -> None:
    loader = loader_of(planted.RaisingReader(wave))
    assert failure_of(loader) is failure_of(loader)


# Real worker processes


@pytest.mark.processes
def test_workers_deliver_what_the_loop_would_read(wave: Path, darcy: Path) -> None:
    readers: tuple[StoreReader, ...] = (StoreReader(wave), StoreReader(darcy))
    expected = take(loader_of(*readers, micro_batch_size=4), 20)
    with loader_of(*readers, workers=3, micro_batch_size=4) as loader:
        for ours, (theirs,) in zip(expected, loader, strict=False):
            assert ours.numbers.tolist() == theirs.numbers.tolist()
            assert (ours.task, ours.stage_step) == (theirs.task, theirs.stage_step)
            for name in ("state", "static", "target", "parameters", "dt"):
                assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
            assert all(torch.equal(a, b) for a, b in zip(ours.coordinates, theirs.coordinates, strict=True))
            theirs.state.add_(1)  # a batch belongs to whoever received it
        pids = loader.worker_pids
        assert all("torch" not in Path(f"/proc/{pid}/maps").read_text() for pid in pids)
        loader.load_state_dict({"step": 2})
        assert numbers(take(loader, 4)) == numbers(expected[8:12])
    assert len(pids) == 3
    assert all(gone(pid) for pid in pids)


@pytest.mark.processes
def test_a_batch_outlives_its_worker_and_loader(wave: Path) -> None:
    open_before = len(os.listdir("/proc/self/fd"))
    with loader_of(StoreReader(wave), workers=1) as loader:
        batches = take(loader, 40)
    assert torch.equal(batches[0].state[:, 0, 0, 0], (batches[0].numbers // 7) * 1000.0 + batches[0].numbers % 7)
    # Forty live batches hold memory, but no file descriptor.
    assert len(os.listdir("/proc/self/fd")) <= open_before + 1


@pytest.mark.processes
def test_a_killed_worker_is_named_at_once(wave: Path) -> None:
    with loader_of(planted.SlowReader(wave), workers=2) as loader:
        next(loader)
        os.kill(loader.worker_pids[1], signal.SIGKILL)
        start = time.monotonic()
        error = failure_of(loader)
        assert time.monotonic() - start < 20
        assert f"loader worker 1 (pid {loader.worker_pids[1]}) was killed by SIGKILL while reading" in error.message
        # Worker 1 reads the odd steps; those it had sent before it died are still delivered.
        assert re.search(r"8 windows of task 'wave' for step \d*[13579], the first at .*wave.zarr train", error.message)
        assert cause_of_error(error) == "worker_killed(SIGKILL)"


@pytest.mark.processes
def test_a_stopped_worker_is_named_within_the_deadline_and_does_not_block_the_end(wave: Path) -> None:
    with loader_of(planted.SlowReader(wave), workers=2, timeout=4.0) as loader:
        next(loader)
        pids = loader.worker_pids
        os.kill(pids[1], signal.SIGSTOP)
        start = time.monotonic()
        error = failure_of(loader)
        assert time.monotonic() - start < 30
        assert f"loader worker 1 (pid {pids[1]}) has delivered nothing" in error.message
        assert "it is stopped" in error.message
        start = time.monotonic()
    assert time.monotonic() - start < 30
    assert all(gone(pid) for pid in pids)


@pytest.mark.processes
def test_a_worker_stopped_before_its_first_batch_is_named_however_much_is_asked_of_it(wave: Path) -> None:
    reader = StoreReader(wave)
    data = data_config(wave, workers=1, timeout=1.0)
    data = data.model_copy(update={"loader": data.loader.model_copy(update={"prefetch": 1024})})
    with build_loader(data, [reader], ALONE, seed=0, window_frames=2) as loader:
        loader.start()
        os.kill(loader.worker_pids[0], signal.SIGSTOP)
        start = time.monotonic()
        error = failure_of(loader)
        assert time.monotonic() - start < 30
    assert "it is stopped" in error.message


@pytest.mark.processes
def test_few_descriptors_are_enough(wave: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(int(name) for name in os.listdir("/proc/self/fd"))
    with loader_of(StoreReader(wave), workers=4) as loader:
        next(loader)
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 16, hard))
        try:
            batches = take(loader, 60)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert [b.stage_step for b in batches] == list(range(1, 61))


@pytest.mark.processes
def test_workers_that_cannot_be_started_are_a_matter_of_the_machine(wave: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    loader = loader_of(StoreReader(wave), workers=32)
    before = sorted(os.listdir("/proc/self/fd"))
    free = [n for n in range(soft) if str(n) not in before]
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[8], hard))
    try:
        with pytest.raises(MachineError, match=r"only \d+ of 32 loader workers could be started: Too many open files"):
            loader.start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.processes
def test_a_worker_that_hangs_is_named_with_its_stack(
    wave: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPS_FAULT_DIR", str(tmp_path))
    with loader_of(planted.SleepingReader(wave), workers=1, timeout=1.0) as loader:
        error = failure_of(loader)
    assert "timeout_seconds has passed" in error.message
    stack = tmp_path / "worker_0_0.txt"
    assert str(stack) in error.hint
    assert "planted_readers.py" in stack.read_text()


@pytest.mark.processes
def test_a_crash_leaves_its_stack(wave: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UPS_FAULT_DIR", str(tmp_path))
    with loader_of(planted.SlowReader(wave), workers=1) as loader:
        next(loader)
        os.kill(loader.worker_pids[0], signal.SIGSEGV)
        error = failure_of(loader)
    assert "was killed by SIGSEGV" in error.message
    assert "its stack is in" in error.hint
    stack = (tmp_path / "worker_0_0.txt").read_text()
    assert "Segmentation fault" in stack
    assert "ups/data/worker.py" in stack


@pytest.mark.processes
def test_a_crash_in_a_recorded_rank_is_reported_at_the_line_of_the_reader(
    wave: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPS_FAILURE_STEM", str(tmp_path / "rank_00003"))
    with loader_of(planted.CrashingReader(wave), workers=1) as loader:
        error = failure_of(loader)
    frame = location_of_error(error)
    assert frame is not None
    assert (Path(frame.path).name, frame.function) == ("planted_readers.py", "crash")
    assert cause_of_error(error) == "worker_killed(SIGSEGV)"
    assert f"was killed by SIGSEGV at {frame.short()} while reading" in error.message
    assert "Segmentation fault" in (tmp_path / "rank_00003.worker_00.crash.txt").read_text()


@pytest.mark.processes
def test_an_exception_in_a_recorded_rank_is_reported_at_the_line_of_the_reader(
    wave: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UPS_FAILURE_STEM", str(tmp_path / "rank_00003"))
    with loader_of(planted.RaisingReader(wave), workers=1) as loader:
        error = failure_of(loader)
    alone = failure_of(loader_of(planted.RaisingReader(wave)))
    for reported in (error, alone):  # with and without workers
        frame = location_of_error(reported)
        assert frame is not None
        assert (Path(frame.path).name, frame.function) == ("planted_readers.py", "_frames")
    record = json.loads((tmp_path / "rank_00003.worker_00.json").read_text())
    assert record["cause"] == "data"
    assert "ValueError: planted" in record["message"]


@pytest.mark.processes
def test_an_exception_in_a_worker_arrives_with_file_trajectory_frame_and_traceback(wave: Path) -> None:
    with loader_of(planted.RaisingReader(wave), workers=2) as loader:
        error = failure_of(loader)
    assert f"task 'wave', {wave} train trajectory 7, frames" in error.message
    assert "ValueError: planted" in error.message
    assert any("planted_readers.py" in note for note in error.__notes__)


@pytest.mark.processes
def test_workers_ignore_the_signals_that_ask_a_job_to_leave(wave: Path) -> None:
    with loader_of(StoreReader(wave), workers=2) as loader:
        loader.start()
        for pid in loader.worker_pids:  # from the first instant on
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        take(loader, 3)
        for pid in loader.worker_pids:
            os.kill(pid, signal.SIGTERM)
        assert numbers(take(loader, 8)) == numbers(take(loader_of(StoreReader(wave), start_step=3), 8))


@pytest.mark.processes
def test_a_killed_parent_leaves_no_worker_not_even_a_stopped_or_busy_one(wave: Path, tmp_path: Path) -> None:
    script = (
        "import sys; sys.path.append(sys.argv[2]); import planted_readers as planted\n"
        "from ups.config.schema import DataConfig\n"
        "from ups.data.loader import build_loader\n"
        "from ups.spec.batch import RankInfo\n"
        "data = DataConfig.model_validate({'tasks': [{'name': 'wave', 'path': sys.argv[1]}], 'batch_size': 8,"
        " 'loader': {'workers': 3}})\n"
        "reader = planted.SleepingReader(sys.argv[1])\n"
        "loader = build_loader(data, [reader], RankInfo(0, 1), seed=0, window_frames=2)\n"
        "loader.start(); print(*loader.worker_pids, flush=True)\n"
        "for batch in loader: pass\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", script, str(wave), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "UPS_FAULT_DIR": str(tmp_path)},
    )
    try:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 3
        assert eventually(lambda: len(list(tmp_path.iterdir())) == 3, 120)  # they are up
        os.kill(pids[0], signal.SIGSTOP)
    finally:
        parent.kill()
        parent.wait()
    assert eventually(lambda: all(gone(pid) for pid in pids))


@pytest.mark.processes
def test_a_loader_that_is_forgotten_takes_its_workers_along(wave: Path) -> None:
    loader = loader_of(StoreReader(wave), workers=1)
    next(loader)
    (pid,) = loader.worker_pids
    del loader
    assert eventually(lambda: gone(pid))


@pytest.mark.processes
def test_a_closed_loader_says_so(wave: Path) -> None:
    loader = loader_of(StoreReader(wave), workers=1)
    loader.close()
    loader.close()
    with pytest.raises(DataError, match="closed"):
        next(loader)
