"""Manifests for Kubernetes: what they ask for, what is a failure and what is not, and names that it would refuse."""

from __future__ import annotations

import importlib.util
import shlex
from typing import Any

import pytest
import yaml

from ups.errors import ConfigError
from ups.launch.kubernetes import KubernetesJob, manifests, text


def job(**changes: Any) -> KubernetesJob:
    given: dict[str, Any] = {
        "name": "joint",
        "image": "registry.example.org/ups:1.0",
        "claim": "shared",
        "command": ["python", "-m", "ups", "train", "a recipe.yaml"],
    }
    return KubernetesJob(**(given | changes))


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
    assert shell.startswith("until getent hosts joint-0.joint ")
    words = shlex.split(shell.partition("exec ")[2])
    assert words[:5] == ["python", "-m", "ups", "train", "a recipe.yaml"]
    place = ["--hosts", "2", "--host", "$JOB_COMPLETION_INDEX", "--address", "joint-0.joint:29500"]
    assert words[5:] == ["--ranks", "16", *place]
    assert pod["subdomain"] == service["metadata"]["name"]


def test_one_host_needs_no_service() -> None:
    (work,) = manifests(job())
    assert work["spec"]["template"]["spec"]["containers"][0]["command"][2].startswith("exec python ")


def test_an_eviction_is_no_failure_and_a_verdict_is_not_tried_again() -> None:
    rules = manifests(job())[0]["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert by_code[143] == "Ignore"
    assert by_code[6] == "FailJob"
    assert 0 not in by_code
    assert 137 not in by_code, "a pod that was killed is made anew, and counted"


@pytest.mark.parametrize(
    "wrong", [{"name": "Joint_1"}, {"name": "a" * 60}, {"claim": "a b"}, {"image": "x y"}, {"memory": "lots"}]
)
def test_names_that_kubernetes_refuses_are_refused_here(wrong: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        job(**wrong)


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="needs kubernetes-validate")
@pytest.mark.parametrize("hosts", [1, 3])
def test_the_schema_of_kubernetes_accepts_it(hosts: int) -> None:
    import kubernetes_validate  # type: ignore[import-not-found, unused-ignore]

    found = list(yaml.safe_load_all(text(job(hosts=hosts, gpus_per_host=4))))
    assert len(found) == (2 if hosts > 1 else 1)
    for one in found:
        kubernetes_validate.validate(one, "1.31", strict=True)
    found[-1]["spec"]["parallelism"] = "many"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[-1], "1.31", strict=True)
