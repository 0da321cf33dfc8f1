"""A run on Kubernetes: an indexed Job with a pod for each host; they find each other by a headless Service.

Only the manifest is written; who applies it is `kubectl`. A pod is a supervisor and its ranks, as a host is anywhere
else. A pod that is evicted gets SIGTERM, all ranks save, and the Job makes it anew without counting that as a failure.

A JobSet holds the same Job. Its controller makes the Service, and where a pod is lost it starts all of them anew, while
a Job makes that pod anew and the others meet it again. It must be installed on the cluster, so the Job is the default.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from ups.errors import EXIT_CODES, ConfigError
from ups.launch.job import check_word, plain_variables, secret_names

if TYPE_CHECKING:
    from ups.config.recipe import ResolvedRecipe

PORT = 29500
# Where the claim is mounted: recipe, data and runs lie below it.
PLACE = "/work"
SHARED_MEMORY = "/dev/shm"  # noqa: S108 - of the pod, not a temporary file of ours
GPU = "nvidia.com/gpu"
# Python, torch with a context of CUDA, batches of the readers, and a share of the shared memory.
GIB_OF_RANK = 8
# From SIGTERM to SIGKILL: ranks finish their step and save.
GRACE_SECONDS = 120
# So often a run is started anew that lost a pod, for other reasons than an eviction.
RESTARTS = 6
ASKED = 143
# Codes of ups that another try may change: a host that is gone is 6 on all others, and 11 while its lock is still held.
TRIED_AGAIN = (6, 11)
# The Job of a JobSet; names of pods are made of it.
PART = "host"
_RUN_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LABEL = re.compile(r"[^=\s]+=[^=\s]+")
_AMOUNT = re.compile(r"\d+(\.\d+)?[MGT]i?")
# What stands in a name of DNS between two dots.
_MAX_LABEL = 63
# By this label Kueue knows what it holds back until there is room.
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"


@dataclass(frozen=True)
class KubernetesJob:
    """What the manifest asks for.

    command: `ups train RECIPE ...` without what depends on hosts, as it is called below `PLACE`. claim: a
    PersistentVolumeClaim that all pods may write. secret: a Secret whose keys become variables of the pods, such as
    UPS_LINK_SECRET or credentials of a bucket. jobset: as a JobSet, not as a Job. memory: of a pod, shared memory
    included; by default 8 GiB for each rank. variables: NAME=VALUE. node_labels: KEY=VALUE. tolerations:
    KEY[=VALUE][:EFFECT]. priority: a PriorityClass. queue: a LocalQueue of Kueue.
    """

    name: str
    image: str
    claim: str
    command: Sequence[str]
    hosts: int = 1
    ranks_per_host: int = 1
    gpus_per_host: int = 0
    cpus_per_host: int = 1
    memory: str = ""
    secret: str = ""
    namespace: str = ""
    jobset: bool = False
    variables: Sequence[str] = ()
    node_labels: Sequence[str] = ()
    tolerations: Sequence[str] = ()
    priority: str = ""
    queue: str = ""

    def __post_init__(self) -> None:
        most = _MAX_LABEL - len(self.pod(self.hosts - 1)) + len(self.name) - len("-abcde")  # a random end of its own
        if not _RUN_NAME.fullmatch(self.name) or len(self.name) > most:
            raise ConfigError(
                f"run.name '{self.name}' is no name for pods on Kubernetes",
                hint=f"a letter, then letters, digits and -, {most} at most: --set run.name=NAME",
            )
        for word in self.node_labels:
            check_word("--node-label", word, _LABEL, "pool=h100 (KEY=VALUE)")
        # A number without a unit means bytes, and is refused. Names and other values are checked by the cluster.
        check_word("--memory", self.memory, _AMOUNT, "64Gi")
        plain_variables(self.variables)

    def pod(self, host: int) -> str:
        """The name by which the pod of a host is found; it is the same after every restart."""
        return f"{self.name}-{PART}-0-{host}" if self.jobset else f"{self.name}-{host}"


def not_in_pods(resolved: ResolvedRecipe, secret: str) -> list[str]:
    """What the recipe refers to and the pods would not have, unless the image brings it."""
    recipe = resolved.recipe
    tasks = [[task.path] if isinstance(task.path, str) else task.path for task in recipe.data.tasks]
    paths = [*(path for paths in tasks for path in paths), recipe.run.dir or ""]
    outside = [path for path in paths if path.startswith("/") and not path.startswith(f"{PLACE}/")]
    problems = [
        f"{path}: the pods see only what is below {PLACE}; name it relative to this directory" for path in outside
    ]
    names = secret_names(resolved.text, [])
    if names and not secret:
        problems.append(f"the recipe refers to {', '.join(names)}: --secret NAME of a Secret that has them as keys")
    return problems


def text(job: KubernetesJob) -> str:
    """The manifest for `kubectl apply -f -`."""
    # Through JSON: what is named twice is written twice, without YAML's references.
    return "---\n".join(yaml.safe_dump(json.loads(json.dumps(one)), sort_keys=False) for one in manifests(job))


def manifests(job: KubernetesJob) -> list[dict[str, Any]]:
    """The JobSet; or the Job, with its Service where there are several hosts."""
    namespace = {"namespace": job.namespace} if job.namespace else {}
    label = {"ups-run": job.name}
    about = {"name": job.name, "labels": label, **namespace}
    template = {"metadata": {"labels": label}, "spec": _pod(job)}
    work = {
        "completionMode": "Indexed",
        "completions": job.hosts,
        "parallelism": job.hosts,
        # Pods are counted, and those of a run that failed have failed all together. A JobSet counts by itself.
        "backoffLimit": 0 if job.jobset else RESTARTS * job.hosts,
        "podFailurePolicy": {"rules": _rules()},
        "template": template,
    }
    owner = {**about, "labels": {**label, QUEUE_LABEL: job.queue}} if job.queue else about
    if job.jobset:
        return [_jobset(owner, work)]
    jobs = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": owner, "spec": work}]
    if job.hosts == 1:
        return jobs
    template["spec"]["subdomain"] = job.name
    # Names of pods that are not ready yet: they find each other in order to become ready.
    names = {"clusterIP": "None", "selector": label, "publishNotReadyAddresses": True}
    return [{"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": names}, *jobs]


def _jobset(about: dict[str, Any], work: dict[str, Any]) -> dict[str, Any]:
    """All pods are started anew where one is lost; only what `_rules` calls a verdict ends the run."""
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": about,
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {
                "maxRestarts": RESTARTS,
                "rules": [{"name": "verdict", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [{"name": PART, "replicas": 1, "template": {"spec": work}}],
        },
    }


def _pod(job: KubernetesJob) -> dict[str, Any]:
    resources: dict[str, Any] = {"cpu": str(job.cpus_per_host)}
    resources["memory"] = job.memory or f"{GIB_OF_RANK * job.ranks_per_host}Gi"
    # Nodes with GPUs usually keep off what does not tolerate this taint.
    tolerations = [{"key": GPU, "operator": "Exists"}] if job.gpus_per_host else []
    for word in job.tolerations:
        # As `kubectl taint` writes it; a toleration without a value or an effect fits all of them.
        taint, _, effect = word.partition(":")
        key, equals, value = taint.partition("=")
        match = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        tolerations.append({"key": key, **match, **({"effect": effect} if effect else {})})
    if job.gpus_per_host:
        resources[GPU] = str(job.gpus_per_host)
    container = {
        "name": "ups",
        "image": job.image,
        "command": ["bash", "-c", _literal(_shell(job))],
        "workingDir": PLACE,
        "resources": {"requests": resources, "limits": resources},
        "securityContext": {"allowPrivilegeEscalation": False},
        "volumeMounts": [{"name": "work", "mountPath": PLACE}, {"name": "shm", "mountPath": SHARED_MEMORY}],
    }
    if job.secret:
        container["envFrom"] = [{"secretRef": {"name": job.secret}}]
    if job.variables:
        container["env"] = [{"name": n, "value": _literal(v)} for n, v in plain_variables(job.variables).items()]
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,  # no pod asks the cluster for anything
        **({"nodeSelector": dict(word.split("=") for word in job.node_labels)} if job.node_labels else {}),
        **({"tolerations": tolerations} if tolerations else {}),
        **({"priorityClassName": job.priority} if job.priority else {}),
        "terminationGracePeriodSeconds": GRACE_SECONDS,
        "containers": [container],
        "volumes": [
            {"name": "work", "persistentVolumeClaim": {"claimName": job.claim}},
            # Ranks show there what they are doing, and NCCL uses it; the default of 64 MB is too small for many ranks.
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{max(2, job.ranks_per_host)}Gi"}},
        ],
    }


def _literal(text: str) -> str:
    """As it stands: Kubernetes would put the value of a variable in place of $(NAME)."""
    return text.replace("$(", "$$(")


def _rules() -> list[dict[str, Any]]:
    """What is not a failure (asked to leave, evicted), and what would only fail again (a verdict of ups)."""
    verdicts = sorted(code for code in EXIT_CODES if 0 < code < 128 and code not in TRIED_AGAIN)
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
    head = f"{job.pod(0)}.{job.name}"
    options = f'--hosts {job.hosts} --host "$JOB_COMPLETION_INDEX" --address {head}:{PORT}'
    # The name of the first pod comes up with it. PID 1 ignores SIGTERM unless it installs a handler.
    wait = f"trap 'exit {ASKED}' TERM; until getent hosts {head} >/dev/null; do sleep 1; done"
    return f"{wait}; exec {words} {options}"
