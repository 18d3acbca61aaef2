"""The objects that run the pods: a Job, a JobSet, a TrainJob, an MPIJob or a RayJob."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from distributed.operations.deploy.job import torchrun_flags
from distributed.operations.deploy.kubernetes.names import literal
from distributed.operations.deploy.kubernetes.pods import CONFIG, CONTAINER, WORK, Pod
from distributed.operations.deploy.text_formats import quote

PORT = 29500
"""Rendezvous port on the first pod; pods have their own addresses, so it is always free."""
_SAVED = 75


@dataclass(frozen=True)
class Made:
    """The objects of one kind.

    Attributes:
        objects: manifests by file name.
        scripts: further files beside the configuration, by name.
    """

    objects: Mapping[str, list[dict[str, Any]]]
    scripts: Mapping[str, str]


def job(pod: Pod, train: list[str]) -> Made:
    """An Indexed Job, one pod a node, and the Service that gives the pods names."""
    name, nodes = pod.settings.name, pod.job.num_nodes
    flags = _meeting(pod, f"{name}-0.{name}", "JOB_COMPLETION_INDEX")
    template = pod.template(_torchrun(pod, flags, train), ports=_port(), spec={"subdomain": name})
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        # One node that is not available ends the job, because the others would wait for it.
        "backoffLimitPerIndex": pod.settings.retries,
        "maxFailedIndexes": 0,
        "podFailurePolicy": _failure_policy(pod),
        "podReplacementPolicy": "Failed",
        "template": template,
    }
    if not pod.settings.retries:
        spec = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes, "backoffLimit": 0}
        spec["template"] = template
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": pod.queued(), "spec": spec}
    return Made({"service.yaml": [_service(pod)], "job.yaml": [made]}, {})


def jobset(pod: Pod, train: list[str]) -> Made:
    """A JobSet of one Indexed Job: a node that fails restarts all nodes together."""
    name, nodes = pod.settings.name, pod.job.num_nodes
    flags = _meeting(pod, f"{name}-node-0-0.{name}", "JOB_COMPLETION_INDEX")
    inner: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": nodes,
        "parallelism": nodes,
        "backoffLimit": 0,
        **({"podFailurePolicy": _failure_policy(pod)} if pod.settings.retries else {}),
        "template": pod.template(_torchrun(pod, flags, train), ports=_port()),
    }
    spec = {
        "network": {"enableDNSHostnames": True, "subdomain": name, "publishNotReadyAddresses": True},
        "failurePolicy": _restarts(pod),
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": inner}}],
    }
    made = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": pod.queued(),
        "spec": spec,
    }
    return Made({"jobset.yaml": [made]}, {})


def trainjob(pod: Pod, train: list[str]) -> Made:
    """A TrainJob of Kubeflow Trainer and the runtime it refers to; Trainer sets torchrun's environment."""
    name, nodes = pod.settings.name, pod.job.num_nodes
    # The trainer's container is called node, by Trainer's own convention.
    template = pod.template(None, name="node")
    step = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    inner: dict[str, Any] = {
        **({"podFailurePolicy": _failure_policy(pod, "node")} if pod.settings.retries else {}),
        "backoffLimit": 0,
        "template": template,
    }
    runtime = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainingRuntime",
        "metadata": {**pod.metadata(), "labels": {**pod.labels(), "trainer.kubeflow.org/framework": "torch"}},
        "spec": {
            "mlPolicy": {"numNodes": nodes, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": _restarts(pod),
                    "replicatedJobs": [
                        {"name": "node", "template": {"metadata": {"labels": step}, "spec": inner}}
                    ],
                }
            },
        },
    }
    restarts = [f"--max-restarts={pod.job.config.max_restarts}"] if pod.job.config.is_elastic else []
    made = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": pod.queued(),
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "TrainingRuntime",
                "name": name,
            },
            "trainer": {
                "image": pod.settings.image,
                "numNodes": nodes,
                "numProcPerNode": pod.job.ranks_per_node,
                "resourcesPerNode": pod.resources(),
                "command": _torchrun(pod, restarts, train),
            },
        },
    }
    return Made({"runtime.yaml": [runtime], "trainjob.yaml": [made]}, {})


def mpijob(pod: Pod, train: list[str]) -> Made:
    """An MPIJob: mpirun in the launcher starts the ranks in the workers, over ssh."""
    ssh = f"{WORK}/.ssh"
    # The operator mounts the keys there, and mpirun and sshd write beside them.
    worker = pod.template(["/usr/sbin/sshd", "-De", "-f", "/etc/ssh/sshd_config_job"], fixed=False)
    launcher = pod.template(["bash", f"{CONFIG}/start.sh"], gpus=False, fixed=False)
    small = launcher["spec"]["containers"][0]
    small["resources"] = {"requests": {"cpu": "1", "memory": "1Gi"}, "limits": {"memory": "1Gi"}}
    spec = {
        "slotsPerWorker": pod.job.ranks_per_node,
        "sshAuthMountPath": ssh,
        "mpiImplementation": "OpenMPI",
        "launcherCreationPolicy": "WaitForWorkersReady",
        # There is no policy by exit code here: a preempted run counts as a failed one.
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": pod.settings.retries},
        "mpiReplicaSpecs": {
            "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": launcher},
            "Worker": {"replicas": pod.job.num_nodes, "restartPolicy": "Never", "template": worker},
        },
    }
    made = {"apiVersion": "kubeflow.org/v2beta1", "kind": "MPIJob", "metadata": pod.queued(), "spec": spec}
    return Made({"mpijob.yaml": [made]}, {"start.sh": _mpirun(pod, train)})


