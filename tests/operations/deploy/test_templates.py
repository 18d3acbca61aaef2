"""The templates in deploy/ are the renderer's own output, and each is taken by what reads its kind."""

from __future__ import annotations

import runpy
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from distributed.cli import main
from tests.operations.deploy.manifest_checks import problems, reference_problems
from tests.operations.deploy.rendering import beside_python, render

ROOT = Path(__file__).parents[3]
FOLDERS = ("slurm", "kubernetes", "docker", "ray")
RUN = {"num_nodes": 2, "gpus_per_node": 4, "checkpoint_dir": "/shared/c", "backend": "ray"}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("checkout")
    for name in ("deploy/example.yaml", "examples/convnet.py", "constraints.txt"):
        (place / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, place / name)
    commands = runpy.run_path(str(ROOT / "deploy" / "render.py"))["COMMANDS"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        for command in commands:
            assert main(command.split()) == 0
    return place / "deploy"


def files(folder: Path) -> dict[str, str]:
    found = [path for name in FOLDERS for path in (folder / name).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_text() for path in found}


def test_what_is_shipped_is_what_is_rendered(rendered: Path) -> None:
    shipped, fresh = files(ROOT / "deploy"), files(rendered)
    assert sorted(shipped) == sorted(fresh), "make deploy-templates"
    changed = [name for name in fresh if shipped[name] != fresh[name]]
    assert changed == [], "make deploy-templates"


def test_every_shipped_manifest_is_taken(rendered: Path) -> None:
    for folder in (rendered / "kubernetes").iterdir():
        found = {}
        for path in folder.glob("*.yaml"):
            if path.name != "kustomization.yaml":
                document = yaml.safe_load(path.read_text())
                found[document["kind"]] = document
        assert {kind: problems(document) for kind, document in found.items()} == {kind: [] for kind in found}
        assert reference_problems(found) == []


@pytest.mark.parametrize("kind", ["slurm", "ray"])
def test_every_shipped_script_is_clean_shell(rendered: Path, kind: str) -> None:
    scripts = [str(path) for path in (rendered / kind).rglob("*") if path.suffix in (".sh", ".sbatch")]
    assert scripts
    done = subprocess.run([beside_python("shellcheck"), *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ({}, {}),
        ({"backend": "horovod"}, {"build_script": "deploy/horovod/build.py"}),
        ({"backend": "deepspeed", "mlflow_tracking": True}, {"package": ["timm==1.0.22"], "user": 4711}),
    ],
    ids=["least", "horovod", "more"],
)
def test_dockerfiles_are_clean(
    config: dict[str, object], settings: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    written = render("docker", config, settings).files
    for name in ("Dockerfile.cpu", "Dockerfile.cuda"):
        (tmp_path / name).write_text(written[name])
        done = subprocess.run(
            [beside_python("hadolint"), str(tmp_path / name)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout
        user = settings.get("user", 1000)
        assert f"\nUSER {user}:{user}\n" in written[name]
        assert "--no-cache-dir" in written[name]
    assert ("horovod," in written["Dockerfile.cpu"]) == (config.get("backend") == "horovod")
    assert written[".dockerignore"].startswith("*\n")
    assert "torch==" in written["constraints.txt"]
    assert "+" not in written["constraints.txt"]


def test_hadolint_would_say_so(tmp_path: Path) -> None:
    text = render("docker", {}).files["Dockerfile.cuda"]
    spoilt = {
        "tag": text.replace("nvidia/cuda:13.0.1-base-ubuntu24.04", "nvidia/cuda"),
        "cache": text.replace(" \\\n    && rm -rf /var/lib/apt/lists/*", ""),
        "root": text.replace("USER 1000:1000", "USER root"),
    }
    for name, bad in spoilt.items():
        (tmp_path / name).write_text(bad)
        assert (
            subprocess.run([beside_python("hadolint"), str(tmp_path / name)], capture_output=True).returncode
            == 1
        ), name


@pytest.mark.parametrize(
    ("config", "extras"),
    [
        ({}, "examples,torch"),
        ({"backend": "ray"}, "examples,ray,torch"),
        ({"zero_stage": 1, "tensorboard": True}, "deepspeed,examples,tensorboard,torch"),
        ({"checkpoint_dir": "s3://b/r"}, "examples,object-store,torch"),
    ],
)
def test_the_image_holds_what_the_configuration_needs(config: dict[str, object], extras: str) -> None:
    assert f'"${{wheel}}[{extras}]"' in render("docker", config).files["Dockerfile.cpu"]


def cluster(**settings: object) -> dict[str, object]:
    own = {"host": ["node1", "node2"], "ssh_user": "me", **settings}
    found: dict[str, object] = yaml.safe_load(render("ray", RUN, own).files["cluster.yaml"])
    return found


def test_ray_takes_the_cluster() -> None:
    from jsonschema import ValidationError
    from ray.autoscaler._private.util import prepare_config, validate_config

    for settings in (
        {},
        {"ssh_key": "~/.ssh/key", "setup": ["pip install x"]},
        {"host": ["10.0.0.1", "fe80::1"]},
    ):
        validate_config(prepare_config(cluster(**settings)))
    for broken in ({"hosts": []}, {"auth": {"ssh_user": 1}}):
        with pytest.raises(ValidationError):
            validate_config({**prepare_config(cluster()), **broken})


@pytest.mark.parametrize(
    ("config", "number"), [({}, 2), ({"num_nodes": 1, "gpus_per_node": None, "num_gpus": 8}, 3)]
)
def test_the_job_on_a_new_cluster_waits_for_its_hosts(config: dict[str, object], number: int) -> None:
    """`ray up` returns when the head is there."""
    own = {"host": ["node1", "node2", "node3"], "ssh_user": "me", "python": "my python"}
    start = render("ray", {**RUN, **config}, own, arguments=["a b"]).files["job/start.sh"]
    command = shlex.split(start.partition("exec ")[2].replace("\\\n", ""))
    nodes = ["my python", "-m", "distributed_backends.ray.allocation", "run", "--num-nodes", str(number)]
    assert command[: len(nodes)] == nodes
    assert command[command.index("--") + 1 :][:3] == ["my python", "-m", "distributed.cli"]
    assert command[-2:] == ["--", "a b"]


def test_a_cluster_that_runs_gets_the_job_alone() -> None:
    rendered = render("ray", RUN, {"dashboard": "https://head:8265/x"})
    assert "cluster.yaml" not in rendered.files
    assert "ray up" not in rendered.files["submit.sh"]
    # Its hosts may come when they are asked for.
    assert "ray.allocation" not in rendered.files["job/start.sh"]
    assert "--address https://head:8265/x " in rendered.files["submit.sh"]
