"""``deploy ray``: a Ray cluster on hosts reached by ssh, if one is wanted, and the job for it."""

from __future__ import annotations

import re
from pathlib import PurePath, PurePosixPath
from typing import Any, Self

from pydantic import Field, model_validator

from distributed.config.sections import local_path
from distributed.errors import UserError
from distributed.operations.deploy.checks import check_line, check_text
from distributed.operations.deploy.files import Rendered
from distributed.operations.deploy.job import Job, form_of, restartable, run_yaml
from distributed.operations.deploy.kubernetes.names import check_label
from distributed.operations.deploy.settings import RunSettings
from distributed.operations.deploy.text_formats import dump, quote

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|[0-9a-fA-F:]+")
_URL = re.compile(r"https?://[A-Za-z0-9.:\[\]-]+(/[A-Za-z0-9._~/-]*)?")
_DASHBOARD = 8265
_TOKEN = "~/.ray/auth_token"
_PATIENCE = 1800
"""Seconds that a job waits for the hosts of a new cluster, each of which runs the setup lines first."""


class RaySettings(RunSettings):
    """Settings of a job on a Ray cluster."""

    dashboard: str | None = Field(
        None, description="Dashboard of an existing cluster, such as http://head:8265. Not used with --host."
    )
    host: tuple[str, ...] = Field(
        (),
        description="Host of a new cluster, with ssh access; the first is the head. Ranks run on all hosts.",
    )
    ssh_user: str | None = Field(None, description="User for ssh.")
    ssh_key: str | None = Field(None, description="Private key file for ssh. None: ssh's default.")
    setup: tuple[str, ...] = Field((), description="Shell command to run on each host, such as pip install.")

    def secret_remedy(self) -> str:
        """Remedy for a secret in a file."""
        return "Set it where the nodes start, or in the cluster's own environment"

    @model_validator(mode="after")
    def _ray_takes_them(self) -> Self:
        check_label(self.name, "name")
        if (self.dashboard is None) == (not self.host):
            raise ValueError(
                "set exactly one of dashboard (of a running cluster) and host (for each host of a new one)"
            )
        if self.dashboard is not None and not _URL.fullmatch(self.dashboard):
            raise ValueError(
                f"dashboard={self.dashboard!r} is not an address: give one such as http://head:8265"
            )
        for host in self.host:
            if not _HOST.fullmatch(host):
                raise ValueError(f"host={host!r} is not a host name or address")
        if len(set(self.host)) != len(self.host):
            raise ValueError("a host is listed twice")
        if self.host and self.ssh_user is None:
            raise ValueError("ssh_user is missing: set the user who logs in on the hosts")
        for name, value in self.env.items():
            if re.search(r"\$\{[A-Z0-9_]+\}", value):
                raise ValueError(
                    f"Ray replaces ${{...}} in variables, so {name} would arrive as something else"
                )
        for line in self.setup:
            check_line(line, "setup", self.secret_remedy())
        for text in (self.ssh_user or "", self.ssh_key or ""):
            check_text(text, "ssh_user or ssh_key")
        return self


