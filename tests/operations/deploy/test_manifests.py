"""Manifests are what a cluster takes: by the schemas of five minor versions, by each operator's own, and
by what no schema sees. Broken ones are shown to fail."""

from __future__ import annotations

import copy
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from tests.operations.deploy import against_crds
from tests.operations.deploy.manifest_checks import VERSIONS, problems, reference_problems
from tests.operations.deploy.rendering import beside_python, documents, pods, render

BROKEN = Path(__file__).parent / "broken"
RUN = {"num_nodes": 2, "gpus_per_node": 4, "checkpoint_dir": "checkpoints"}
KINDS = {
    "job": {},
    "jobset": {},
    "trainjob": {},
    "mpijob": {"backend": "horovod"},
    "rayjob": {"backend": "ray"},
}
FULL = {
    "namespace": "research",
    "cpus": "16",
    "memory": "128Gi",
    "shm": "16Gi",
    "env": ["NCCL_DEBUG=INFO"],
    "env_from_secret": ["tracking"],
    "node_selector": ["gpu=a100"],
    "queue": "team",
    "priority_class": "low",
    "service_account": "trainer",
    "image_pull_secret": ["registry"],
    "storage_class": "shared",
}


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("print('hello')\n")
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{}, FULL, {"retries": 0, "claim": "theirs"}], ids=["least", "full", "once"]
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_manifest_is_taken(kind: str, settings: dict[str, Any], script: Path) -> None:
    rendered = render(
        "kubernetes", {**RUN, **KINDS[kind]}, {**settings, "kind": kind}, script, ["--lr", "$(A)"]
    )
    found = documents(rendered)
    assert {name: problems(document) for name, document in found.items()} == {name: [] for name in found}
    assert reference_problems(found) == []
    if "env" in settings:
        spaces = {document["metadata"].get("namespace") for document in found.values()}
        assert spaces == {"research"}


@pytest.mark.parametrize(
    "changes", [{"elastic": {"min_nodes": 1}, "global_batch_size": 64}, {"num_nodes": 1}]
)
@pytest.mark.parametrize("kind", ["job", "jobset"])
def test_elastic_and_single_nodes_are_taken(kind: str, changes: dict[str, Any]) -> None:
    found = documents(render("kubernetes", {**RUN, **changes}, {"kind": kind}))
    assert [problem for document in found.values() for problem in problems(document)] == []
    command = pods(render("kubernetes", {**RUN, **changes}, {"kind": kind}))[0]["spec"]["containers"][0][
        "command"
    ]
    assert ("--nnodes=1:2" in command) == ("elastic" in changes)


def test_the_versions_are_there() -> None:
    """What is kept of the library's reader says what the library itself does."""
    found = documents(render("kubernetes", RUN))["Job"]
    broken = yaml.safe_load((BROKEN / "unknown_field.yaml").read_text())
    for version in VERSIONS:
        assert kubernetes_validate.validate(found, version, strict=True) == version
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, VERSIONS[0], strict=True)
    assert len(VERSIONS) >= 3


@pytest.mark.parametrize("path", sorted(BROKEN.glob("*.yaml")), ids=lambda path: path.stem)
def test_broken_manifests_are_refused(path: Path) -> None:
    (expected,) = [line[2:] for line in path.read_text().splitlines() if line.startswith("# ")]
    found = problems(yaml.safe_load(path.read_text()))
    assert found, f"{path.name} was taken"
    assert any(expected in problem for problem in found), found


def _wrong_selector(found: dict[str, Any]) -> None:
    found["Service"]["spec"]["selector"]["app.kubernetes.io/instance"] = "another"


def _wrong_subdomain(found: dict[str, Any]) -> None:
    found["Job"]["spec"]["template"]["spec"]["subdomain"] = "another"


def _wrong_meeting(found: dict[str, Any]) -> None:
    command = found["Job"]["spec"]["template"]["spec"]["containers"][0]["command"]
    command[command.index("--rdzv-endpoint=train-0.train:29500")] = "--rdzv-endpoint=train-1.train:29500"


def _wrong_map(found: dict[str, Any]) -> None:
    found["ConfigMap"]["metadata"]["name"] = "another"


def _wrong_claim(found: dict[str, Any]) -> None:
    found["PersistentVolumeClaim"]["metadata"]["name"] = "another"


