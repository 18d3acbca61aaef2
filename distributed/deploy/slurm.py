"""``deploy slurm``: a batch script that trains, saves before the time limit, and requeues itself."""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from distributed.deploy.checks import check_text, parse_bytes, parse_slurm_time
from distributed.deploy.files import Rendered
from distributed.deploy.job import Job, restartable, run_yaml, torchrun_flags
from distributed.deploy.settings import Settings
from distributed.deploy.shell import quote
from distributed.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SlurmSettings", "render"]

_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.,@+-]*")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
# Features and the signs that join them; no blank, since a line of #SBATCH is split at blanks.
_CONSTRAINT = re.compile(r"[A-Za-z0-9_.,:&|*()\[\]=-]+")
_UNITS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_OWN_OPTIONS = re.compile(
    r"--(job-name|nodes|ntasks.*|gpus.*|gres|cpus-per-task|mem|time|signal|requeue|no-requeue|open-mode|output"
    r"|array|partition|account|qos|constraint|chdir|wrap|wait|no-kill)(=|$)"
)
_EARLY = 60
"""Seconds by which Slurm may send a signal before it was asked to."""


class SlurmSettings(Settings):
    """What Slurm asks about a job."""

    partition: str | None = Field(None, description="Partition, or several joined by commas.")
    account: str | None = Field(None, description="Account that is charged.")
    qos: str | None = Field(None, description="Quality of service.")
    constraint: str | None = Field(None, description="Features that the nodes must have.")
    time: str | None = Field(None, description="Time limit: minutes, H:M:S or DAYS-H:M:S.")
    cpus_per_task: PositiveInt | None = Field(
        None, description="CPUs on each node. None: one a rank without GPUs, else what the cluster gives."
    )
    mem: str | None = Field(None, description="Memory on each node, such as 64G; 0 is all of it.")
    gpu_request: Literal["gpus-per-node", "gres"] = Field(
        "gpus-per-node", description="How GPUs are asked for; older clusters want gres."
    )
    gpu_type: str | None = Field(None, description="Kind of GPU, as the cluster calls it.")
    warning: PositiveInt = Field(
        120, description="Seconds before the time limit at which the run saves and requeues."
    )
    requeue: bool = Field(True, description="Go on after the time limit or preemption.")
    max_requeues: NonNegativeInt = Field(100, description="How often, at most.")
    setup: tuple[str, ...] = Field(
        (), description="Line of bash to run first, such as 'module load cuda' or 'source venv/bin/activate'."
    )
    option: tuple[str, ...] = Field((), description="Further option of sbatch, such as --reservation=NAME.")

    def secret_remedy(self) -> str:
        """What to do instead of writing a secret into a file."""
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
                f"time={self.time} leaves nothing to train in: the run is told to save warning={self.warning}"
                f" seconds before its end, and Slurm may say so {_EARLY} seconds early"
            )
        if self.mem not in (None, "0"):
            parse_bytes(str(self.mem), _UNITS)
        for line in self.setup:
            check_text(line, "setup")
            if "\r" in line:
                raise ValueError("setup holds a carriage return, and sbatch refuses such scripts")
        for option in self.option:
            _check_option(option)
        return self


def _fits(pattern: re.Pattern[str], field: str, text: str | None, allowed: str) -> None:
    if text is not None and not pattern.fullmatch(text):
        raise ValueError(f"{field}={text!r} is nothing that Slurm takes: {allowed}")


def _check_option(option: str) -> None:
    if not re.fullmatch(r"--[a-z][a-z-]*(=[^\s#\"'\\]+)?", option):
        raise ValueError(f"option={option!r} is no option of sbatch: --NAME or --NAME=VALUE, without blanks")
    if _OWN_OPTIONS.match(option):
        raise ValueError(f"option={option!r} is set by the template; it has a flag of its own, or must stay")


def render(job: Job, settings: SlurmSettings, output: PurePath) -> Rendered:
    """The batch script and the run's configuration.

    Args:
        job: what is to run.
        settings: how Slurm is asked.
        output: where the files go, relative to where sbatch will be called, or absolute.

    Raises:
        UserError: a requeued run would begin anew; a backend that Slurm cannot start.
    """
    forms: dict[str, Callable[[Job, SlurmSettings, PurePath, bool], list[str]]] = {
        "torchrun": _torchrun_step,
        "mpi": _torchrun_step,  # its ranks join torchrun's as well, and no MPI has to match Slurm's
    }
    form = forms.get(job.spec.deploy_form)
    if form is None:
        raise UserError(
            f"backend '{job.spec.name}' is deployed as '{job.spec.deploy_form}', and Slurm has no such form",
            field="backend",
            got=job.spec.name,
            allowed=f"backends of the forms {', '.join(forms)}",
        )
    resume = restartable(job, settings.requeue, "--no-requeue")
    config = output / "run.yaml"
    parts = [
        *_header(job, settings),
        *_opening(job, settings, config),
        *form(job, settings, config, resume),
        *_ending(settings),
    ]
    script = output / f"{settings.name}.sbatch"
    drop = ("node_rank", "rdzv_endpoint", "launch", "elastic", *_counted(job))
    return Rendered(
        files={script.name: "\n".join(parts) + "\n", config.name: run_yaml(job, drop)},
        submit=f"sbatch {quote(str(script))}",
        notes=[*job.notes, *_notes(job)],
    )


