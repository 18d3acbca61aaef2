"""Whether a cluster would take manifests: strict schemas, and what schemas do not see.

Kubernetes' own kinds are read by kubernetes-validate with the schemas of several minor versions; JobSet,
TrainJob and TrainingRuntime by Kubeflow's own models of them; MPIJob and RayJob by the schemas in
`schemas/`. Whatever holds pods has them read as Kubernetes' own besides.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from kubeflow_trainer_api import models
from kubernetes_validate import utils
from referencing import Registry, Resource

VERSIONS = ("1.29", "1.31", "1.33", "1.35", "1.37")
SCHEMAS = Path(__file__).parent / "schemas"
_MODELS = {
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): models.JobsetV1alpha2JobSet,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): models.TrainerV1alpha1TrainJob,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): models.TrainerV1alpha1TrainingRuntime,
}
_OWN = {("kubeflow.org/v2beta1", "MPIJob"): "mpijob.yaml", ("ray.io/v1", "RayJob"): "rayjob.yaml"}


def problems(document: dict[str, Any]) -> list[str]:
    """Why a cluster would not take `document`; an unknown kind is a reason."""
    kind = (document.get("apiVersion", ""), document.get("kind", ""))
    found = _by_kind(kind, document)
    for template in _pod_templates(document):
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": template}
        found += [f"pod: {problem}" for problem in _kubernetes(pod)]
    for spec in _job_specs(document):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": spec}
        found += [f"job: {problem}" for problem in _kubernetes(job)]
        found += _meaning(spec)
    return found


def _by_kind(kind: tuple[str, str], document: dict[str, Any]) -> list[str]:
    if kind in _MODELS:
        return _model(_MODELS[kind], document)
    if kind in _OWN:
        return [error.message for error in _validator(_OWN[kind]).iter_errors(document)]
    return _kubernetes(document)


def _kubernetes(document: dict[str, Any]) -> list[str]:
    found = []
    for version in VERSIONS:
        try:
            validator = _reader(version, document.get("kind", ""), document.get("apiVersion", ""))
        except FileNotFoundError:
            found.append(f"{version}: no schema of {document.get('apiVersion')} {document.get('kind')}")
            continue
        found += [f"{version}: {error.message}" for error in validator.iter_errors(document)]
    return found


@cache
def _reader(version: str, kind: str, api: str) -> Draft202012Validator:
    """What `kubernetes_validate.validate(strict=True)` makes for each call, kept: it takes half a second."""
    (full,) = {v for v in utils.all_versions() if utils.major_minor(v) == version}
    folder = f"kubernetes-json-schema/v{full}-local-strict"
    group = re.sub(r"^([^./]*)(?:\.[^/]*)?/", r"\1-", api)
    schema = utils.schema_contents(f"{folder}/{kind.lower()}-{group}.json", version)
    definitions = utils.schema_contents(f"{folder}/_definitions.json", version)
    registry = Resource.from_contents(definitions) @ (Resource.from_contents(schema) @ Registry())
    return Draft202012Validator(schema, registry=registry)


def _model(model: Any, document: dict[str, Any]) -> list[str]:
    """These models drop what they do not know, so what comes back has to be what was given."""
    try:
        back = model.from_dict(document).to_dict()
    except ValueError as error:
        return [str(error)]
    return [f"unknown or changed: {path}" for path in _differences(document, back)]


def _differences(given: Any, back: Any, path: str = "") -> list[str]:
    if isinstance(given, dict) and isinstance(back, dict):
        return [d for name in given for d in _differences(given[name], back.get(name), f"{path}.{name}")]
    if isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        pairs = enumerate(zip(given, back, strict=True))
        return [d for i, (a, b) in pairs for d in _differences(a, b, f"{path}[{i}]")]
    return [] if given == back else [path]


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(yaml.safe_load((SCHEMAS / name).read_text(encoding="utf-8")))


def _pod_templates(value: Any) -> list[dict[str, Any]]:
    return [v for v in _mappings(value) if "containers" in (v.get("spec") or {})]


def _job_specs(value: Any) -> list[dict[str, Any]]:
    return [v for v in _mappings(value) if "template" in v and ("completions" in v or "backoffLimit" in v)]


def _mappings(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [m for item in value for m in _mappings(item)]
    if not isinstance(value, dict):
        return []
    return [value, *(m for item in value.values() for m in _mappings(item))]


def _meaning(spec: dict[str, Any]) -> list[str]:
    """What the API server checks of a Job beyond its schema."""
    pod = spec["template"]["spec"]
    found = []
    if pod.get("restartPolicy") not in ("Never", "OnFailure"):
        found.append(f"a Job's pods cannot have restartPolicy {pod.get('restartPolicy')}")
    if "podFailurePolicy" in spec and pod.get("restartPolicy") != "Never":
        found.append("podFailurePolicy needs restartPolicy Never")
    if "backoffLimitPerIndex" in spec and spec.get("completionMode") != "Indexed":
        found.append("backoffLimitPerIndex needs completionMode Indexed")
    names = {container["name"] for container in pod["containers"]}
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        named = rule.get("onExitCodes", {}).get("containerName")
        if named is not None and named not in names:
            found.append(f"podFailurePolicy names the container {named}, and there is none")
    return found


def reference_problems(found: dict[str, dict[str, Any]]) -> list[str]:
    """What the manifests together get wrong: names that lead nowhere."""
    wrong = []
    claims = {d["metadata"]["name"] for k, d in found.items() if k == "PersistentVolumeClaim"}
    maps = {d["metadata"]["name"]: d for k, d in found.items() if k == "ConfigMap"}
    for document in found.values():
        for template in _pod_templates(document):
            wrong += _pod_references(template, claims, maps)
    service = found.get("Service")
    if service is not None:
        wrong += _service_references(service, found["Job"])
    return wrong


def _pod_references(template: dict[str, Any], claims: set[str], maps: dict[str, Any]) -> list[str]:
    pod, wrong = template["spec"], []
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for container in pod["containers"]:
        wrong += [f"no volume {m['name']}" for m in container["volumeMounts"] if m["name"] not in volumes]
        paths = [mount["mountPath"] for mount in container["volumeMounts"]]
        wrong += [f"{path} is mounted twice" for path in set(paths) if paths.count(path) > 1]
    for volume in volumes.values():
        if "configMap" in volume and volume["configMap"]["name"] not in maps:
            wrong.append(f"no ConfigMap {volume['configMap']['name']}")
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim is not None and claims and claim not in claims:
            wrong.append(f"no claim {claim}")
    return wrong


def _service_references(service: dict[str, Any], job: dict[str, Any]) -> list[str]:
    name, template = service["metadata"]["name"], job["spec"]["template"]
    wrong = []
    if not service["spec"]["selector"].items() <= template["metadata"]["labels"].items():
        wrong.append("the Service selects no pod of the Job")
    if template["spec"].get("subdomain") != name:
        wrong.append("the pods' subdomain is not the Service")
    flags = template["spec"]["containers"][0]["command"]
    meeting = next(flag for flag in flags if flag.startswith("--rdzv-endpoint="))
    if not meeting.startswith(f"--rdzv-endpoint={job['metadata']['name']}-0.{name}:"):
        wrong.append(f"{meeting} is not the first pod")
    return wrong
