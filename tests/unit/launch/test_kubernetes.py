"""Manifests for Kubernetes: what they ask for, what is a failure and what is not, and names that it would refuse."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from ups.errors import EXIT_CODES, ConfigError
from ups.launch.kubernetes import KubernetesJob, manifests, text
from ups.record.processes import catches


def job(**changes: Any) -> KubernetesJob:
    settings: dict[str, Any] = {
        "name": "joint",
        "image": "registry.example.org/ups:1.0",
        "claim": "shared",
        "command": ["python", "-m", "ups", "train", "a recipe.yaml"],
    }
    return KubernetesJob(**(settings | changes))


def test_a_pod_for_each_host_which_find_each_other_by_name() -> None:
    service, work = manifests(job(hosts=2, ranks_per_host=8, gpus_per_host=8, cpus_per_host=40, secret="keys"))
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == work["spec"]["template"]["metadata"]["labels"]
    assert (work["spec"]["completions"], work["spec"]["parallelism"]) == (2, 2)
    pod = work["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    shell = container["command"][2]
    assert "until getent hosts joint-0.joint " in shell
    words = shlex.split(shell.partition("exec ")[2])
    assert words[:5] == ["python", "-m", "ups", "train", "a recipe.yaml"]
    options = ["--hosts", "2", "--host", "$JOB_COMPLETION_INDEX", "--address", "joint-0.joint:29500"]
    assert words[5:] == ["--ranks", "16", *options]
    assert pod["subdomain"] == service["metadata"]["name"]


# What a cluster with several teams, kinds of nodes and a proxy needs.
SHARED: dict[str, Any] = {
    "variables": ["NCCL_DEBUG=WARN", "HTTPS_PROXY=http://proxy.example.org:3128", "NOTE=$(HOME) a=b"],
    "node_labels": ["cloud.example.org/pool=h100"],
    "tolerations": ["spot=true:NoSchedule", "example.org/team=physics", "maintenance:NoExecute", "old"],
    "priority": "research",
    "queue": "physics",
}


@pytest.mark.parametrize("jobset", [False, True])
def test_a_pod_goes_where_the_cluster_wants_it(jobset: bool) -> None:
    *others, work = manifests(job(hosts=2, gpus_per_host=8, jobset=jobset, **SHARED))
    assert work["metadata"]["labels"] == {"ups-run": "joint", "kueue.x-k8s.io/queue-name": "physics"}
    assert all("kueue.x-k8s.io/queue-name" not in one["metadata"]["labels"] for one in others)
    spec = work["spec"]["replicatedJobs"][0]["template"]["spec"] if jobset else work["spec"]
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {"cloud.example.org/pool": "h100"}
    assert pod["priorityClassName"] == "research"
    assert pod["tolerations"] == [
        {"key": "nvidia.com/gpu", "operator": "Exists"},
        {"key": "spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
        {"key": "example.org/team", "operator": "Equal", "value": "physics"},
        {"key": "maintenance", "operator": "Exists", "effect": "NoExecute"},
        {"key": "old", "operator": "Exists"},
    ]
    assert pod["containers"][0]["env"] == [
        {"name": "NCCL_DEBUG", "value": "WARN"},
        {"name": "HTTPS_PROXY", "value": "http://proxy.example.org:3128"},
        {"name": "NOTE", "value": "$$(HOME) a=b"},  # Kubernetes makes $(HOME) of it
    ]
    assert "tolerations" not in manifests(job())[0]["spec"]["template"]["spec"]


def test_words_of_the_command_are_not_expanded_by_kubernetes() -> None:
    (work,) = manifests(job(command=["python", "-m", "ups", "train", "a.yaml", "--set", "run.name=$(NAME)"]))
    shell = work["spec"]["template"]["spec"]["containers"][0]["command"][2]
    assert "'run.name=$$(NAME)'" in shell


@pytest.mark.parametrize(("ranks", "memory", "shared"), [(1, "8Gi", "2Gi"), (8, "64Gi", "8Gi"), (64, "512Gi", "64Gi")])
def test_memory_grows_with_the_ranks_of_a_pod(ranks: int, memory: str, shared: str) -> None:
    pod = manifests(job(ranks_per_host=ranks))[0]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["memory"] == memory
    assert pod["volumes"][1]["emptyDir"]["sizeLimit"] == shared
    pod = manifests(job(ranks_per_host=ranks, memory="900Gi"))[0]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["requests"]["memory"] == "900Gi"


def test_a_jobset_has_the_same_pods_and_makes_the_names_itself() -> None:
    settings: dict[str, Any] = {"hosts": 2, "ranks_per_host": 8, "gpus_per_host": 8, "namespace": "physics"}
    (jobset,) = manifests(job(**settings, jobset=True))
    assert jobset["metadata"]["namespace"] == "physics"
    (part,) = jobset["spec"]["replicatedJobs"]
    inner = part["template"]["spec"]
    _, alone = manifests(job(**settings))
    assert (part["replicas"], inner["completions"], inner["completionMode"]) == (1, 2, "Indexed")
    # JobSet calls a pod NAME-PART-REPLICA-INDEX, in a subdomain of its own name that it enters into the pods.
    head = f"joint-{part['name']}-0-0.joint"
    pod, other = inner["template"]["spec"], alone["spec"]["template"]["spec"]
    assert f"--address {head}:29500" in pod["containers"][0]["command"][2]
    assert "subdomain" not in pod
    as_job = pod["containers"][0]["command"][2].replace(head, "joint-0.joint")
    assert as_job == other["containers"][0]["command"][2]
    pod["containers"][0]["command"][2], pod["subdomain"] = as_job, "joint"
    assert pod == other


def test_a_jobset_starts_all_pods_anew_unless_ups_has_given_its_verdict() -> None:
    (jobset,) = manifests(job(hosts=2, jobset=True))
    inner = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert inner["backoffLimit"] == 0, "the first pod that fails is the end of the Job, and the JobSet makes a new one"
    assert inner["podFailurePolicy"] == manifests(job())[0]["spec"]["podFailurePolicy"]
    policy = jobset["spec"]["failurePolicy"]
    assert policy["maxRestarts"] > 0
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_one_host_needs_no_service() -> None:
    (work,) = manifests(job())
    assert work["spec"]["template"]["spec"]["containers"][0]["command"][2].startswith("exec python ")


def test_an_eviction_is_no_failure_and_a_verdict_is_not_tried_again() -> None:
    rules = manifests(job())[0]["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert by_code[143] == "Ignore"
    assert {code for code, action in by_code.items() if action == "FailJob"} == {1, 2, 3, 4, 5, 7, 8, 9, 10, 12}
    assert set(by_code) <= set(EXIT_CODES)
    assert 0 not in by_code
    assert 137 not in by_code, "a pod that was killed is made anew, and counted"
    assert 6 not in by_code, "all other hosts leave with it when one is lost"
    assert 11 not in by_code, "a lost host may still hold the run"


def test_a_run_that_fails_on_all_hosts_counts_as_one_failure() -> None:
    limits = {hosts: manifests(job(hosts=hosts))[-1]["spec"]["backoffLimit"] for hosts in (1, 8)}
    assert limits[8] == 8 * limits[1] > 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": "Joint_1"},
        {"name": "1st-run"},
        {"name": "a" * 60},
        {"name": "a" * 50, "jobset": True},
        {"memory": "lots"},
        {"memory": "64"},  # bytes
        {"variables": ["NAME"]},
        {"variables": ["WANDB_API_KEY=canary"]},
        {"variables": ["HTTPS_PROXY=http://someone:canary@proxy.example.org:3128"]},
        {"variables": ["A=1\nB=2"]},
        {"node_labels": ["pool"]},
        {"node_labels": ["pool=a b"]},
        {"node_labels": ["pool=a=b"]},
    ],
)
def test_names_that_kubernetes_refuses_are_refused_here(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as raised:
        job(**wrong)
    assert "canary" not in f"{raised.value.message} {raised.value.hint}"


@pytest.mark.parametrize("jobset", [False, True])
def test_the_longest_name_makes_pods_of_63_characters(jobset: bool) -> None:
    """A name of a pod is a label of DNS, and the controller puts five random characters behind it."""
    with pytest.raises(ConfigError, match="no name for pods") as raised:
        job(name="a" * 63, hosts=10_000, jobset=jobset)
    most = int(raised.value.hint.partition(" at most")[0].rpartition(" ")[2])
    longest = job(name="a" * most, hosts=10_000, jobset=jobset)
    assert len(longest.pod(9_999) + "-abcde") == 63


def as_models_know_it(manifest: dict[str, Any]) -> Any:
    """The manifest as the published models of Kubernetes and JobSet read it: a field that they lack is not in it."""
    from kubeflow_trainer_api import models

    names = {"JobSet": "JobsetV1alpha2JobSet", "Job": "IoK8sApiBatchV1Job", "Service": "IoK8sApiCoreV1Service"}
    return getattr(models, names[manifest["kind"]]).from_dict(manifest).to_dict()


@pytest.mark.parametrize("jobset", [False, True])
@pytest.mark.parametrize("hosts", [1, 3])
def test_the_models_of_kubernetes_and_jobset_know_every_field(hosts: int, jobset: bool) -> None:
    full_job = job(hosts=hosts, gpus_per_host=4, secret="keys", namespace="physics", jobset=jobset, **SHARED)
    objects = list(yaml.safe_load_all(text(full_job)))
    assert [one["kind"] for one in objects] == (["JobSet"] if jobset else ["Service", "Job"][hosts == 1 :])
    for one in objects:
        assert as_models_know_it(one) == one


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["spec", "failurePolicy", "maxRestart"], 3),
        (["spec", "network", "enableDnsHostnames"], True),
        (["spec", "replicatedJobs", 0, "template", "spec", "template", "spec", "restart"], "Never"),
        (["spec", "replicatedJobs", 0, "template", "spec", "parallelism"], "many"),
        (["spec", "replicatedJobs", 0, "name"], None),
        (["spec", "failurePolicy", "rules", 0, "onJobFailureReasons"], "PodFailurePolicy"),
    ],
    ids=lambda value: str(value[-1]) if isinstance(value, list) else "",
)
def test_the_models_refuse_a_jobset_with_a_mistake(path: list[Any], value: Any) -> None:
    (broken,) = yaml.safe_load_all(text(job(hosts=2, jobset=True)))
    target = broken
    for step in path[:-1]:
        target = target[step]
    target[path[-1]] = value
    with pytest.raises((ValueError, AssertionError)):
        assert as_models_know_it(broken) == broken


@pytest.mark.parametrize("jobset", [False, True])
@pytest.mark.parametrize("hosts", [1, 3])
def test_the_schema_of_kubernetes_accepts_it(hosts: int, jobset: bool) -> None:
    objects = list(yaml.safe_load_all(text(job(hosts=hosts, gpus_per_host=4, secret="keys", jobset=jobset, **SHARED))))
    if jobset:
        inner = objects[0]["spec"]["replicatedJobs"][0]["template"]
        objects = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "joint-host-0"}, **inner}]
    for one in objects:
        kubernetes_validate.validate(one, "1.31", strict=True)
    objects[-1]["spec"]["template"]["spec"]["restart"] = "Never"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(objects[-1], "1.31", strict=True)


@contextlib.contextmanager
def first_process(command: list[str], programs: Path) -> Iterator[subprocess.Popen[str]]:
    """The command as the first process of a namespace, as the one of a container is."""
    space = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    if shutil.which("unshare") is None or subprocess.run([*space, "true"], capture_output=True, timeout=20).returncode:
        pytest.skip("namespaces of processes cannot be made here")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": "1"}
    with subprocess.Popen([*space, *command], stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.processes
@pytest.mark.parametrize("jobset", [False, True])
def test_a_pod_that_waits_for_the_first_one_leaves_when_it_is_asked(tmp_path: Path, jobset: bool) -> None:
    (tmp_path / "getent").write_text('#!/usr/bin/env bash\necho "$@" >&2; exit 2\n')
    (tmp_path / "getent").chmod(0o755)
    spec = manifests(job(hosts=2, jobset=jobset))[-1]["spec"]
    work = spec["replicatedJobs"][0]["template"]["spec"] if jobset else spec
    with first_process(work["template"]["spec"]["containers"][0]["command"], tmp_path) as process:
        inner = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        end = time.monotonic() + 30
        while not (child := inner.read_text().split()) or not catches(int(child[0]), signal.SIGTERM):
            assert time.monotonic() < end
            time.sleep(0.05)
        os.kill(int(child[0]), signal.SIGTERM)
        assert process.wait(30) == 143