def _twice(found: dict[str, Any]) -> None:
    mounts = found["Job"]["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]
    mounts[1]["mountPath"] = mounts[0]["mountPath"]


@pytest.mark.parametrize(
    "spoil", [_wrong_selector, _wrong_subdomain, _wrong_meeting, _wrong_map, _wrong_claim, _twice]
)
def test_names_that_lead_nowhere_are_found(spoil: Any) -> None:
    found = documents(render("kubernetes", RUN))
    spoilt = copy.deepcopy(found)
    spoil(spoilt)
    assert reference_problems(found) == []
    assert len(reference_problems(spoilt)) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_pods_are_nobody_and_have_memory_to_share(kind: str) -> None:
    rendered = render("kubernetes", {**RUN, **KINDS[kind]}, {"kind": kind, "grace": 300})
    found = pods(rendered)
    assert found
    for template in found:
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsUser"] == 1000
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["automountServiceAccountToken"] is False
        assert pod["terminationGracePeriodSeconds"] == 300
        (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
        assert shm["emptyDir"]["medium"] == "Memory"
        for container in pod["containers"]:
            own = container["securityContext"]
            assert own["capabilities"] == {"drop": ["ALL"]}
            assert own["allowPrivilegeEscalation"] is False
            assert "/dev/shm" in [mount["mountPath"] for mount in container["volumeMounts"]]


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_told_to_go_and_drained_do_not_count_as_failures(kind: str) -> None:
    text = next(
        text
        for name, text in render("kubernetes", RUN, {"kind": kind}).files.items()
        if "podFailurePolicy" in text
    )
    policy = next(_find(yaml.safe_load(text), "podFailurePolicy"))
    ignored = [rule for rule in policy["rules"] if rule["action"] == "Ignore"]
    assert {"type": "DisruptionTarget", "status": "True"} in ignored[0]["onPodConditions"]
    assert ignored[1]["onExitCodes"]["values"] == [75]


def _find(value: Any, name: str) -> Any:
    if isinstance(value, list):
        for item in value:
            yield from _find(item, name)
    elif isinstance(value, dict):
        if name in value:
            yield value[name]
        for item in value.values():
            yield from _find(item, name)


def test_gpus_are_asked_for_once_on_each_node_and_by_the_ranks_alone() -> None:
    def gpus(template: dict[str, Any]) -> Any:
        resources = template["spec"]["containers"][0]["resources"]
        assert resources.get("limits", {}).get("nvidia.com/gpu") == resources["requests"].get(
            "nvidia.com/gpu"
        )
        return resources["requests"].get("nvidia.com/gpu")

    assert [gpus(pod) for pod in pods(render("kubernetes", RUN))] == ["4"]
    on_cpus = {"num_nodes": 2, "num_processes": 4, "checkpoint_dir": "c"}
    assert [gpus(pod) for pod in pods(render("kubernetes", on_cpus))] == [None]
    for kind in ("mpijob", "rayjob"):
        helper, worker = pods(render("kubernetes", {**RUN, **KINDS[kind]}, {"kind": kind}))
        assert (gpus(helper), gpus(worker)) == (None, "4")


@pytest.mark.parametrize(
    ("directory", "mounted"),
    [
        ("checkpoints", "/work/checkpoints"),
        ("a/../b/", "/work/b"),
        ("/data/run", "/data/run"),
        ("s3://b/r", None),
    ],
)
def test_the_volume_is_where_the_run_saves(directory: str, mounted: str | None) -> None:
    rendered = render("kubernetes", {**RUN, "checkpoint_dir": directory})
    (pod,) = pods(rendered)
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["spec"]["containers"][0]["volumeMounts"]}
    assert mounts.get("checkpoints") == mounted
    assert ("claim.yaml" in rendered.files) == (mounted is not None)
    config = yaml.safe_load(documents(rendered)["ConfigMap"]["data"]["run.yaml"])
    assert config["checkpoint_dir"] == directory


def test_a_claim_that_is_there_is_used_and_none_made() -> None:
    rendered = render("kubernetes", RUN, {"claim": "theirs"})
    (pod,) = pods(rendered)
    (volume,) = [v for v in pod["spec"]["volumes"] if v["name"] == "checkpoints"]
    assert volume["persistentVolumeClaim"]["claimName"] == "theirs"
    assert "claim.yaml" not in rendered.files


def test_kustomize_reads_the_folder(tmp_path: Path) -> None:
    """Every file that is listed exists, and every manifest is listed."""
    rendered = render("kubernetes", RUN)
    listed = yaml.safe_load(rendered.files["kustomization.yaml"])["resources"]
    assert sorted(listed) == sorted(set(rendered.files) - {"kustomization.yaml"})


def test_the_launchers_script_is_clean_shell(tmp_path: Path) -> None:
    data = documents(render("kubernetes", {**RUN, "backend": "horovod"}))["ConfigMap"]["data"]
    path = tmp_path / "start.sh"
    path.write_text(data["start.sh"])
    done = subprocess.run([beside_python("shellcheck"), str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


CRD = """
kind: CustomResourceDefinition
spec:
  group: ray.io
  names: {kind: RayJob}
  versions:
    - name: v1
      schema:
        openAPIV3Schema:
          type: object
          properties:
            apiVersion: {type: string}
            kind: {type: string}
            metadata: {type: object}
            spec: {type: object, %s}
"""


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ("x-kubernetes-preserve-unknown-fields: true, properties: {}", "accepted"),
        ("properties: {entrypoint: {type: string}}", "Additional properties are not allowed"),
        ("required: [runtime]", "'runtime' is a required property"),
    ],
)
def test_definitions_of_an_operator_are_read_strictly(
    spec: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "crd.yaml"
    path.write_text("just: data\n---" + CRD % spec)
    assert against_crds.main([str(path)]) == (word != "accepted")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("rayjob/rayjob.yaml ray.io/v1 RayJob ")
    assert word in line


@pytest.mark.parametrize(("kind", "mode"), [("job", "ReadWriteOnce"), ("mpijob", "ReadWriteMany")])
def test_a_claim_that_two_pods_mount_is_shared(kind: str, mode: str) -> None:
    """mpirun's launcher mounts it beside the only node."""
    rendered = render("kubernetes", {**RUN, **KINDS[kind], "num_nodes": 1}, {"kind": kind})
    assert documents(rendered)["PersistentVolumeClaim"]["spec"]["accessModes"] == [mode]
    assert any("ReadWriteMany" in note for note in rendered.notes) == (kind == "mpijob")
    assert any("raise --retries" in note for note in rendered.notes) == (kind == "mpijob")


def test_a_file_url_is_a_folder() -> None:
    rendered = render("kubernetes", {**RUN, "checkpoint_dir": "file:///checkpoints/run"})
    (container,) = pods(rendered)[0]["spec"]["containers"]
    assert "/checkpoints/run" in [mount["mountPath"] for mount in container["volumeMounts"]]
    assert not any("credentials" in note for note in rendered.notes)
