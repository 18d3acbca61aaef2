"""``deploy docker``: Dockerfiles, for CPUs and for CUDA, of an image in which the configuration runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path, PurePath
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from distributed._version import __version__
from distributed.config.sections import is_object_store
from distributed.errors import UserError
from distributed.operations.deploy.checks import check_text
from distributed.operations.deploy.files import Rendered
from distributed.operations.deploy.job import Job
from distributed.operations.deploy.kubernetes.names import check_image
from distributed.operations.deploy.settings import Settings
from distributed.operations.deploy.text_formats import quote

_OURS = "distributed-trainer"
_REQUIREMENT = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[A-Za-z0-9,._-]+\])?([=<>!~]=?=?[A-Za-z0-9.*+!,<>=~-]+)?"
)


class DockerSettings(Settings):
    """Contents of an image besides the configuration."""

    base: str = Field("python:3.12.12-slim-bookworm", description="Base image of Dockerfile.cpu.")
    cuda_base: str = Field(
        "nvidia/cuda:13.0.1-base-ubuntu24.04", description="Base image of Dockerfile.cuda."
    )
    constraints: str | None = Field(
        None, description="File of pinned versions for pip. None: the versions installed here."
    )
    extra: tuple[str, ...] = Field((), description="Extra of distributed-trainer, besides the backend's own.")
    package: tuple[str, ...] = Field((), description="Further package for pip, such as timm==1.0.22.")
    build_script: str | None = Field(
        None,
        description="Python program to run in the image after pip, with compilers installed, such as the"
        " deploy/horovod/build.py of a checkout.",
    )
    user: PositiveInt = Field(1000, description="Uid of the processes; root is not allowed.")

    @model_validator(mode="after")
    def _docker_takes_them(self) -> Self:
        for image in (self.name, self.base, self.cuda_base):
            check_image(image)
        for image in (self.base, self.cuda_base):
            if ":" not in image.rpartition("/")[2]:
                raise ValueError(f"'{image}' has no tag, so the base would change over time")
        for package in self.package:
            check_text(package, "package")
            if not _REQUIREMENT.fullmatch(package):
                raise ValueError(
                    f"'{package}' is not a requirement: give NAME==VERSION, such as timm==1.0.22"
                )
        for extra in self.extra:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", extra):
                raise ValueError(f"'{extra}' is not an extra of {_OURS}")
        return self


def render(job: Job, settings: DockerSettings, output: PurePath) -> Rendered:
    """Both Dockerfiles, and what they need beside them.

    Args:
        job: whose backend and trackers decide what is installed.
        output: output directory: the build's context.

    Raises:
        UserError: a file that cannot be read.
    """
    extras = _extras(job, settings)
    files = {
        "Dockerfile.cpu": _dockerfile(job, settings, extras, settings.base, cuda=False),
        "Dockerfile.cuda": _dockerfile(job, settings, extras, settings.cuda_base, cuda=True),
        # Only the listed files enter the build context, no checkpoints or keys.
        ".dockerignore": "*\n!constraints.txt\n!build_script.py\n!wheels/*.whl\n",
        "constraints.txt": _constraints(settings),
    }
    if settings.build_script is not None:
        files["build_script.py"] = _read(settings.build_script, "--build-script")
    kind = "cuda" if job.uses_gpus else "cpu"
    tag = settings.name if ":" in settings.name.rpartition("/")[2] else f"{settings.name}:{kind}"
    place = quote(str(output))
    return Rendered(
        files=files,
        submit=f"docker build --file {quote(str(output / f'Dockerfile.{kind}'))} --tag {quote(tag)} {place}",
        notes=[*job.notes, *_notes(job, settings, output, tag)],
    )


def _extras(job: Job, settings: DockerSettings) -> list[str]:
    named = re.search(rf"{_OURS}\[([A-Za-z0-9,._-]+)\]", job.spec.install_hint)
    wanted = {
        "torch": True,
        "tensorboard": job.config.wants_tensorboard,
        "mlflow": job.config.wants_mlflow,
        "examples": job.script is None,  # the bundled script's data
        "object-store": is_object_store(job.config.checkpoint_dir),
    }
    found = {name for name, is_wanted in wanted.items() if is_wanted} | set(settings.extra)
    if settings.build_script is not None and job.spec.name in _own_extras():
        found.add(job.spec.name)  # what its build needs
    return sorted(found | set(named[1].split(",") if named else ()))


def _own_extras() -> list[str]:
    try:
        return distribution(_OURS).metadata.get_all("Provides-Extra") or []
    except PackageNotFoundError:
        return []


def _dockerfile(job: Job, settings: DockerSettings, extras: list[str], base: str, cuda: bool) -> str:
    parts = [f"FROM {base}", *_packages(job, settings, cuda), _pip(settings, extras)]
    parts += [*_built(settings), *_ssh(job), _user(settings)]
    return "\n\n".join(parts) + "\n"


def _packages(job: Job, settings: DockerSettings, cuda: bool) -> Iterator[str]:
    wanted = ["python3", "python3-venv"] if cuda else []
    # Triton and DeepSpeed compile what they need when they need it.
    wanted += ["gcc", "g++", "libc6-dev", "python3-dev"] if cuda else []
    wanted += ["cmake", "g++", "make"] if settings.build_script is not None else []
    wanted += ["openmpi-bin", "openssh-client", "openssh-server"] if job.spec.deploy_form == "mpi" else []
    if wanted:
        listed = " ".join(dict.fromkeys(wanted))
        yield (
            "# The base is pinned, and its distribution fixes packages without new versions.\n"
            "# hadolint ignore=DL3008\n"
            "RUN apt-get update \\\n"
            f"    && apt-get install --yes --no-install-recommends {listed} \\\n"
            "    && rm -rf /var/lib/apt/lists/*"
        )


def _pip(settings: DockerSettings, extras: list[str]) -> str:
    further = "".join(f" '{package}'" for package in settings.package)
    return (
        "# An index of wheels without CUDA makes an image for CPUs gigabytes smaller.\n"
        "ARG TORCH_INDEX=\n"
        "COPY constraints.txt wheels/*.whl /build/\n"
        "# hadolint ignore=DL3013\n"
        "RUN python3 -m venv /opt/venv \\\n"
        "    && wheel=$(ls /build/distributed_trainer-*.whl) \\\n"
        "    && /opt/venv/bin/pip install --no-cache-dir --constraint /build/constraints.txt \\\n"
        '        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} \\\n'
        f'        "${{wheel}}[{",".join(extras)}]"{further} \\\n'
        "    && rm -r /build\n"
        "ENV PATH=/opt/venv/bin:$PATH PYTHONUNBUFFERED=1"
    )


def _built(settings: DockerSettings) -> Iterator[str]:
    if settings.build_script is not None:
        yield (
            "COPY build_script.py /build/\n"
            "# hadolint ignore=DL3013\n"
            "RUN python /build/build_script.py && rm -rf /build /root/.cache"
        )


def _ssh(job: Job) -> Iterator[str]:
    """A server that an MPIJob's workers run as their own user, with the keys that its operator mounts."""
    if job.spec.deploy_form != "mpi":
        return
    lines = [
        "Port 2222",
        "HostKey /work/.ssh/id_rsa",
        "AuthorizedKeysFile /work/.ssh/authorized_keys",
        "PidFile none",
        "StrictModes no",
        "UsePAM no",
    ]
    client = ["Port 2222", "StrictHostKeyChecking no", "UserKnownHostsFile /dev/null"]
    yield (
        f"RUN printf '%s\\n' {' '.join(map(quote, lines))} > /etc/ssh/sshd_config_job \\\n"
        f"    && printf '%s\\n' {' '.join(map(quote, client))} > /etc/ssh/ssh_config.d/job.conf"
    )


