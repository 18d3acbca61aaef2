"""Settings of a Kubernetes job and their checks."""

from __future__ import annotations

import re
from typing import Any, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator

from distributed.operations.deploy.checks import env_mapping
from distributed.operations.deploy.kubernetes.names import (
    check_image,
    check_label,
    check_name,
    parse_cpus,
    parse_memory,
)
from distributed.operations.deploy.settings import RunSettings

Kind = Literal["job", "jobset", "trainjob", "mpijob", "rayjob"]
_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")


class KubernetesSettings(RunSettings):
    """Settings of a Kubernetes job."""

    kind: Literal["auto", "job", "jobset", "trainjob", "mpijob", "rayjob"] = Field(
        "auto",
        description="job requires only Kubernetes, the other kinds their operator. auto: mpijob for horovod,"
        " rayjob for ray, else job.",
    )
    image: str | None = Field(
        None, description="Image that contains distributed-trainer; `deploy docker` builds one."
    )
    namespace: str | None = Field(None, description="Namespace. None: kubectl's default.")
    cpus: str | None = Field(None, description="CPUs of each node's pod, such as 8 or 500m.")
    memory: str | None = Field(None, description="Memory of each node's pod, such as 64Gi.")
    gpu_resource: str = Field("nvidia.com/gpu", description="Resource name of a GPU.")
    shm: str = Field(
        "1Gi", description="Size of /dev/shm, which counts as memory; DataLoader workers require it."
    )
    claim: str | None = Field(None, description="Existing volume claim for checkpoint_dir.")
    claim_size: str = Field(
        "100Gi", description="Size of the volume claim that is created if `claim` is not set."
    )
    storage_class: str | None = Field(
        None, description="Storage class of the created claim. None: the default."
    )
    env_from_secret: tuple[str, ...] = Field(
        (), description="Secret whose keys become environment variables."
    )
    retries: NonNegativeInt = Field(
        3,
        description="Restarts after a failure; a preemption after which the run saved does not count in"
        " job, jobset and trainjob.",
    )
    grace: PositiveInt = Field(120, description="Seconds for a save before a pod is deleted.")
    run_as_user: PositiveInt = Field(1000, description="Uid and gid of the processes; root is not allowed.")
    node_selector: dict[str, str] = Field(default_factory=dict, description="Label that nodes must have.")
    queue: str | None = Field(None, description="Kueue queue.")
    priority_class: str | None = Field(None, description="Priority class of the pods.")
    service_account: str | None = Field(
        None, description="Service account of the pods; its token is not mounted."
    )
    image_pull_secret: tuple[str, ...] = Field((), description="Secret for the image registry.")
    ray_version: str = Field("2.60.0", description="Version of Ray in the image; for rayjob.")

    def secret_remedy(self) -> str:
        """Remedy for a secret in a file."""
        return "Make a Secret (kubectl create secret generic NAME) and set --env-from-secret NAME"

    @field_validator("node_selector", mode="before")
    @classmethod
    def _label_pairs(cls, value: Any) -> Any:
        return env_mapping(value)

    @model_validator(mode="after")
    def _kubernetes_takes_them(self) -> Self:
        check_label(self.name, "name", 40)  # pods, their hosts and what an operator adds are called after it
        if not self.name[0].isalpha():
            raise ValueError(
                f"name={self.name!r} is not a name of a Service in Kubernetes: it must start with a letter"
            )
        if self.image is None:
            raise ValueError("image is missing: set --image; `deploy docker` writes files that build one")
        check_image(self.image)
        if self.namespace is not None:
            check_label(self.namespace, "namespace")
        for field in ("claim", "storage_class", "priority_class", "service_account", "queue"):
            if getattr(self, field) is not None:
                check_name(getattr(self, field), field)
        for field in ("env_from_secret", "image_pull_secret"):
            for name in getattr(self, field):
                check_name(name, field)
        if not _RESOURCE.fullmatch(self.gpu_resource):
            raise ValueError(
                f"gpu_resource={self.gpu_resource!r} is not a resource: give a name such as nvidia.com/gpu"
            )
        self._amounts()
        return self

    def _amounts(self) -> None:
        if self.cpus is not None:
            parse_cpus(self.cpus)
        parse_memory(self.claim_size)
        shm = parse_memory(self.shm)
        if self.memory is not None and parse_memory(self.memory) <= shm:
            raise ValueError(f"memory={self.memory} is not more than shm={self.shm}, which counts against it")
