"""A run continues, and is called completed, only with its own checkpoints, recipe, statistics and data.

Everything that is planted here is whole: every hash fits. What is missing is that it belongs to the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import ups
from tests.support.mixture import mixture_recipe, write_mixture
from ups.record.checkpoints import list_checkpoints
from ups.record.manifest import COMMITTED_NAME, MANIFEST_NAME, commit_directory

pytestmark = [pytest.mark.processes, pytest.mark.timeout(1800)]

STEPS = 24


def train(run: Path, *options: str, ranks: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ups", "train", str(run), "--ranks", str(ranks), *options]
    return subprocess.run(command, env=environment() | variables, capture_output=True, text=True, timeout=900)


def environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}


def write_recipe(folder: Path, name: str, seed: int = 3) -> Path:
    document = mixture_recipe(
        folder / name, [], stages=[{"type": "operator", "steps": STEPS, "optim": {"learning_rate": 2e-3}}]
    )
    document["run"] |= {"name": name, "seed": seed}
    document["data"]["tasks"] = [{"name": "wave1d", "path": str(folder / "data" / "wave1d.zarr")}]
    document["checkpoint"] = {"interval_steps": 4, "keep": 10}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@contextlib.contextmanager
def running(recipe: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A training in progress; nothing of it outlives the block."""
    command = [sys.executable, "-m", "ups", "train", str(recipe), "--ranks", "1", *options]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def ended(process: subprocess.Popen[str], code: int, cause: str = "") -> None:
    """Wait for the end; it must have this exit code and, if there is one, name the cause."""
    output = process.communicate(timeout=900)[0]
    assert process.returncode == code, output
    assert cause in output
    assert ("completed" in output) == (code == 0), output


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 400
    while not (run_dir / "checkpoints" / f"step_{step:08d}" / COMMITTED_NAME).exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)


