"""Job steps of a batch script, which start each backend's ranks in a Slurm allocation."""

from __future__ import annotations

from collections.abc import Callable

from distributed.operations.deploy.job import Job, torchrun_flags
from distributed.operations.deploy.text_formats import quote

StepForm = Callable[[Job, str, int | None, list[str]], list[str]]
"""``(job, python, CPUs on each node, words of the train command) ->`` lines that leave ``code``."""


def cpus_per_node(job: Job, asked: int | None) -> int | None:
    """CPUs on each node; None leaves it to the cluster, which knows how many go with a GPU."""
    return asked or (None if job.uses_gpus else job.ranks_per_node)


def torchrun_step(job: Job, python: str, cpus: int | None, train: list[str]) -> list[str]:
    """One torchrun on each node; together they start the ranks."""
    elastic = job.min_nodes is not None
    # The nodes of an elastic run end at different times.
    ends = "--no-kill --kill-on-bad-exit=0 --wait=0" if elastic else "--kill-on-bad-exit=0 --wait=60"
    lines = [
        f'srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 {_cpus(job, cpus)} {ends}',
        " ".join([f"{quote(python)} -m distributed.torchrun", *torchrun_flags(job, '"$SLURM_NNODES"')]),
        '--rdzv-backend=c10d --rdzv-endpoint="$meet:$port" --rdzv-id="$SLURM_JOB_ID-$restarts"',
        " ".join(["-m", *map(quote, train)]),
    ]
    return [*_elastic_comment(job), *_start(" \\\n    ".join(lines))]


def _elastic_comment(job: Job) -> list[str]:
    config = job.config
    if not config.is_elastic:
        return []
    lines = [
        f"# When a rank fails, torchrun restarts all ranks from the newest checkpoint, {config.max_restarts}"
    ]
    lines.append("# times at most (elastic.max_restarts).")
    if job.min_nodes is not None:
        lines += [
            f"# The run continues while {job.min_nodes} of {job.num_nodes} nodes remain (elastic.min_nodes),",
            "# the first node among them: the others meet there. Without it the job ends.",
            "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ]
    return lines


def ray_step(job: Job, python: str, cpus: int | None, train: list[str]) -> list[str]:
    """A Ray cluster over the allocation, and the driver as a step of its own on the first node."""
    nodes, words = f"{quote(python)} -m distributed_backends.ray.allocation", " ".join(map(quote, train))
    num_cpus = cpus_per_node(job, cpus) or job.ranks_per_node
    size = [f"--num-gpus={job.gpus_per_node}", f"--num-cpus={num_cpus}"]
    driver = [
        f'srun --overlap --nodes=1 --ntasks=1 --nodelist="$meet" {_cpus(job, cpus)}',
        f'{nodes} run --meet="$meet" --port="$port" --num-nodes="$SLURM_NNODES" --',
        f"{quote(python)} -m {words}",
    ]
    return [
        "# The token grants access to the cluster: only this user can read it, and the job removes it.",
        "export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0",
        'export RAY_AUTH_TOKEN_PATH="$PWD/.ray-token-$SLURM_JOB_ID-$restarts"',
        "trap 'rm -f \"$RAY_AUTH_TOKEN_PATH\"' EXIT",
        f"(umask 077 && {quote(python)} -c 'import secrets; print(secrets.token_hex(32), end=\"\")'"
        ' > "$RAY_AUTH_TOKEN_PATH")',
        f'srun --overlap --ntasks="$SLURM_NNODES" --ntasks-per-node=1 {_cpus(job, cpus)} --wait=0 \\',
        f'    {nodes} start --meet="$meet" --port="$port" {" ".join(size)} &',
        "cluster=$!",
        *_start(" \\\n    ".join(driver)),
        'kill "$cluster"',
        'wait "$cluster"',
    ]


def _cpus(job: Job, asked: int | None) -> str:
    # Since Slurm 22.05 a step no longer inherits the job's number, and would be bound to one CPU.
    cpus = cpus_per_node(job, asked)
    return f"--cpus-per-task={cpus}" if cpus else "--cpu-bind=none"


TRAPS = [
    "warned=0",
    "# Slurm warns this shell alone; scancel passes it on to every process of every step, and not back here.",
    'trap \'warned=1; [ -z "$step" ] || scancel --signal=USR1 "$SLURM_JOB_ID"\' USR1',
    "# Ranks receive SIGTERM themselves: wait for them to save.",
    "trap : TERM",
]


def _start(step: str) -> list[str]:
    """Run `step`, and leave its exit code in ``code``."""
    return [
        "code=75  # warned already: there is no time left to start in",
        'if [ "$warned" -eq 0 ]; then',
        *(f"    {line}" for line in f"{step} &".split("\n")),
        *(f"    {line}" for line in _WAIT),
        "fi",
    ]


_WAIT = [
    "step=$!",
    "# The trap tells a step that it knows of, and no other.",
    'if [ "$warned" -eq 1 ]; then scancel --signal=USR1 "$SLURM_JOB_ID"; fi',
    "# wait returns early when a signal was trapped; the step has ended when its process is gone.",
    'while kill -0 "$step" 2>/dev/null; do',
    '    wait "$step"',
    "done",
    'wait "$step"',
    "code=$?",
    "# A signal before Python's handler is set kills the step: as good as saved, it had not trained yet.",
    'if [ "$warned" -eq 1 ] && [ "$code" -eq 138 ]; then code=75; fi',
]
