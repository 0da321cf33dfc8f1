"""A run on Kubernetes: an indexed Job with a pod for each host, and the headless Service by which they find each other.

Only the manifest is written; who applies it is `kubectl`. A pod is a supervisor and its ranks, as a host is anywhere
else. A pod that is evicted gets SIGTERM, all ranks save, and the Job makes it anew without counting that as a failure.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ups.errors import EXIT_CODES, ConfigError

PORT = 29500
# Where the claim is mounted: recipe, data and runs lie below it.
PLACE = "/work"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - of the pod, not a temporary file of ours
# From SIGTERM to SIGKILL: ranks finish their step and save.
GRACE_SECONDS = 120
# Pods that were lost for other reasons than those of the run are made anew so often.
BACKOFF_LIMIT = 6
ASKED = 143
_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,50}[a-z0-9])?")
_IMAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/:@-]*")


@dataclass(frozen=True)
class KubernetesJob:
    """What the manifest asks for.

    command: `ups train RECIPE ...` without what depends on hosts, as it is called below `PLACE`. claim: a
    PersistentVolumeClaim that all pods may write. secret: a Secret whose keys become variables of the pods, such as
    UPS_LINK_SECRET or credentials of a bucket.
    """

    name: str
    image: str
    claim: str
    command: Sequence[str]
    hosts: int = 1
    ranks_per_host: int = 1
    gpus_per_host: int = 0
    cpus_per_host: int = 1
    memory: str = "8Gi"
    secret: str = ""
    namespace: str = ""

    def __post_init__(self) -> None:
        for word, what in ((self.name, "run.name"), (self.claim, "--claim"), (self.secret, "--secret")):
            if word and not _NAME.fullmatch(word):
                raise ConfigError(
                    f"{what} '{word}' is no name on Kubernetes", hint="lower case letters, digits and -, up to 52"
                )
        if not _IMAGE.fullmatch(self.image):
            raise ConfigError(f"--image '{self.image}' is no image", hint="such as registry.example.org/ups:1.0")
        if not re.fullmatch(r"\d+(\.\d+)?(Ki|Mi|Gi|Ti)?", self.memory):
            raise ConfigError(f"--memory '{self.memory}' is no amount", hint="such as 64Gi")


def text(job: KubernetesJob) -> str:
    """The manifest for `kubectl apply -f -`."""
    # Through JSON: what is named twice is written twice, without YAML's references.
    return "---\n".join(yaml.safe_dump(json.loads(json.dumps(one)), sort_keys=False) for one in manifests(job))


def manifests(job: KubernetesJob) -> list[dict[str, Any]]:
    """The Service, where there are several hosts, and the Job."""
    place = {"namespace": job.namespace} if job.namespace else {}
    label = {"ups-run": job.name}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name, "labels": label, **place},
        # Names of pods that are not ready yet: they find each other in order to become ready.
        "spec": {"clusterIP": "None", "selector": label, "publishNotReadyAddresses": True},
    }
    resources: dict[str, Any] = {"cpu": str(job.cpus_per_host), "memory": job.memory}
    if job.gpus_per_host:
        resources["nvidia.com/gpu"] = str(job.gpus_per_host)
    container = {
        "name": "ups",
        "image": job.image,
        "command": ["bash", "-c", _shell(job)],
        "workingDir": PLACE,
        "resources": {"requests": resources, "limits": resources},
        "volumeMounts": [{"name": "work", "mountPath": PLACE}, {"name": "shm", "mountPath": SHARED_MEMORY}],
    }
    if job.secret:
        container["envFrom"] = [{"secretRef": {"name": job.secret}}]
    pod = {
        "subdomain": job.name,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": job.claim}},
            # Ranks show there what they are doing; the default of 64 MB is too small for many of them.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "2Gi"}},
        ],
    }
    work = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name, "labels": label, **place},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.hosts,
            "parallelism": job.hosts,
            "backoffLimit": BACKOFF_LIMIT,
            "podFailurePolicy": {"rules": _rules()},
            "template": {"metadata": {"labels": label}, "spec": pod},
        },
    }
    return [service, work] if job.hosts > 1 else [work]


def _rules() -> list[dict[str, Any]]:
    """What is not a failure (asked to leave, evicted), and what would only fail again (a verdict of ups)."""
    verdicts = sorted(code for code in EXIT_CODES if 0 < code < 128)
    return [
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        {"action": "Ignore", "onExitCodes": {"containerName": "ups", "operator": "In", "values": [ASKED]}},
        {"action": "FailJob", "onExitCodes": {"containerName": "ups", "operator": "In", "values": verdicts}},
    ]


def _shell(job: KubernetesJob) -> str:
    """The program of a pod. `exec`, so that the supervisor itself is asked to leave."""
    words = shlex.join([*job.command, "--ranks", str(job.hosts * job.ranks_per_host)])
    if job.hosts == 1:
        return f"exec {words}"
    head = f"{job.name}-0.{job.name}"
    place = f'--hosts {job.hosts} --host "$JOB_COMPLETION_INDEX" --address {head}:{PORT}'
    # The name of the first pod comes up with it.
    return f"until getent hosts {head} >/dev/null; do sleep 1; done; exec {words} {place}"
