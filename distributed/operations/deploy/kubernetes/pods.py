"""The pod in which a node's ranks run, whatever kind of object makes it."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Any

from distributed.config.sections import local_path
from distributed.errors import UserError
from distributed.operations.deploy.job import Job
from distributed.operations.deploy.kubernetes.names import literal
from distributed.operations.deploy.kubernetes.settings import KubernetesSettings

__all__ = ["CONFIG", "CONTAINER", "WORK", "Pod", "mount_path"]

CONTAINER = "train"
CONFIG, WORK = "/config", "/work"
"""Folders of the configuration and of the run; the latter is deleted with the pod."""
_TAKEN = (CONFIG, WORK, "/tmp", "/dev", "/proc", "/sys", "/etc", "/usr", "/bin", "/lib", "/var", "/root")


def mount_path(directory: str | None) -> str | None:
    """Mount path of the volume with the checkpoints; None for an object store, or no checkpoints.

    Raises:
        UserError: no volume can be mounted there.
    """
    folder = local_path(directory)
    if folder is None:
        return None
    path = posixpath.normpath(posixpath.join(WORK, folder))
    inside = path.startswith(f"{WORK}/")
    taken = any(path == place or path.startswith(f"{place}/") for place in _TAKEN)
    if path == "/" or ":" in path or (taken and not inside) or not path.isprintable():
        raise UserError(
            "no volume can be mounted at this path",
            field="checkpoint_dir",
            got=directory,
            allowed="a directory name, created in the job's own folder, a path such as /checkpoints/run,"
            " or an object store's URL",
        )
    return path


@dataclass(frozen=True)
class Pod:
    """Common parts of the pods of a job.

    Attributes:
        claim: the volume claim for checkpoints, None without.
    """

    job: Job
    settings: KubernetesSettings
    claim: str | None

    def labels(self) -> dict[str, str]:
        """Labels of every object of this job."""
        return {
            "app.kubernetes.io/name": "distributed-trainer",
            "app.kubernetes.io/instance": self.settings.name,
        }

    def metadata(self, name: str | None = None) -> dict[str, Any]:
        """Name, namespace and labels of an object."""
        space = {"namespace": self.settings.namespace} if self.settings.namespace is not None else {}
        return {"name": name or self.settings.name, **space, "labels": self.labels()}

    def queued(self) -> dict[str, Any]:
        """`metadata` of the object that a queue admits."""
        found = self.metadata()
        if self.settings.queue is not None:
            found["labels"] = {**found["labels"], "kueue.x-k8s.io/queue-name": self.settings.queue}
        return found

    def template(self, command: list[str] | None, **changes: Any) -> dict[str, Any]:
        """Metadata and spec of a pod that runs `command`.

        Args:
            command: words that Kubernetes reads as they are written: see `literal`.
            changes: `name` of the container, `gpus`: whether it has the node's, `fixed`: whether its root
                file system is read-only, `ports` and `spec`, further fields of the pod.
        """
        settings = self.settings
        spec: dict[str, Any] = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": settings.grace,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": self._security(),
            "containers": [self._container(command, changes)],
            "volumes": self._volumes(),
            **changes.get("spec", {}),
        }
        if settings.node_selector:
            spec["nodeSelector"] = dict(settings.node_selector)
        if settings.priority_class is not None:
            spec["priorityClassName"] = settings.priority_class
        if settings.service_account is not None:
            spec["serviceAccountName"] = settings.service_account
        if settings.image_pull_secret:
            spec["imagePullSecrets"] = [{"name": name} for name in settings.image_pull_secret]
        return {"metadata": {"labels": self.labels()}, "spec": spec}

    def resources(self, gpus: bool = True) -> dict[str, Any]:
        """Requests and limits of one node's ranks."""
        settings, number = self.settings, self.job.gpus_per_node if gpus else 0
        both = {"memory": settings.memory} if settings.memory is not None else {}
        both |= {settings.gpu_resource: str(number)} if number else {}
        # A limit on CPUs would throttle ranks in bursts, without a benefit.
        cpus = settings.cpus or (None if self.job.uses_gpus else str(self.job.ranks_per_node))
        requests = {**({"cpu": cpus} if cpus is not None else {}), **both}
        return {**({"requests": requests} if requests else {}), **({"limits": both} if both else {})}

    def env(self) -> list[dict[str, str]]:
        """Variables of the ranks."""
        # No user of the image's own owns /root; caches belong where the run may write.
        fixed = {"HOME": WORK, "PYTHONUNBUFFERED": "1"}
        return [
            {"name": name, "value": literal(text)} for name, text in {**fixed, **self.settings.env}.items()
        ]

    def _container(self, command: list[str] | None, changes: dict[str, Any]) -> dict[str, Any]:
        settings = self.settings
        sources = [{"secretRef": {"name": name}} for name in settings.env_from_secret]
        return {
            "name": changes.get("name", CONTAINER),
            "image": settings.image,
            **({"command": command} if command is not None else {}),
            "workingDir": WORK,
            "env": self.env(),
            **({"envFrom": sources} if sources else {}),
            **({"ports": changes["ports"]} if "ports" in changes else {}),
            "resources": self.resources(changes.get("gpus", True)),
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": changes.get("fixed", True),
                "capabilities": {"drop": ["ALL"]},
            },
            "volumeMounts": self._mounts(),
        }

    def _security(self) -> dict[str, Any]:
        user = self.settings.run_as_user
        return {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        }

    def _mounts(self) -> list[dict[str, Any]]:
        mounts: list[dict[str, Any]] = [
            {"name": "files", "mountPath": CONFIG, "readOnly": True},
            {"name": "work", "mountPath": WORK},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "shm", "mountPath": "/dev/shm"},
        ]
        if self.claim is not None:
            mounts.append({"name": "checkpoints", "mountPath": mount_path(self.job.config.checkpoint_dir)})
        return mounts

    def _volumes(self) -> list[dict[str, Any]]:
        volumes: list[dict[str, Any]] = [
            {"name": "files", "configMap": {"name": f"{self.settings.name}-files"}},
            {"name": "work", "emptyDir": {}},
            {"name": "tmp", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": self.settings.shm}},
        ]
        if self.claim is not None:
            volumes.append({"name": "checkpoints", "persistentVolumeClaim": {"claimName": self.claim}})
        return volumes