def render(job: Job, settings: RaySettings, output: PurePath) -> Rendered:
    """The job, the cluster if it is a new one, and one script that submits.

    Args:
        output: output directory; its folder ``job`` is uploaded to the cluster.

    Raises:
        UserError: another backend; checkpoints that would be lost with the job's folder.
    """
    form_of(job, {"ray": None}, "Ray")
    directory = local_path(job.config.checkpoint_dir)
    if directory is not None and not PurePosixPath(directory).is_absolute():
        raise UserError(
            "the job's own folder is deleted with it, and so would be the checkpoints in it",
            field="checkpoint_dir",
            got=directory,
            allowed="a path from the root on a file system that all nodes share, or an object store's URL",
        )
    if settings.host and job.num_nodes > len(settings.host):
        raise UserError(
            f"{job.num_nodes} nodes are requested; the cluster has {len(settings.host)} hosts",
            field="num_nodes",
            got=job.num_nodes,
            allowed=f"at most {len(settings.host)}",
        )
    resume = restartable(job, False, "")
    text = job.script_text()
    words = job.train_words("run.yaml", None if text is None else "train.py", resume)
    files = {
        "job/run.yaml": run_yaml(job),
        "job/start.sh": _start(job, settings, words),
        "runtime_env.yaml": dump([{"env_vars": settings.env}]) if settings.env else "{}\n",
        "submit.sh": _submit(settings),
    }
    if text is not None:
        files["job/train.py"] = text
    if settings.host:
        files["cluster.yaml"] = dump([_cluster(settings)])
    return Rendered(
        files=files,
        submit=f"bash {quote(str(output / 'submit.sh'))}",
        notes=[*job.notes, *_notes(job, settings)],
        executable=frozenset({"submit.sh"}),
    )


def _cluster(settings: RaySettings) -> dict[str, Any]:
    head, *workers = settings.host
    start = f"{quote(settings.python)} -m ray.scripts.scripts"
    mode = "RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0"
    join = f"{mode} {start} start --address=$RAY_HEAD_IP:6379"
    lead = (
        f"{mode} {start} start --head --port=6379 --dashboard-host=0.0.0.0"
        " --autoscaling-config=~/ray_bootstrap_config.yaml"
    )
    key = {"ssh_private_key": settings.ssh_key} if settings.ssh_key is not None else {}
    return {
        "cluster_name": settings.name,
        "provider": {"type": "local", "head_ip": head, "worker_ips": workers},
        "auth": {"ssh_user": settings.ssh_user, **key},
        # Every node and every client presents it; it grants access to the cluster.
        "file_mounts": {_TOKEN: _TOKEN},
        "setup_commands": list(settings.setup),
        "head_start_ray_commands": [f"{start} stop", lead],
        "worker_start_ray_commands": [f"{start} stop", join],
    }


def _start(job: Job, settings: RaySettings, words: list[str]) -> str:
    python = quote(settings.python)
    train = f"{python} -m {' '.join(map(quote, words))}"
    if not settings.host:
        return f"#!/bin/bash\nexec {train}\n"
    # A run without num_nodes has its ranks on all hosts.
    number = job.num_nodes if job.num_nodes > 1 else len(settings.host)
    wait = f"{python} -m distributed_backends.ray.allocation run --num-nodes {number} --patience {_PATIENCE}"
    return (
        "#!/bin/bash\n"
        "# The head takes jobs before the other hosts have joined it.\n"
        f"exec {wait} -- \\\n"
        f"    {train}\n"
    )


def _submit(settings: RaySettings) -> str:
    address = settings.dashboard or f"http://{_in_url(settings.host[0])}:{_DASHBOARD}"
    lines = [
        "#!/bin/bash",
        "set -eu",
        'cd "$(dirname "${BASH_SOURCE[0]}")"',
        "export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0",
    ]
    if settings.host:
        lines += [
            "# The cluster's token; Ray copies it to the hosts.",
            f"if [ ! -f {_TOKEN} ]; then ray get-auth-token --generate >/dev/null; fi",
            "ray up --yes cluster.yaml",
        ]
    lines.append(
        f"exec ray job submit --address {quote(address)} --runtime-env runtime_env.yaml \\\n"
        "    --working-dir job -- bash start.sh"
    )
    return "\n".join(lines) + "\n"


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _notes(job: Job, settings: RaySettings) -> list[str]:
    found = ["only the script is copied; modules beside it must be on the nodes"] if job.script else []
    if settings.dashboard is not None:
        found.append(
            "the cluster's token must be in ~/.ray/auth_token, or in the file of RAY_AUTH_TOKEN_PATH"
        )
    if job.config.checkpoint_dir is not None and job.config.resume_from_checkpoint is False:
        found.append("a second submission starts over; with --resume it resumes from the newest checkpoint")
    return found