def rank_pid(run_dir: Path) -> int:
    boxes = json.loads((run_dir / "run.json").read_text())["blackbox_dir"]
    return int(json.loads((Path(boxes) / "rank_00000.pid").read_text())["rank_pid"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of one recipe with different seeds, both asked to leave after some steps."""
    folder = tmp_path_factory.mktemp("substitution")
    (folder / "data").mkdir()
    write_mixture(folder / "data")
    for name, seed in (("mine", 3), ("other", 4)):
        with running(write_recipe(folder, name, seed), "--set", "engine.max_seconds=900") as process:
            wait_for_step(folder / name, 8, process)
            process.send_signal(signal.SIGTERM)
            ended(process, 143)
        assert len(list_checkpoints(folder / name)) >= 2
    return folder


@pytest.fixture
def mine(folder: Path, tmp_path: Path) -> Path:
    """A copy of the interrupted run, and of its data, to do something to."""
    shutil.copytree(folder / "data", tmp_path / "data")
    shutil.copytree(folder / "mine", tmp_path / "mine", symlinks=True)
    config = tmp_path / "mine" / "config.yaml"
    config.write_text(config.read_text().replace(str(folder), str(tmp_path)))
    return tmp_path / "mine"


def newest(run_dir: Path) -> tuple[int, Path]:
    return list_checkpoints(run_dir)[0]


def commit_again(path: Path) -> None:
    """Hashes that fit again, after something was changed."""
    scratch = path.with_name("scratch")
    shutil.copytree(path, scratch)
    for name in (MANIFEST_NAME, COMMITTED_NAME):
        (scratch / name).unlink()
    shutil.rmtree(path)
    commit_directory(scratch, path)


def change_progress(path: Path, **changes: Any) -> None:
    document = json.loads((path / "progress.json").read_text())
    for key, value in changes.items():
        if key in document["progress"]:
            document["progress"][key] = value
        elif value is None:
            document.pop(key)
        else:
            document[key] = value
    (path / "progress.json").write_text(json.dumps(document))
    commit_again(path)


def other_seed_as_newest(mine: Path, folder: Path) -> None:
    step, path = newest(mine)
    shutil.rmtree(path)
    shutil.copytree(newest(folder / "other")[1], path)
    change_progress(path, step=step, stage_step=step)


def other_seed_as_a_later_step(mine: Path, folder: Path) -> None:
    step, _ = newest(mine)
    path = mine / "checkpoints" / f"step_{step + 4:08d}"
    shutil.copytree(newest(folder / "other")[1], path)
    change_progress(path, step=step + 4, stage_step=step + 4)


def other_seed_with_a_forged_mark(mine: Path, folder: Path) -> None:
    path = newest(mine)[1]
    mark = json.loads((path / "progress.json").read_text())["identity"]
    other_seed_as_newest(mine, folder)
    change_progress(path, identity=mark)


def no_mark(mine: Path, folder: Path) -> None:
    change_progress(newest(mine)[1], identity=None)


def renamed_to_another_step(mine: Path, folder: Path) -> None:
    step, path = newest(mine)
    path.rename(path.with_name(f"step_{step + 4:08d}"))


def weights_of_an_older_step(mine: Path, folder: Path) -> None:
    (_, path), (_, older) = list_checkpoints(mine)[:2]
    for file in older.glob("__0_*"):
        shutil.copy2(file, path / file.name)
    shutil.copy2(older / ".metadata", path / ".metadata")
    commit_again(path)


def progress_that_is_done(mine: Path, folder: Path) -> None:
    change_progress(newest(mine)[1], stage_finished=True)


def progress_of_other_updates(mine: Path, folder: Path) -> None:
    change_progress(newest(mine)[1], updates=1)


def faster_recipe(mine: Path, folder: Path) -> None:
    text = (mine / "config.yaml").read_text()
    assert "learning_rate: 0.002" in text
    (mine / "config.yaml").write_text(text.replace("learning_rate: 0.002", "learning_rate: 0.05"))


def tripled_statistics(mine: Path, folder: Path) -> None:
    document = json.loads((mine / "statistics.json").read_text())
    document["wave1d"]["state_std"] = [3 * value for value in document["wave1d"]["state_std"]]
    (mine / "statistics.json").write_text(json.dumps(document, indent=1) + "\n")


def train_shard(store: Path) -> Path:
    return next(path for path in sorted((store / "train" / "state" / "c").rglob("*")) if path.is_file())


def other_bytes_of_the_same_size(mine: Path, folder: Path) -> None:
    """A shard of other trajectories: readable, of the same size and, to be sure, of the same time."""
    other = mine.parent / "other_data"
    other.mkdir()
    write_mixture(other, seed=8)
    path, planted = (train_shard(folder / "wave1d.zarr") for folder in (mine.parent / "data", other))
    status = path.stat()
    assert planted.stat().st_size == status.st_size
    shutil.copyfile(planted, path)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def one_flipped_byte(mine: Path, folder: Path) -> None:
    path = train_shard(mine.parent / "data" / "wave1d.zarr")
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


SUBSTITUTIONS: list[tuple[Callable[[Path, Path], None], str, int]] = [
    (other_seed_as_newest, "foreign_checkpoint", 8),
    (other_seed_as_a_later_step, "foreign_checkpoint", 8),
    (other_seed_with_a_forged_mark, "foreign_checkpoint", 8),
    (no_mark, "foreign_checkpoint", 8),
    (renamed_to_another_step, "foreign_checkpoint", 8),
    (weights_of_an_older_step, "foreign_checkpoint", 8),
    (progress_that_is_done, "foreign_checkpoint", 8),
    (progress_of_other_updates, "foreign_checkpoint", 8),
    (faster_recipe, "recipe_changed", 3),
    (tripled_statistics, "statistics_changed", 4),
    (other_bytes_of_the_same_size, "data_changed", 4),
    (one_flipped_byte, "data_changed", 4),
]


@pytest.mark.parametrize(
    ("substitute", "cause", "code"), SUBSTITUTIONS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_run_does_not_continue_with_what_is_not_its_own(
    substitute: Callable[[Path, Path], None], cause: str, code: int, mine: Path, folder: Path
) -> None:
    substitute(mine, folder)
    before = {path: path.read_bytes() for path in (mine / "config.yaml", mine / "statistics.json")}
    done = train(mine)
    assert done.returncode == code, done.stdout + done.stderr
    assert f"{cause}: " in done.stderr
    assert "completed" not in done.stdout
    assert {path: path.read_bytes() for path in before} == before
    if cause == "foreign_checkpoint":
        verdict = json.loads((mine / "run.json").read_text())
        assert (verdict["state"], verdict["cause"]) == ("failed", cause)


def test_what_may_differ_gives_no_alarm(mine: Path, folder: Path) -> None:
    """Two ranks instead of one, other free settings, and the data in another place: the same run."""
    shutil.move(mine.parent / "data", mine.parent / "moved")
    for path in (mine.parent / "moved").rglob("*"):
        os.utime(path)
    path = mine.parent / "moved" / "wave1d.zarr"
    options = ["--set", f"data.tasks.0.path={path}", "--set", "checkpoint.keep=5", "--set", "data.loader.workers=1"]
    done = train(mine, *options, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"step={STEPS} ckpt={STEPS} verified" in done.stdout


def test_a_run_of_a_version_without_identities_continues_with_a_warning(mine: Path) -> None:
    document = json.loads((mine / "run.json").read_text())
    del document["identity"]
    (mine / "run.json").write_text(json.dumps(document))
    for _, path in list_checkpoints(mine):
        change_progress(path, identity=None)
    done = train(mine)
    assert done.returncode == 0, done.stdout + done.stderr
    log = "".join(path.read_text() for path in mine.glob("logs/attempt_*/rank_00000.err"))
    assert "carries no identity: it was written before runs had one" in log


def test_a_run_continues_under_a_version_with_new_and_renamed_settings(mine: Path) -> None:
    """Of the version that is installed, with a new setting and a setting under a new name."""
    source = mine.parent / "newer"
    shutil.copytree(Path(ups.__file__).parent, source / "ups", ignore=shutil.ignore_patterns("__pycache__"))
    stage = source / "ups" / "config" / "stage.py"
    text = stage.read_text()
    lines = [line for line in text.splitlines() if line.startswith("    clip_norm: ")]
    assert lines
    for old in lines:
        new = old.replace("clip_norm", "max_norm").replace("ge=0", 'ge=0, formerly="clip_norm"')
        text = text.replace(old, new)
    text = text.replace("    max_norm: ", '    added: float = setting(0.5, "A new setting.")\n    max_norm: ', 1)
    stage.write_text(text)
    for path in (source / "ups" / "training").rglob("*.py"):
        path.write_text(path.read_text().replace(".clip_norm", ".max_norm"))
    done = train(mine, PYTHONPATH=str(source))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "max_norm: 1.0" in (mine / "config.yaml").read_text()


def test_a_recipe_edited_before_a_restart_ends_the_run(mine: Path, folder: Path) -> None:
    with running(mine, "--set", "checkpoint.interval_steps=2", "--set", "supervise.max_restarts=2") as process:
        wait_for_step(mine, newest(mine)[0] // 2 * 2 + 2, process)
        faster_recipe(mine, folder)
        os.kill(rank_pid(mine), signal.SIGKILL)
        ended(process, 3, "cause=recipe_changed")


def test_a_final_checkpoint_that_was_replaced_is_not_a_success(mine: Path, folder: Path) -> None:
    final = mine / "checkpoints" / f"step_{STEPS:08d}"
    planted = mine.parent / "planted"
    shutil.copytree(newest(folder / "other")[1], planted)
    change_progress(planted, step=STEPS, stage_step=STEPS, stage_finished=True)

    def swap() -> None:
        while not (final / COMMITTED_NAME).exists():
            time.sleep(0.001)
        final.rename(mine.parent / "taken")
        planted.rename(final)

    with running(mine) as process:
        threading.Thread(target=swap, daemon=True).start()
        ended(process, 8, "cause=foreign_checkpoint")


def test_data_that_is_replaced_while_ranks_train_is_not_a_success(mine: Path, folder: Path) -> None:
    with running(mine) as process:
        wait_for_step(mine, newest(mine)[0] // 4 * 4 + 4, process)
        # Held meanwhile: the last steps take less time than writing other data.
        rank = rank_pid(mine)
        os.kill(rank, signal.SIGSTOP)
        other_bytes_of_the_same_size(mine, folder)
        os.kill(rank, signal.SIGCONT)
        ended(process, 4, "data_changed")


def test_a_refused_second_start_changes_nothing_even_without_the_lock_file(mine: Path) -> None:
    with running(mine, "--set", "checkpoint.interval_steps=1") as process:
        wait_for_step(mine, newest(mine)[0] + 1, process)
        (mine / ".supervisor.lock").unlink()
        before = [(mine / name).read_bytes() for name in ("config.yaml", "env.json")]
        # The first one is held at work: on a busy machine it could end before the second has started.
        process.send_signal(signal.SIGSTOP)
        second = train(mine, "--set", "checkpoint.keep=7")
        process.send_signal(signal.SIGCONT)
        after = [(mine / name).read_bytes() for name in ("config.yaml", "env.json")]
        ended(process, 0)
    assert second.returncode == 11, second.stdout + second.stderr
    assert "another supervisor already runs" in second.stderr
    assert before == after
