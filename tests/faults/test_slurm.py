"""Runs under a real Slurm of two nodes: its time is up, it is preempted, canceled, queued again, loses a daemon."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.faults.slurm_cluster import Cluster, slurm_cluster, why_no_slurm
from tests.support.mixture import mixture_recipe, write_mixture
from ups.launch.slurm import SlurmJob, submit
from ups.record.checkpoints import latest_verified
from ups.record.manifest import read_manifest
from ups.supervise.run_file import read_run, was_started

pytestmark = [pytest.mark.processes, pytest.mark.long, pytest.mark.timeout(900)]

STEPS = 120


@contextlib.contextmanager
def started(binds: bool = False) -> Iterator[Cluster]:
    problem = why_no_slurm()
    if problem:
        pytest.skip(problem)
    folder = Path(tempfile.mkdtemp(prefix="ups-slurm-"))  # short: names of sockets are
    try:
        with slurm_cluster(folder, binds) as made:
            yield made
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with started() as made:
        yield made


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that takes a few dozen seconds, with a checkpoint every ten steps."""
    folder = tmp_path_factory.mktemp("slurm")
    plain = mixture_recipe(
        folder / "run",
        write_mixture(folder),
        stages=[{"type": "operator", "steps": STEPS, "unroll_steps": 2}],
        checkpoint={"interval_steps": 10, "keep": 2},
    )
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(plain))
    return path


@pytest.fixture(scope="module")
def alone(recipe: Path) -> str:
    """Hash of the last checkpoint of the same run on one host, undisturbed."""
    run_dir = recipe.parent / "alone"
    words = ["train", str(recipe), "--ranks", "2", "--set", f"run.dir={run_dir}"]
    subprocess.run([sys.executable, "-m", "ups", *words], check=True, capture_output=True, timeout=300)
    return weights(run_dir)


class Submitted:
    """A run that was handed to Slurm by `ups launch slurm`."""

    def __init__(self, cluster: Cluster, recipe: Path, name: str, *words: str) -> None:
        self.cluster, self.run_dir = cluster, recipe.parent / name
        command = [sys.executable, "-m", "ups", "launch", "slurm", str(recipe), "--time", "20"]
        command += ["--set", f"run.dir={self.run_dir}", "--set", f"run.name={name}", *words]
        done = subprocess.run(command, env=cluster.environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        self.job = done.stdout.split()[2].rstrip(":")

    @property
    def output(self) -> str:
        return "\n".join(path.read_text() for path in sorted((self.run_dir / "launch").glob("slurm_*.out")))

    def wait_for_checkpoint(self, step: int) -> None:
        self.cluster.wait_for(lambda: committed(self.run_dir) >= step, 200, f"a checkpoint after step {step}")

    def wait_for_queue(self) -> None:
        self.cluster.wait_for(lambda: self.cluster.state(self.job) == "PENDING", 120, "the job back in the queue")

    def finish(self) -> dict[str, object]:
        self.cluster.wait_for(lambda: self.cluster.state(self.job) in ("COMPLETED", "FAILED"), 400, "the end")
        return read_run(self.run_dir)


def committed(run_dir: Path) -> int:
    checkpoint = latest_verified(run_dir)
    return int(checkpoint.name.split("_")[-1]) if checkpoint is not None else -1


def weights(run_dir: Path) -> str:
    """Hash of all files of the last checkpoint but those that say when and where."""
    checkpoint = latest_verified(run_dir)
    assert checkpoint is not None
    files = read_manifest(checkpoint).files
    return str(sorted((name, entry) for name, entry in files.items() if name.endswith(".distcp")))


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU cannot be bound to two")
@pytest.mark.parametrize(
    ("options", "wanted"), [([], 2), (["--cpus-per-task=1"], 1)], ids=["of the ranks", "of --sbatch"]
)
def test_a_supervisor_may_use_all_processors_that_the_job_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], wanted: int
) -> None:
    """First of the module: its cluster binds steps to processors, and has the ports of the other one."""
    seen = "import os; print('processors', len(os.sched_getaffinity(0)))"
    job = SlurmJob("bound", tmp_path, tmp_path, [sys.executable, "-c", seen], "5", cpus_per_node=2, options=options)
    with started(binds=True) as cluster:
        monkeypatch.setenv("SLURM_CONF", cluster.environment["SLURM_CONF"])
        number = submit(job)
        cluster.wait_for(lambda: cluster.state(number) in ("COMPLETED", "FAILED"), 120, "the end")
        assert f"processors {wanted}\n" in (tmp_path / "launch" / f"slurm_{number}.out").read_text()


