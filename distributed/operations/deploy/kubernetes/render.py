"""``deploy kubernetes``: manifests for `kubectl apply -k`, built as data and never as text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

from distributed.config.sections import is_object_store
from distributed.errors import UserError
from distributed.operations.deploy.files import Rendered
from distributed.operations.deploy.job import Job, form_of, restartable, run_yaml
from distributed.operations.deploy.kubernetes import job_kinds
from distributed.operations.deploy.kubernetes.job_kinds import Made
from distributed.operations.deploy.kubernetes.pods import CONFIG, Pod, mount_path
from distributed.operations.deploy.kubernetes.settings import Kind, KubernetesSettings
from distributed.operations.deploy.text_formats import dump, quote

__all__ = ["KubernetesSettings", "render"]

# What each form of backend may be deployed as; the first is the default.
_KINDS: dict[str, tuple[Kind, ...]] = {
    "torchrun": ("job", "jobset", "trainjob", "mpijob"),
    "mpi": ("mpijob", "job", "jobset", "trainjob"),
    "ray": ("rayjob",),
}
_MAKERS: dict[Kind, Callable[[Pod, list[str]], Made]] = {
    "job": job_kinds.job,
    "jobset": job_kinds.jobset,
    "trainjob": job_kinds.trainjob,
    "mpijob": job_kinds.mpijob,
    "rayjob": job_kinds.rayjob,
}
_ELASTIC: tuple[Kind, ...] = ("job", "jobset", "rayjob")
_LIMIT = 250_000
"""Bytes, as JSON: a ConfigMap may hold 1 MiB, but `kubectl apply` keeps it in an annotation of 256 KiB."""


def render(job: Job, settings: KubernetesSettings, output: PurePath) -> Rendered:
    """Manifests, and the list of them.

    Raises:
        UserError: a kind that cannot run the backend; a script too large to travel; checkpoints that
            no volume could hold.
    """
    kind = _kind(job, settings)
    resume = restartable(job, settings.retries > 0, "--retries 0")
    claim = _claim(job, settings)
    pod = Pod(job, settings, claim)
    script, files = _script(job)
    made = _MAKERS[kind](pod, job.train_words(f"{CONFIG}/run.yaml", script, resume))
    files = {"run.yaml": run_yaml(job), **files, **made.scripts}
    objects = {"files.yaml": [_config_map(pod, files)], **_claims(pod, kind), **made.objects}
    manifests = {name: dump(documents) for name, documents in objects.items()}
    kustomization = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": list(manifests),
    }
    return Rendered(
        files={"kustomization.yaml": dump([kustomization]), **manifests},
        submit=f"kubectl apply -k {quote(str(output))}",
        notes=[*job.notes, *_notes(job, settings, kind)],
    )


def _kind(job: Job, settings: KubernetesSettings) -> Kind:
    kinds = form_of(job, _KINDS, "Kubernetes")
    kind = kinds[0] if settings.kind == "auto" else settings.kind
    if kind not in kinds:
        raise UserError(
            f"kind {kind} cannot run backend '{job.spec.name}'",
            field="--kind",
            got=kind,
            allowed=", ".join(kinds),
        )
    if job.min_nodes is not None and kind not in _ELASTIC:
        raise UserError(
            f"kind {kind} has a fixed number of nodes",
            field="elastic.min_nodes",
            got=job.min_nodes,
            allowed=f"nothing, or --kind {' or '.join(k for k in kinds if k in _ELASTIC)}",
        )
    if kind == "mpijob" and job.config.is_elastic:
        raise UserError(
            "mpirun does not restart ranks",
            field="elastic.max_restarts",
            got=job.config.max_restarts,
            remedy="Leave it out: --retries restarts the whole job from the newest checkpoint",
        )
    return kind


def _claim(job: Job, settings: KubernetesSettings) -> str | None:
    if mount_path(job.config.checkpoint_dir) is None:
        return None
    return settings.claim or f"{settings.name}-checkpoints"


def _is_shared(job: Job, kind: Kind) -> bool:
    """Whether several pods mount the claim; mpirun's launcher does, and so does Ray's head."""
    return job.num_nodes > 1 or kind in ("mpijob", "rayjob")


def _claims(pod: Pod, kind: Kind) -> dict[str, list[dict[str, Any]]]:
    settings = pod.settings
    if pod.claim is None or settings.claim is not None:
        return {}
    storage = {"storageClassName": settings.storage_class} if settings.storage_class is not None else {}
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": pod.metadata(pod.claim),
        "spec": {
            "accessModes": ["ReadWriteMany" if _is_shared(pod.job, kind) else "ReadWriteOnce"],
            **storage,
            "resources": {"requests": {"storage": settings.claim_size}},
        },
    }
    return {"claim.yaml": [claim]}


def _script(job: Job) -> tuple[str | None, dict[str, str]]:
    """The script's path in a pod, and the file that carries it there."""
    text = job.script_text()
    if job.script is None or text is None:
        return None, {}
    name = job.script.name if re.fullmatch(r"[A-Za-z0-9_.-]{1,200}", job.script.name) else "train.py"
    if name in ("run.yaml", "start.sh"):
        name = "train.py"
    return f"{CONFIG}/{name}", {name: text}


def _config_map(pod: Pod, files: dict[str, str]) -> dict[str, Any]:
    size = len(json.dumps(files))
    if size > _LIMIT:
        raise UserError(
            f"script and configuration are {size:,} bytes; `kubectl apply` accepts at most {_LIMIT:,}",
            field="--script",
            got=pod.job.script_name,
            remedy="Move most of the script into a package in the image",
        )
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": pod.metadata(f"{pod.settings.name}-files"),
        "data": files,
    }


def _notes(job: Job, settings: KubernetesSettings, kind: Kind) -> list[str]:
    found = []
    if job.script is not None:
        found.append("only the script is copied; modules beside it must be in the image")
    if settings.claim is None and mount_path(job.config.checkpoint_dir) and _is_shared(job, kind):
        found.append(
            "the claim is ReadWriteMany, which not every storage class has: see --storage-class, --claim"
        )
    directory = job.config.checkpoint_dir
    if is_object_store(directory) and not settings.env_from_secret:
        found.append("the object store needs credentials: set --env-from-secret NAME")
    if kind in ("mpijob", "rayjob") and settings.retries and directory is not None:
        found.append(f"a {kind} counts a preemption as a failure, too: raise --retries")
    local = [name for name, wanted in (("TensorBoard", job.config.wants_tensorboard),) if wanted]
    if job.config.wants_mlflow and not (job.config.tracking.mlflow_tracking_uri or "").startswith("http"):
        local.append("MLflow")
    if local:
        found.append(
            f"what {' and '.join(local)} write{'s' if len(local) == 1 else ''} is deleted with the pod,"
            " unless it writes beside the checkpoints or to a server"
        )
    if ":" not in (settings.image or "").rpartition("/")[2]:
        found.append("the image has no tag, so it may change over time")
    return found