def rayjob(pod: Pod, train: list[str]) -> Made:
    """A RayJob: a Ray cluster for the run alone, with the driver on its head."""
    nodes = pod.job.num_nodes
    numbers = {"gcs": 6379, "dashboard": 8265, "client": 10001}
    ports = [{"name": name, "containerPort": port} for name, port in numbers.items()]
    head = pod.template(None, name="ray-head", gpus=False, fixed=False, ports=ports)
    head["spec"]["containers"][0]["resources"].setdefault("requests", {})["cpu"] = "1"
    worker = pod.template(None, name="ray-worker", fixed=False)
    for template in (head, worker):
        template["spec"].pop("restartPolicy")  # the operator's own: a RayCluster replaces its pods
    spec = {
        "entrypoint": f"bash {CONFIG}/start.sh",
        "shutdownAfterJobFinishes": True,
        "ttlSecondsAfterFinished": 600,
        "backoffLimit": pod.settings.retries,
        "rayClusterSpec": {
            "rayVersion": pod.settings.ray_version,
            "authOptions": {"mode": "token"},
            "headGroupSpec": {
                # No rank on the head, which is small.
                "rayStartParams": {"num-cpus": "0", "dashboard-host": "0.0.0.0"},
                "template": head,
            },
            "workerGroupSpecs": [
                {
                    "groupName": "ranks",
                    "replicas": nodes,
                    "minReplicas": nodes,
                    "maxReplicas": nodes,
                    "rayStartParams": {},
                    "template": worker,
                }
            ],
        },
    }
    made = {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": pod.queued(), "spec": spec}
    python = quote(pod.settings.python)
    script = ["#!/bin/bash", f"cd {WORK} || exit", f"exec {python} -m {' '.join(map(quote, train))}"]
    return Made({"rayjob.yaml": [made]}, {"start.sh": "\n".join(script) + "\n"})


def _torchrun(pod: Pod, flags: list[str], train: list[str]) -> list[str]:
    words = [*map(literal, [pod.settings.python, "-m", "distributed.torchrun"]), *flags, "-m"]
    return [*words, *map(literal, train)]


def _meeting(pod: Pod, host: str, index: str) -> list[str]:
    """torchrun's rendezvous flags on every pod; Kubernetes fills in ``$(NAME)``."""
    flags = [*torchrun_flags(pod.job, str(pod.job.num_nodes)), f"--rdzv-endpoint={host}:{PORT}"]
    if pod.job.min_nodes is not None:
        # The first pod knows its own address by the Service alone; see the page on Kubernetes.
        return [*flags, "--rdzv-backend=c10d", f"--rdzv-id={pod.settings.name}"]
    return [*flags, "--rdzv-backend=static", f"--node-rank=$({index})"]


def _failure_policy(pod: Pod, container: str = CONTAINER) -> dict[str, Any]:
    codes = {"containerName": container, "operator": "In"}
    return {
        "rules": [
            {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "Ignore", "onExitCodes": {**codes, "values": [_SAVED]}},
            # A user error is not fixed by retrying.
            {"action": "FailJob", "onExitCodes": {**codes, "values": [2]}},
        ]
    }


def _restarts(pod: Pod) -> dict[str, Any]:
    mistake = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {"maxRestarts": pod.settings.retries, **({"rules": [mistake]} if pod.settings.retries else {})}


def _service(pod: Pod) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": pod.metadata(),
        "spec": {
            "clusterIP": "None",
            # Ranks look for each other before any of them could be called ready.
            "publishNotReadyAddresses": True,
            "selector": pod.labels(),
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def _port() -> list[dict[str, Any]]:
    return [{"name": "rendezvous", "containerPort": PORT}]


def _mpirun(pod: Pod, train: list[str]) -> str:
    """The launcher's script. mpirun forwards SIGUSR1, and would end the ranks at once on SIGTERM."""
    ranks = f"-np {pod.job.num_ranks} --map-by ppr:{pod.job.ranks_per_node}:node --bind-to none"
    command = " ".join([f"{quote(pod.settings.python)} -m", *map(quote, train)])
    return f"""#!/bin/bash
# shellcheck disable=SC2016
set -u
# What ssh does not carry: this pod's variables, but for those that are its own.
forward=()
while read -r name; do
    case $name in
        HOSTNAME | HOME | PWD | OLDPWD | SHLVL | _ | KUBERNETES_* | OMPI_* | MASTER_*) ;;
        *) forward+=(-x "$name") ;;
    esac
done < <(compgen -e)
meet=$(head -n 1 /etc/mpi/hostfile | cut -d ' ' -f 1)

mpirun {ranks} -wdir {WORK} \\
    "${{forward[@]}}" -x MASTER_ADDR="$meet" -x MASTER_PORT={PORT} \\
    {command} &
ranks=$!
trap 'kill -USR1 "$ranks"' TERM
while kill -0 "$ranks" 2>/dev/null; do
    wait "$ranks"
done
wait "$ranks"
"""
