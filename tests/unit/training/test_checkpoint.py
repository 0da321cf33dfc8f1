"""A checkpoint is what was committed: it loads bitwise, survives failed saves, and damage is never loaded."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_saver

from ups.config.schema import EngineConfig
from ups.distributed.environment import RankEnvironment
from ups.distributed.runtime import Runtime
from ups.errors import CheckpointError, DiskFullError, MachineError, RunDirectoryLostError
from ups.record import checkpoints
from ups.record.checkpoints import (
    latest_verified,
    list_checkpoints,
    read_progress,
    retain,
    wait_until_visible,
)
from ups.record.run_dir import RunDir
from ups.training.checkpoint import Checkpointer, read_weights
from ups.training.progress import Progress


@pytest.fixture
def runtime():  # type: ignore[no-untyped-def]
    with Runtime.start(EngineConfig(device="cpu"), RankEnvironment()) as runtime:
        yield runtime


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {
        "model/w": torch.full((3, 2), value),
        "model/frozen": torch.full((2,), 10 * value),
        "optimizer/w/step": torch.tensor(value),
        "ema/w": torch.full((3, 2), value / 2),
    }


def save(checkpointer: Checkpointer, step: int, value: float | None = None) -> None:
    checkpointer.save(tensors(float(step) if value is None else value), Progress(step=step, stage_step=step))
    checkpointer.wait()


@pytest.mark.parametrize("asynchronous", [True, False])
def test_what_was_saved_comes_back_bitwise(runtime: Runtime, tmp_path: Path, asynchronous: bool) -> None:
    checkpointer = Checkpointer(runtime, tmp_path, asynchronous=asynchronous)
    state = {"model/w": torch.randn(50, 7, dtype=torch.float64), "model/b": torch.randn(3).bfloat16()}
    kept = {name: t.clone() for name, t in state.items()}
    checkpointer.save(state, Progress(step=5))
    for tensor in state.values():
        tensor.zero_()  # the copy is taken before save returns
    checkpointer.wait()
    found = Checkpointer(runtime, tmp_path).find()
    assert found is not None
    assert found[1] == Progress(step=5)
    checkpointer.load(found[0], state)
    assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_a_run_without_checkpoints_starts_at_the_beginning(runtime: Runtime, tmp_path: Path) -> None:
    assert Checkpointer(runtime, tmp_path / "new").find() is None


def test_the_loop_goes_on_while_a_save_is_written(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    real = state_dict_saver.save

    def slow(*args: object, **options: object) -> object:
        release.wait(20)
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(state_dict_saver, "save", slow)
    checkpointer = Checkpointer(runtime, tmp_path)
    checkpointer.save(tensors(), Progress(step=1))
    assert latest_verified(tmp_path) is None
    release.set()
    checkpointer.wait()
    assert latest_verified(tmp_path) == RunDir(tmp_path).checkpoint(1)


def test_saves_need_no_new_thread(runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(runtime, tmp_path)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    save(checkpointer, 1)
    save(checkpointer, 2)
    assert latest_verified(tmp_path) == RunDir(tmp_path).checkpoint(2)
    with pytest.raises(MachineError, match="cannot start the thread 'ups-checkpoint'"):
        Checkpointer(runtime, tmp_path)


def test_a_save_that_fails_in_an_unforeseen_way_is_counted_and_not_waited_for(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_memory(*args: object) -> None:
        raise MemoryError

    checkpointer = Checkpointer(runtime, tmp_path)
    for place in ("make_temporary", "from_all", "from_first"):
        with monkeypatch.context() as context:
            context.setattr(f"ups.training.checkpoint.{place}", no_memory)
            save(checkpointer, 1)
        assert checkpointer.failed_in_row == 1
        assert "MemoryError" in caplog.text
        save(checkpointer, 2)
        assert checkpointer.failed_in_row == 0


def test_how_long_saves_take_is_known_when_the_first_is_done(runtime: Runtime, tmp_path: Path) -> None:
    checkpointer = Checkpointer(runtime, tmp_path)
    assert checkpointer.longest_seconds == 0.0
    save(checkpointer, 1)
    assert checkpointer.longest_seconds > 0.0


def test_failed_saves_are_counted_reported_and_forgiven_after_a_good_one(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = state_dict_saver.save

    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    checkpointer = Checkpointer(runtime, tmp_path)
    monkeypatch.setattr(state_dict_saver, "save", full)
    save(checkpointer, 1)
    save(checkpointer, 2)
    assert checkpointer.failed_in_row == 2
    assert caplog.text.count("No space left on device") == 2
    monkeypatch.setattr(state_dict_saver, "save", real)
    save(checkpointer, 3)
    assert checkpointer.failed_in_row == 0
    monkeypatch.setattr(state_dict_saver, "save", full)
    save(checkpointer, 4)
    save(checkpointer, 5)
    with pytest.raises(DiskFullError, match="3 saves in a row failed, the last at step 6"):
        save(checkpointer, 6)
    assert latest_verified(tmp_path) == RunDir(tmp_path).checkpoint(3)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step_00000003"]


def test_the_newest_checkpoints_stay(runtime: Runtime, tmp_path: Path) -> None:
    checkpointer = Checkpointer(runtime, tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        save(checkpointer, step)
    assert [step for step, _ in list_checkpoints(tmp_path)] == [10, 3]
    assert retain(tmp_path, 2) == []


def damage_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def damage_length(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [damage_byte, damage_length, Path.unlink])
@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "progress.json", "MANIFEST", "COMMITTED"])
def test_damage_is_never_loaded_and_the_older_one_is_used_with_a_warning(  # type: ignore[no-untyped-def]
    runtime: Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage, name: str
) -> None:
    checkpointer = Checkpointer(runtime, tmp_path)
    save(checkpointer, 4)
    save(checkpointer, 8)
    damage(RunDir(tmp_path).checkpoint(8) / name)
    found = checkpointer.find()
    assert found is not None
    assert found[1].step == 4
    reported = caplog.text
    assert "checkpoint step_00000008 is not used" in reported
    assert "falling back to the older checkpoint step_00000004" in reported
    save(checkpointer, 8)  # the same step can be saved again; the broken one is kept aside
    assert latest_verified(tmp_path) == RunDir(tmp_path).checkpoint(8)
    assert (tmp_path / "checkpoints" / "broken_step_00000008").is_dir()


def test_a_run_whose_checkpoints_are_all_broken_is_not_silently_started_again(runtime: Runtime, tmp_path: Path) -> None:
    checkpointer = Checkpointer(runtime, tmp_path)
    save(checkpointer, 4)
    damage_byte(RunDir(tmp_path).checkpoint(4) / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        checkpointer.find()


def test_looking_changes_nothing(runtime: Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointer = Checkpointer(runtime, tmp_path)
    save(checkpointer, 4)
    save(checkpointer, 8)
    damage_byte(RunDir(tmp_path).checkpoint(8) / "__0_0.distcp")
    assert latest_verified(tmp_path) == RunDir(tmp_path).checkpoint(4)
    assert [record.levelname for record in caplog.records if record.name.startswith("ups")] == ["WARNING"] * 2
    assert len(list_checkpoints(tmp_path)) == 2


def test_another_recipe_is_refused_by_name(runtime: Runtime, tmp_path: Path) -> None:
    checkpointer = Checkpointer(runtime, tmp_path)
    save(checkpointer, 4)
    with pytest.raises(CheckpointError, match="has no entry 'model/more'"):
        checkpointer.load(RunDir(tmp_path).checkpoint(4), tensors() | {"model/more": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"'model/w' has the shape \[3, 2\], the model has \[3, 99\]"):
        checkpointer.load(RunDir(tmp_path).checkpoint(4), {"model/w": torch.zeros(3, 99)})


def test_a_new_stage_takes_over_the_weights_and_nothing_else(runtime: Runtime, tmp_path: Path) -> None:
    checkpointer = Checkpointer(runtime, tmp_path)
    save(checkpointer, 4)
    state = tensors(0.0) | {"model/new": torch.full((1,), 7.0)}
    checkpointer.load(RunDir(tmp_path).checkpoint(4), state, only_model=True)
    assert float(state["model/w"][0, 0]) == 4.0
    assert float(state["model/new"]) == 7.0
    assert float(state["optimizer/w/step"]) == 0.0


def test_files_that_come_into_sight_late_are_waited_for(tmp_path: Path, runtime: Runtime) -> None:
    checkpointer = Checkpointer(runtime, tmp_path / "here")
    save(checkpointer, 4)
    late = tmp_path / "late"
    timer = threading.Timer(0.5, lambda: shutil.copytree(RunDir(tmp_path / "here").checkpoint(4), late))
    timer.start()
    wait_until_visible(late, seconds=20)
    timer.join()
    with pytest.raises(CheckpointError, match="not visible on this host after 0 s"):
        wait_until_visible(tmp_path / "never", seconds=0)


def test_weights_can_be_read_without_a_process_group(runtime: Runtime, tmp_path: Path) -> None:
    checkpointer = Checkpointer(runtime, tmp_path)
    save(checkpointer, 4)
    path = RunDir(tmp_path).checkpoint(4)
    assert {n: float(t.flatten()[0]) for n, t in read_weights(path).items()} == {"w": 2.0, "frozen": 40.0}
    damage_byte(path / "__0_0.distcp")
    with pytest.raises(CheckpointError, match="cannot be trusted"):
        read_weights(path)


def test_progress_of_a_checkpoint_is_plain_json(runtime: Runtime, tmp_path: Path) -> None:
    save(Checkpointer(runtime, tmp_path), 4)
    document = json.loads((RunDir(tmp_path).checkpoint(4) / "progress.json").read_text())
    assert document == read_progress(RunDir(tmp_path).checkpoint(4))
    assert document["world_size"] == 1


def test_a_link_in_place_of_a_checkpoint_is_neither_followed_nor_a_failed_save(
    runtime: Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    checkpointer = Checkpointer(runtime, run_dir, keep=1)
    save(checkpointer, 4)
    RunDir(run_dir).checkpoint(4).rename(elsewhere)
    RunDir(run_dir).checkpoint(4).symlink_to(elsewhere)
    before = {path.name: path.read_bytes() for path in elsewhere.iterdir()}
    save(checkpointer, 8)  # retention meets the link
    save(checkpointer, 12)
    RunDir(run_dir).checkpoint(16).symlink_to(elsewhere)
    save(checkpointer, 16)  # commits where a link stands
    assert checkpointer.failed_in_row == 0
    assert "save of step" not in (reported := caplog.text)
    assert "step_00000016 is a symbolic link and is set aside" in reported
    RunDir(run_dir).checkpoint(20).symlink_to(elsewhere)
    found = checkpointer.find()
    assert found is not None
    assert (found[0], found[1].step) == (RunDir(run_dir).checkpoint(16), 16)
    assert not RunDir(run_dir).checkpoint(16).is_symlink()
    assert {path.name: path.read_bytes() for path in elsewhere.iterdir()} == before


def test_old_checkpoints_that_cannot_be_removed_do_not_undo_a_commit(
    runtime: Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> None:
        raise MachineError("planted")

    monkeypatch.setattr(checkpoints, "retain", refuse)
    checkpointer = Checkpointer(runtime, tmp_path)
    save(checkpointer, 4)
    assert checkpointer.failed_in_row == 0
    assert "old checkpoints could not be removed: environment: planted" in caplog.text


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_directory_that_is_gone_is_not_made_again(runtime: Runtime, tmp_path: Path, replaced: bool) -> None:
    run_dir = tmp_path / "run"
    checkpointer = Checkpointer(runtime, run_dir)
    save(checkpointer, 4)
    run_dir.rename(tmp_path / "moved")
    if replaced:
        run_dir.mkdir()
    with pytest.raises(RunDirectoryLostError, match="replaced" if replaced else "removed or moved"):
        save(checkpointer, 8)
    assert run_dir.exists() == replaced
    assert not (run_dir / "checkpoints").exists()


def test_a_checkpoint_of_a_stepper_with_a_single_network_loads(runtime: Runtime, tmp_path: Path) -> None:
    kinds = {"model/{}": (3, 2), "optimizer/{}/exp_avg": (3, 2), "optimizer/{}/step": (), "ema/{}": (3, 2)}
    former = {kind.format("stepper.network.encoder.w"): torch.randn(shape) for kind, shape in kinds.items()}
    former["model/stepper.normalization.scale"] = torch.randn(4)
    checkpointer = Checkpointer(runtime, tmp_path, asynchronous=False)
    checkpointer.save(former, Progress(step=2))
    path = RunDir(tmp_path).checkpoint(2)

    def empty() -> dict[str, Tensor]:
        return {name.replace("network.", "networks.operator."): torch.zeros_like(t) for name, t in former.items()}

    whole, model = empty(), empty()
    checkpointer.load(path, whole)
    checkpointer.load(path, model, only_model=True)
    for (name, tensor), stored in zip(whole.items(), former.values(), strict=True):
        assert torch.equal(tensor, stored), name
        assert torch.equal(model[name], stored if name.startswith("model/") else torch.zeros_like(stored)), name
    assert set(read_weights(path)) == {"stepper.networks.operator.encoder.w", "stepper.normalization.scale"}
    with pytest.raises(CheckpointError, match=r"has no entry 'model/stepper\.networks\.corrector\.w'"):
        checkpointer.load(path, {"model/stepper.networks.corrector.w": torch.zeros(1)})
