"""What is brought ahead is there when it is read, though the cache is smaller than what the loader would like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.seaweed_server import serve_s3
from tests.support.slow_proxy import slow_proxy
from ups.buckets import block_cache, cached_objects
from ups.buckets.block_cache import BLOCK_BYTES, DIRECTORY, LIMIT, the_cache
from ups.buckets.cached_objects import forget
from ups.config.schema import DataConfig
from ups.data import read_ahead
from ups.data.loader import build_loader
from ups.data.open import open_task
from ups.errors import MachineError
from ups.formats.store_writer import StoreWriter
from ups.formats.zarr_store import StoreReader
from ups.spec.batch import RankInfo
from ups.spec.task import AxisSpec, FieldSpec, TaskSpec

FRAMES, WINDOW, POINTS, CHANNELS, TRAJECTORIES, BATCH, NUM_BATCHES = 21, 4, 32, 3, 32, 8, 25
WINDOW_BYTES = 4 * WINDOW * CHANNELS * POINTS**2


def _write(path: Path) -> None:
    """A store of 8 MB."""
    task = TaskSpec("t", tuple(FieldSpec(f"u{i}") for i in range(CHANNELS)), (AxisSpec("x"), AxisSpec("y")), dt=1.0)
    draw = np.random.default_rng(0)
    with StoreWriter(path, task, [np.arange(POINTS)] * 2, FRAMES) as writer:
        for _ in range(TRAJECTORIES):
            writer.append("train", state=draw.random((FRAMES, CHANNELS, POINTS, POINTS), np.float32))


def _settings(path: str) -> DataConfig:
    # What the loader would have ahead is three times what the cache of the test below holds.
    loading = {"workers": 0, "prefetch": 8}
    return DataConfig.model_validate({"tasks": [{"name": "t", "path": path}], "batch_size": BATCH, "loader": loading})


def test_without_a_cache_nothing_fails_before_a_window_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room() -> None:
        raise MachineError("the disk has no room")

    _write(tmp_path / "s.zarr")
    monkeypatch.setattr(StoreReader, "remote", True)
    monkeypatch.setattr(read_ahead, "the_cache", no_room)
    data = _settings(str(tmp_path / "s.zarr"))
    with build_loader(data, [open_task(data.tasks[0])], RankInfo(0, 1), seed=0, window_frames=WINDOW) as loader:
        assert loader._ahead is not None
        for _ in range(3):
            next(loader)


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_no_window_is_downloaded_twice_for_one_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path / "s.zarr")
    monkeypatch.setattr(block_cache, "LEAST_BYTES", 1 << 20)
    with serve_s3() as server, slow_proxy(server.endpoint) as counter:
        address = server.upload(tmp_path / "s.zarr", "ahead/s.zarr")
        settings = {"AWS_ENDPOINT_URL": counter.endpoint, DIRECTORY: str(tmp_path / "cache"), LIMIT: str(2 << 20)}
        for name, value in {**server.environment, **settings}.items():
            monkeypatch.setenv(name, value)
        cached_objects._store.cache_clear()
        forget("")
        data = _settings(address)
        with build_loader(data, [open_task(data.tasks[0])], RankInfo(0, 1), seed=0, window_frames=WINDOW) as loader:
            before = counter.num_bytes
            for _ in range(NUM_BATCHES):
                next(loader)
            num_bytes, num_ahead = counter.num_bytes - before, loader._config.prefetch
        most = WINDOW_BYTES + BLOCK_BYTES  # of a window, on average over all places where it can begin
        assert num_bytes < 1.05 * (NUM_BATCHES + num_ahead) * BATCH * most
        assert the_cache().used_bytes() <= 2 << 20