def test_two_nodes_end_with_the_bytes_of_one_host(cluster: Cluster, recipe: Path, alone: str) -> None:
    run = Submitted(cluster, recipe, "plain", "--nodes", "2")
    document = run.finish()
    assert (document["state"], document["exit_code"]) == ("completed", 0), run.output
    assert weights(run.run_dir) == alone
    assert (run.run_dir / "bundle").is_dir()


def test_a_run_whose_time_is_up_saves_is_queued_again_and_goes_on(cluster: Cluster, recipe: Path, alone: str) -> None:
    # Slurm looks once a minute: with three minutes it asks after about one.
    more = ["--nodes", "2", "--time", "3", "--set", "stages.0.steps=100000"]
    run = Submitted(cluster, recipe, "limit", *more)
    run.wait_for_checkpoint(10)
    cluster.wait_for(lambda: cluster.state(run.job) != "RUNNING", 180, "the warning")
    run.wait_for_queue()
    document = read_run(run.run_dir)
    assert (document["state"], document["cause"]) == ("preempted", "asked(SIGTERM)")
    assert "lost=0" in str(document["verdict"])
    saved = committed(run.run_dir)
    run.wait_for_checkpoint(saved + 1)
    cluster.call("scancel", run.job)


def test_a_preempted_run_goes_on_when_the_other_is_done(cluster: Cluster, recipe: Path, alone: str) -> None:
    run = Submitted(cluster, recipe, "low", "--nodes", "2", "--partition", "low")
    run.wait_for_checkpoint(10)
    cluster.call("sbatch", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=sleep 5")
    run.wait_for_queue()
    document = read_run(run.run_dir)
    assert (document["state"], document["cause"]) == ("preempted", "asked(SIGTERM)")
    assert run.finish()["state"] == "completed", run.output
    assert weights(run.run_dir) == alone


def test_a_run_that_is_queued_again_by_hand_goes_on(cluster: Cluster, recipe: Path, alone: str) -> None:
    run = Submitted(cluster, recipe, "again", "--nodes", "2")
    run.wait_for_checkpoint(10)
    cluster.call("scontrol", "requeue", run.job)
    run.wait_for_queue()
    assert run.finish()["state"] == "completed", run.output
    assert weights(run.run_dir) == alone


def test_a_canceled_run_saves_and_stays_out_of_the_queue(cluster: Cluster, recipe: Path) -> None:
    run = Submitted(cluster, recipe, "canceled", "--nodes", "2", "--set", "stages.0.steps=100000")
    run.wait_for_checkpoint(10)
    cluster.call("scancel", run.job)
    cluster.wait_for(lambda: run.job not in cluster.call("squeue", "-h", "-o", "%i"), 60, "the end")
    document = read_run(run.run_dir)
    assert (document["state"], document["cause"]) == ("preempted", "asked(SIGTERM)")
    assert cluster.state(run.job) == "CANCELLED"
    assert "queued again" not in run.output


def test_a_canceled_step_is_killed_and_goes_on_when_it_is_submitted_again(
    cluster: Cluster, recipe: Path, alone: str
) -> None:
    run = Submitted(cluster, recipe, "step", "--nodes", "2")
    run.wait_for_checkpoint(10)
    cluster.call("scancel", f"{run.job}.0")  # without a warning
    cluster.wait_for(lambda: cluster.state(run.job) == "FAILED", 120, "the end")
    assert "queued again" not in run.output
    run.job = cluster.call("sbatch", "--parsable", str(run.run_dir / "launch" / "job.sh"))
    assert run.finish()["state"] == "completed", run.output
    assert weights(run.run_dir) == alone


def test_a_daemon_that_dies_costs_nothing_or_a_new_start(cluster: Cluster, recipe: Path, alone: str) -> None:
    run = Submitted(cluster, recipe, "daemon", "--nodes", "2")
    run.wait_for_checkpoint(10)
    cluster.kill_daemon("n2")
    cluster.wait_for(lambda: cluster.state(run.job) != "RUNNING", 240, "that Slurm sees it, or the end")
    cluster.start_daemon("n2")
    assert run.finish()["state"] == "completed", run.output
    assert weights(run.run_dir) == alone


def test_an_array_trains_a_run_for_each_value(cluster: Cluster, recipe: Path) -> None:
    run = Submitted(cluster, recipe, "sweep", "--over", "run.seed=[1, 2]", "--set", "stages.0.steps=4")
    run_dirs = [run.run_dir.with_name(f"sweep-seed_{seed}") for seed in (1, 2)]

    def ended(run_dir: Path) -> bool:
        return was_started(run_dir) and (run_dir / "bundle").is_dir()

    cluster.wait_for(lambda: all(ended(path) for path in run_dirs), 300, "two bundles")
    seeds = [yaml.safe_load((path / "config.yaml").read_text())["run"]["seed"] for path in run_dirs]
    assert seeds == [1, 2]
    assert [read_run(path)["state"] for path in run_dirs] == ["completed", "completed"]