def _user(settings: DockerSettings) -> str:
    user = settings.user
    return (
        "# Bases differ in who has this number already.\n"
        f'RUN if id -nu {user}; then userdel --remove "$(id -nu {user})"; fi \\\n'
        f"    && useradd --uid {user} --user-group --home-dir /work --create-home trainer\n"
        f"USER {user}:{user}\n"
        "WORKDIR /work\n"
        "# A run reports a hang itself, with the rank; a check from outside cannot.\n"
        "HEALTHCHECK NONE\n"
        'CMD ["python", "-m", "distributed.cli", "doctor"]'
    )


def _constraints(settings: DockerSettings) -> str:
    if settings.constraints is not None:
        return _read(settings.constraints, "--constraints")
    pins = sorted(_installed(_OURS, set()))
    return "".join(f"{pin}\n" for pin in pins)


def _installed(name: str, seen: set[str]) -> Iterator[str]:
    """``name==version`` of what the distribution `name` depends on, as far as it is installed."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return
    for requirement in found.requires or ():
        match = re.match(r"[A-Za-z0-9._-]+", requirement)
        other = re.sub(r"[-_.]+", "-", match[0]).lower() if match else _OURS
        if other in seen or other == _OURS:
            continue
        seen.add(other)
        try:
            # A local version (torch's +cpu) is no version that an index has.
            yield f"{other}=={distribution(other).version.partition('+')[0]}"
        except PackageNotFoundError:
            continue
        yield from _installed(other, seen)


def _read(path: str, field: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the file: {error}", field=field, got=path) from None


def _notes(job: Job, settings: DockerSettings, output: PurePath, tag: str) -> Iterator[str]:
    wheels = quote(str(output / "wheels"))
    yield (
        f"the wheel of {_OURS} {__version__} must be in {wheels}: in a checkout,"
        f" python -m build --wheel --outdir {wheels}"
    )
    yield f'try it: docker run --rm --shm-size 1g --volume "$PWD":/work {quote(tag)}'
    hint = job.spec.install_hint
    if _OURS not in hint and hint and not (settings.package or settings.build_script):
        yield f"backend '{job.spec.name}' is installed by: {hint}; see --package and --build-script"