def _counted(job: Job) -> tuple[str, ...]:
    """Fields that count ranks: wrong as soon as a host is missing."""
    counts = ("num_nodes", "gpus_per_node", "num_gpus", "num_processes")
    return counts if job.min_nodes is not None else ()


def _header(job: Job, settings: SlurmSettings) -> list[str]:
    cpus = settings.cpus_per_task or (None if job.uses_gpus else job.ranks_per_node)
    options = {
        "job-name": settings.name,
        "partition": settings.partition,
        "account": settings.account,
        "qos": settings.qos,
        "constraint": settings.constraint,
        "nodes": job.num_nodes,
        "ntasks-per-node": 1,
        **_gpus(job, settings),
        "cpus-per-task": cpus,
        "mem": settings.mem,
        "time": settings.time,
        "signal": f"B:USR1@{settings.warning}",
        "open-mode": "append",
        "output": "%x-%j.out",
    }
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None]
    lines.append("#SBATCH --requeue" if settings.requeue else "#SBATCH --no-requeue")
    lines += ["#SBATCH --no-kill"] if job.min_nodes is not None else []
    return ["#!/bin/bash", *lines, *(f"#SBATCH {option}" for option in settings.option)]


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
        *_TRAPS,
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


def _torchrun_step(job: Job, settings: SlurmSettings, config: PurePath, resume: bool) -> list[str]:
    """One torchrun on each node; together they start the ranks."""
    elastic = job.min_nodes is not None
    cpus = settings.cpus_per_task or (None if job.uses_gpus else job.ranks_per_node)
    script = job.script_name if job.script is not None else None
    cpu = f"--cpus-per-task={cpus}" if cpus else "--cpu-bind=none"
    # Nodes that come and go end at different times.
    ends = "--no-kill --kill-on-bad-exit=0 --wait=0" if elastic else "--kill-on-bad-exit=0 --wait=60"
    lines = [
        f'srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 {cpu} {ends}',
        " ".join(
            [f"{quote(settings.python)} -m distributed.torchrun", *torchrun_flags(job, '"$SLURM_NNODES"')]
        ),
        '--rdzv-backend=c10d --rdzv-endpoint="$meet:$port" --rdzv-id="$SLURM_JOB_ID-$restarts"',
        " ".join(["-m", *map(quote, job.train_words(str(config), script, resume))]),
    ]
    return [*_elastic_comment(job), *_start(" \\\n    ".join(lines))]


def _elastic_comment(job: Job) -> list[str]:
    config = job.config
    if not config.is_elastic:
        return []
    lines = [
        f"# A rank that fails makes torchrun start all anew from the newest checkpoint, {config.max_restarts}"
    ]
    lines.append("# times at most (elastic.max_restarts).")
    if job.min_nodes is not None:
        lines += [
            f"# The run goes on while {job.min_nodes} of {job.num_nodes} nodes are left (elastic.min_nodes),",
            "# the first node among them: the others meet there. Without it the job ends.",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ]
    return lines


_TRAPS = [
    "warned=0",
    "# Slurm warns this shell alone; scancel passes it on to every process of every step, and not back here.",
    'trap \'warned=1; [ -z "$step" ] || scancel --signal=USR1 "$SLURM_JOB_ID"\' USR1',
    "# Ranks hear of SIGTERM themselves: wait for them to save.",
    "trap : TERM",
]


def _start(step: str) -> list[str]:
    """Run `step`, and leave its exit code in ``code``."""
    return [
        "code=75  # warned already: there is no time left to start in",
        'if [ "$warned" -eq 0 ]; then',
        *(f"    {line}" for line in f"{step} &".splitlines()),
        *(f"    {line}" for line in _WAIT),
        "fi",
    ]


_WAIT = [
    "step=$!",
    "# wait returns early when a signal was trapped; the step has ended when it is no process any more.",
    'while kill -0 "$step" 2>/dev/null; do',
    '    wait "$step"',
    "done",
    'wait "$step"',
    "code=$?",
    "# Warned before Python could listen, a step dies of it: as good as saved, for it had done nothing yet.",
    'if [ "$warned" -eq 1 ] && [ "$code" -eq 138 ]; then code=75; fi',
]


def _ending(settings: SlurmSettings) -> list[str]:
    if not settings.requeue:
        return ["", 'exit "$code"']
    return [
        "",
        "# 75: told to go, and saved. Anything else is an end, good or bad; so is 75 after scancel.",
        'state=$(squeue --noheader --job "$SLURM_JOB_ID" --format=%T)',
        'if [ "$code" -eq 75 ] && [ "$state" = RUNNING ]; then',
        f'    if [ "$restarts" -lt {settings.max_requeues} ]; then',
        '        scontrol requeue "$SLURM_JOB_ID"',
        "    else",
        f"        echo 'requeued {settings.max_requeues} times already (--max-requeues): sbatch goes on' >&2",
        "    fi",
        "fi",
        'exit "$code"',
    ]


def _notes(job: Job) -> list[str]:
    found = []
    directory = job.config.checkpoint_dir
    local = ("/tmp", "/var/tmp", "/dev/shm", "/run")
    if directory is not None and any(PurePath(directory).is_relative_to(place) for place in local):
        found.append(
            f"checkpoint_dir {directory} is a node's own folder on most clusters: other nodes, and a requeued"
            " job, would not find it"
        )
    return found
