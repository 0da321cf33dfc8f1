"""The program of a manifest for Kubernetes, in what a pod is made of: its own network, processes, host name and names.

No Kubernetes is here: the test makes the pods, and makes them anew as the controller would.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.faults.hosts import Network, network, why_no_network
from tests.support.faults.small_run import write_recipe
from tests.support.mixture import write_mixture
from ups.cli.launch import command
from ups.launch.kubernetes import KubernetesJob, manifests

pytestmark = [pytest.mark.processes, pytest.mark.timeout(900)]
NEEDS_SECONDS = 400
# As the runtime of a container does: a host name, and names of other pods, which the cluster's DNS would give.
START = 'hostname "$1" && mount --bind "$2" /etc/hosts && shift 2 && exec "$@"'


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    problem = why_no_network()
    if problem:
        pytest.skip(problem)
    with network(2) as pods:
        yield pods


def made(job: KubernetesJob, hosts: Network, work: Path) -> list[subprocess.Popen[str]]:
    """A pod for each host; the last one comes first."""
    names = work / "names"
    names.write_text("".join(f"10.203.0.{n + 1} {job.pod(n)}.{job.name}\n" for n in range(job.hosts)))
    inner = manifests(job)[-1]["spec"]
    inner = inner["replicatedJobs"][0]["template"]["spec"] if job.jobset else inner
    (container,) = inner["template"]["spec"]["containers"]
    space = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--uts", "bash", "-c", START, "pod"]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return [
        subprocess.Popen(
            hosts.inside(host, [*space, job.pod(host), str(names), *container["command"]]),
            cwd=work,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "JOB_COMPLETION_INDEX": str(host)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host in reversed(range(job.hosts))
    ][::-1]


def first_process(pod: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{pod.pid}/task/{pod.pid}/children").read_text().split()[0])


def ended(pods: list[subprocess.Popen[str]]) -> tuple[list[int], list[str]]:
    said = [pod.communicate(timeout=NEEDS_SECONDS)[0] for pod in pods]
    return [pod.returncode for pod in pods], said


@pytest.mark.parametrize("jobset", [False, True], ids=["job", "jobset"])
def test_pods_find_each_other_by_name(tmp_path: Path, hosts: Network, jobset: bool) -> None:
    """What they tell each other is that there is nothing to train: no rank is started."""
    tasks = write_mixture(tmp_path)
    recipe = write_recipe(tmp_path, tasks)
    shutil.move(tasks[0]["path"], tmp_path / "elsewhere")
    words = command("python", recipe.name, [f"run.dir={tmp_path}/run"])
    pods = made(KubernetesJob("small", "image", "claim", words, hosts=2, jobset=jobset), hosts, tmp_path)
    try:
        codes, said = ended(pods)
    finally:
        for pod in pods:
            pod.kill()
    assert codes == [4, 4], said
    assert "host 0 cannot start the run: " in said[1]
    assert not (tmp_path / "run").exists()


@pytest.mark.long
@pytest.mark.parametrize("jobset", [False, True], ids=["job", "jobset"])
def test_pods_leave_together_and_go_on_when_they_are_made_anew(tmp_path: Path, hosts: Network, jobset: bool) -> None:
    recipe = write_recipe(tmp_path, write_mixture(tmp_path), steps=80, save_every=10)
    words = command("python", recipe.name, [f"run.dir={tmp_path}/run"])
    job = KubernetesJob("small", "image", "claim", words, hosts=2, jobset=jobset)
    pods = made(job, hosts, tmp_path)
    try:
        end = time.monotonic() + NEEDS_SECONDS
        while not list(tmp_path.glob("run/checkpoints/step_*")):
            assert time.monotonic() < end
            assert [pod.poll() for pod in pods] == [None, None], ended(pods)
            time.sleep(0.2)
        os.kill(first_process(pods[1]), signal.SIGTERM)  # an eviction
        codes, said = ended(pods)
        assert codes == [143, 143], said
        assert "host 1:small-" in said[1], "the host has the name of its pod"
        pods = made(job, hosts, tmp_path)
        codes, said = ended(pods)
        assert codes == [0, 0], said
        assert "VERDICT state=completed exit=0" in said[0]
    finally:
        for pod in pods:
            pod.kill()
