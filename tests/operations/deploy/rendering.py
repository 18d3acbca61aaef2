"""Renders as the command line does, in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml

from distributed.config import Layer
from distributed.operations.deploy import docker, ray_cluster, slurm
from distributed.operations.deploy.files import Rendered
from distributed.operations.deploy.job import make_job
from distributed.operations.deploy.kubernetes import render as kubernetes
from distributed.operations.deploy.settings import read_settings
from distributed.registry.catalog import get_catalog

IMAGE = "registry.example.com/team/train:1.0"
TARGETS = {
    "slurm": (slurm, slurm.SlurmSettings),
    "kubernetes": (kubernetes, kubernetes.KubernetesSettings),
    "docker": (docker, docker.DockerSettings),
    "ray": (ray_cluster, ray_cluster.RaySettings),
}


def render(
    target: str,
    config: Mapping[str, Any],
    settings: Mapping[str, Any] | None = None,
    script: Path | None = None,
    arguments: Sequence[str] = (),
    output: str = "out",
) -> Rendered:
    """What `target` makes of `config`, as ``deploy`` would write it to `output`."""
    module, model = TARGETS[target]
    own = {"image": IMAGE} if target == "kubernetes" else {}
    job = make_job(
        [Layer("test", dict(config))],
        script,
        "" if script is None else str(script),
        arguments,
        get_catalog(),
        asks_for_ranks=target != "docker",
    )
    return module.render(job, read_settings(model, None, {**own, **(settings or {})}), PurePath(output))


def documents(rendered: Rendered) -> dict[str, dict[str, Any]]:
    """Every manifest by its kind, less the list of them."""
    found = {}
    for name, text in rendered.files.items():
        if name.endswith(".yaml") and name != "kustomization.yaml":
            for document in yaml.safe_load_all(text):
                found[document["kind"]] = document
    return found


def pods(rendered: Rendered) -> list[dict[str, Any]]:
    """Every pod template in the manifests."""
    return [t for document in documents(rendered).values() for t in _templates(document)]


def _templates(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [t for item in value for t in _templates(item)]
    if not isinstance(value, dict):
        return []
    if "containers" in (value.get("spec") or {}):
        return [value]
    return [t for item in value.values() for t in _templates(item)]


def beside_python(program: str) -> str:
    """The path of a program that pip installed: the environment's folder need not be in PATH."""
    return str(Path(sys.executable).with_name(program))
