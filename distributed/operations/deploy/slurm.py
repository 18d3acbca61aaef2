"""``deploy slurm``: a batch script that trains, saves before the time limit, and requeues itself."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from distributed.config.load import value_of
from distributed.config.sections import local_path
from distributed.operations.deploy.checks import check_line, parse_bytes, parse_slurm_time
from distributed.operations.deploy.files import Rendered
from distributed.operations.deploy.job import Job, form_of, restartable, run_yaml
from distributed.operations.deploy.settings import RunSettings
from distributed.operations.deploy.slurm_steps import TRAPS, StepForm, cpus_per_node, ray_step, torchrun_step
from distributed.operations.deploy.text_formats import quote

_FORMS: dict[str, StepForm] = {
    "torchrun": torchrun_step,
    "mpi": torchrun_step,  # its ranks join torchrun's as well, and no MPI has to match Slurm's
    "ray": ray_step,
}

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,@+-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
# Features and the signs that join them; no blank, since a line of #SBATCH is split at blanks.
_CONSTRAINT = re.compile(r"[A-Za-z0-9_.,:&|*()\[\]=-]+")
_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_OWN_OPTIONS = re.compile(
    r"(job-name|nodes|ntasks.*|gpus.*|gres|cpus-per-task|mem|time|signal|requeue|no-requeue|open-mode|output"
    r"|array|partition|account|qos|constraint|chdir|wrap|wait|no-kill)(=|$)"
)
_EARLY = 60
"""Seconds by which Slurm may send a signal before it was asked to."""


class SlurmSettings(RunSettings):
    """Settings of a Slurm job."""

    partition: str | None = Field(None, description="Partition, or several, separated by commas.")
    account: str | None = Field(None, description="Account to charge.")
    qos: str | None = Field(None, description="Quality of service.")
    constraint: str | None = Field(None, description="Features that the nodes must have.")
    time: str | None = Field(None, description="Time limit: minutes, H:M:S or DAYS-H:M:S.")
    cpus_per_task: PositiveInt | None = Field(
        None, description="CPUs per node. None: one per rank without GPUs, else the cluster's default."
    )
    mem: str | None = Field(None, description="Memory per node, such as 64G; 0 is all memory of the node.")
    gpu_request: Literal["gpus-per-node", "gres"] = Field(
        "gpus-per-node", description="Option that requests GPUs; older clusters require gres."
    )
    gpu_type: str | None = Field(None, description="GPU type, as named by the cluster.")
    warning: PositiveInt = Field(
        120, description="Seconds before the time limit at which the run saves and requeues."
    )
    requeue: bool = Field(True, description="Requeue and resume after the time limit or preemption.")
    max_requeues: NonNegativeInt = Field(100, description="Maximum number of requeues.")
    setup: tuple[str, ...] = Field(
        (), description="Line of bash to run first, such as 'module load cuda' or 'source venv/bin/activate'."
    )
    option: tuple[str, ...] = Field((), description="Further option of sbatch, such as reservation=NAME.")

    def secret_remedy(self) -> str:
        """Remedy for a secret in a file."""
        return "Export it in the shell that calls sbatch, which hands its environment on"

    @model_validator(mode="after")
    def _slurm_takes_them(self) -> Self:
        _fits(
            _NAME, "name", self.name, "letters, digits, '.', '_' and '-', at most 63, a letter or digit first"
        )
        for field in ("partition", "account", "qos", "gpu_type"):
            _fits(_WORD, field, getattr(self, field), "letters, digits and . , _ @ + -")
        _fits(_CONSTRAINT, "constraint", self.constraint, "features joined by & | , without blanks")
        if self.time is not None and parse_slurm_time(self.time) <= self.warning + _EARLY:
            raise ValueError(
                f"time={self.time} leaves no time to train: the run is signalled to save"
                f" warning={self.warning} seconds before its end, and Slurm may signal {_EARLY} seconds early"
            )
        if self.mem not in (None, "0"):
            parse_bytes(str(self.mem), _UNITS)
        for line in self.setup:
            check_line(line, "setup", self.secret_remedy())
            if "\r" in line:
                raise ValueError("setup holds a carriage return, and sbatch refuses such scripts")
        for option in self.option:
            _check_option(option)
        return self


def _fits(pattern: re.Pattern[str], field: str, text: str | None, allowed: str) -> None:
    if text is not None and not pattern.fullmatch(text):
        raise ValueError(f"{field}={text!r} is not accepted by Slurm. Allowed: {allowed}")


def _check_option(option: str) -> None:
    if not re.fullmatch(r"[a-z][a-z-]*(=[^\s#\"'\\]+)?", option):
        raise ValueError(
            f"option={option!r} is not an option of sbatch: give NAME or NAME=VALUE without dashes, blanks"
        )
    if _OWN_OPTIONS.match(option):
        raise ValueError(f"option={option!r} is set by the template; it has a flag of its own, or must stay")


def render(job: Job, settings: SlurmSettings, output: PurePath) -> Rendered:
    """The batch script and the run's configuration.

    Args:
        output: output directory, relative to the folder in which sbatch is called, or absolute.

    Raises:
        UserError: a requeued run would start over; a backend that Slurm cannot start.
    """
    form = form_of(job, _FORMS, "Slurm")
    resume = restartable(job, settings.requeue, "--no-requeue")
    config = output / "run.yaml"
    paths = str(config), job.script_name or None
    parts = [
        *_header(job, settings),
        *_opening(job, settings, config),
        *form(job, settings.python, settings.cpus_per_task, job.train_words(*paths, resume)),
        *_ending(settings),
    ]
    script = output / f"{settings.name}.sbatch"
    return Rendered(
        files={script.name: "\n".join(parts) + "\n", config.name: run_yaml(job)},
        submit=f"sbatch {quote(str(script))}",
        notes=[*job.notes, *_notes(job)],
    )


def _header(job: Job, settings: SlurmSettings) -> list[str]:
    options = {
        "job-name": settings.name,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        **_gpus(job, settings),
        "cpus-per-task": cpus_per_node(job, settings.cpus_per_task),
        "mem": settings.mem,
        "time": settings.time,
        "signal": f"B:USR1@{settings.warning}",
        "open-mode": "append",
        "output": "%x-%j.out",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines.append("#SBATCH --requeue" if settings.requeue else "#SBATCH --no-requeue")
    lines += ["#SBATCH --no-kill"] if job.min_nodes is not None else []
    return ["#!/bin/bash", *lines, *(f"#SBATCH --{option}" for option in settings.option)]


def _gpus(job: Job, settings: SlurmSettings) -> dict[str, str]:
    if not job.uses_gpus:
        return {}
    number = f"{settings.gpu_type}:{job.gpus_per_node}" if settings.gpu_type else str(job.gpus_per_node)
    by_gres = settings.gpu_request == "gres"
    return {"gres": f"gpu:{number}"} if by_gres else {"gpus-per-node": number}


def _opening(job: Job, settings: SlurmSettings, config: PurePath) -> list[str]:
    python, path = quote(settings.python), quote(str(config))
    return [
        "#",
        f"# {job.num_nodes} node(s), {job.ranks_per_node} rank(s) on each, one task of Slurm a node.",
        "# Relative paths count from the folder in which sbatch is called.",
        "",
        "# Setup lines may source what is not here; words in single quotes are meant as they are.",
        "# shellcheck disable=SC1090,SC1091,SC2016",
        "step=",
        *TRAPS,
        *(["", *settings.setup] if settings.setup else []),
        "",
        "set -u",
        "export PYTHONUNBUFFERED=1",
        *_threads(job, settings),
        *(f"export {name}={quote(value)}" for name, value in settings.env.items()),
        "",
        f"if [ ! -f {path} ]; then",
        f"    echo {quote(str(config))} 'is not there: call sbatch where the job was rendered' >&2",
        "    exit 2",
        "fi",
        f"if ! {python} -m distributed.cli --version; then",
        f"    echo {python} 'has no distributed-trainer here: see --setup and --python' >&2",
        "    exit 2",
        "fi",
        "",
        'meet=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
        "# One port a job, below the range that the system deals out.",
        "port=$((20000 + SLURM_JOB_ID % 10000))",
        "restarts=${SLURM_RESTART_COUNT:-0}",
        "",
    ]


def _threads(job: Job, settings: SlurmSettings) -> list[str]:
    if settings.cpus_per_task is None or "OMP_NUM_THREADS" in settings.env:
        return []
    return [f"export OMP_NUM_THREADS={max(1, settings.cpus_per_task // job.ranks_per_node)}"]


def _ending(settings: SlurmSettings) -> list[str]:
    if not settings.requeue:
        return ["", 'exit "$code"']
    return [
        "",
        "# 75: preempted after saving. Any other code is final; so is 75 after scancel.",
        'state=$(squeue --noheader --job "$SLURM_JOB_ID" --format=%T)',
        'if [ "$code" -eq 75 ] && [ "$state" = RUNNING ]; then',
        f'    if [ "$restarts" -lt {settings.max_requeues} ]; then',
        '        scontrol requeue "$SLURM_JOB_ID"',
        "    else",
        f"        echo 'requeued {settings.max_requeues} times already (--max-requeues): run sbatch"
        " again to resume' >&2",
        "    fi",
        "fi",
        'exit "$code"',
    ]


def _notes(job: Job) -> list[str]:
    found = []
    address = job.spec.cluster_address
    if address is not None and value_of(job.config, address) is not None:
        found.append(f"{address} is left out: the job starts a Ray cluster of its own")
    directory = local_path(job.config.checkpoint_dir)
    local = ("/tmp", "/var/tmp", "/dev/shm", "/run")
    if directory is not None and any(PurePath(directory).is_relative_to(place) for place in local):
        found.append(
            f"checkpoint_dir {directory} is a node's own folder on most clusters: other nodes, and a requeued"
            " job, would not find it"
        )
    return found
