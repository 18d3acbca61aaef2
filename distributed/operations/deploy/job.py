"""A job, independent of the target: nodes, ranks, configuration and command."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from distributed.config import DistributedConfig, Layer, load_layers
from distributed.config.load import as_layers, native_names, nested
from distributed.errors import UserError
from distributed.interfaces.backend_spec import BackendSpec
from distributed.interfaces.placement import LauncherEnvironment
from distributed.interfaces.plan import Facts, Resources, RunPlan
from distributed.operations.deploy.checks import check_text
from distributed.operations.deploy.text_formats import dump
from distributed.planner.backend_choice import move_to_zero
from distributed.planner.resolve import resolve
from distributed.redaction import holds_secret
from distributed.registry.catalog import Catalog

_Form = TypeVar("_Form")

# Set by the launcher of the ranks: Slurm, Kubernetes, torchrun.
_PLACE = ("num_nodes", "gpus_per_node", "num_gpus", "num_processes", "node_rank", "rdzv_endpoint", "launch")


@dataclass(frozen=True)
class Job:
    """A run that a cluster is to start.

    Attributes:
        script: the user's script, None for the bundled example.
        script_name: path of the script as typed.
        num_nodes: number of hosts; the maximum when the run is elastic.
        ranks_per_node: processes that train, on each host.
        uses_gpus: each rank has a GPU.
    """

    config: DistributedConfig
    spec: BackendSpec
    script: Path | None
    script_name: str
    arguments: tuple[str, ...]
    num_nodes: int
    ranks_per_node: int
    uses_gpus: bool
    notes: tuple[str, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Ranks over all hosts."""
        return self.num_nodes * self.ranks_per_node

    @property
    def gpus_per_node(self) -> int:
        """GPUs to ask for on each host."""
        return self.ranks_per_node if self.uses_gpus else 0

    @property
    def min_nodes(self) -> int | None:
        """Fewest hosts that can continue; None: all."""
        return self.config.elastic.min_nodes

    def script_text(self) -> str | None:
        """Text of the script, None without one.

        Raises:
            UserError: it cannot be read as UTF-8, which is all that the files can hold.
        """
        if self.script is None:
            return None
        try:
            return self.script.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot be read as text: {error}", field="--script", got=self.script_name
            ) from None

    def train_words(self, config: str, script: str | None, resume: bool) -> list[str]:
        """The command line of ``train`` after ``python -m``, unquoted.

        Args:
            config: path of the file that `run_yaml` gives, where the job runs.
            script: path of the script there, None for the bundled example.
            resume: resume from the newest checkpoint, if there is one.
        """
        words = ["distributed.cli", "train", "--config", config]
        words += ["--script", script] if script is not None else []
        words += ["--resume"] if resume else []
        return [*words, *(["--", *self.arguments] if self.arguments else [])]


def make_job(
    layers: Sequence[Layer],
    script: Path | None,
    script_name: str,
    arguments: Iterable[str],
    catalog: Catalog,
    asks_for_ranks: bool = True,
) -> Job:
    """Make the job, and refuse one that could not run.

    Args:
        layers: the configuration's sources, weakest first.
        script: the user's script, None for the bundled example.
        script_name: path of the script as typed.
        catalog: installed backends; their requirements need not be installed here.
        asks_for_ranks: the target has to know how many ranks there are.

    Raises:
        UserError: as the run itself would, and where the number of ranks on a host is not known.
    """
    config = load_layers(layers)
    words = tuple(arguments)
    try:
        for word in words:
            check_text(word, "an argument of the script")
        if holds_secret(words):
            raise ValueError("an argument contains a password, and the files would hold it in plain text")
    except ValueError as error:
        raise UserError(str(error), field="--") from None
    if config.launch in ("spawn", "per-rank"):
        raise UserError(
            "the cluster starts the ranks, and a deployed run joins them",
            field="launch",
            got=config.launch,
            allowed="auto, join",
        )
    num_ranks = config.num_ranks
    if num_ranks is None and asks_for_ranks:
        raise UserError(
            "the number of ranks to request from the cluster is not set",
            field="gpus_per_node",
            remedy="Set --gpus-per-node N (and --num-nodes), or --num-processes N for ranks without GPUs",
        )
    _check_secrets(config)
    config, notes = move_to_zero(config, catalog)
    job = Job(
        config=config,
        spec=catalog.backend(config.backend),
        script=script,
        script_name=script_name,
        arguments=words,
        num_nodes=config.num_nodes,
        ranks_per_node=(num_ranks or config.num_nodes) // config.num_nodes,
        uses_gpus=_uses_gpus(config),
        notes=notes,
    )
    _check_plan(job, catalog)
    return job


def run_yaml(job: Job) -> str:
    """The configuration that the ranks read: explicit values, without those that the cluster sets."""
    return dump([nested(_run_values(job, _dropped(job)))])


def _dropped(job: Job) -> tuple[str, ...]:
    """Fields that the cluster sets, or that are wrong as soon as a host is missing."""
    if job.spec.remote:
        return ("launch", *filter(None, [job.spec.cluster_address]))
    counts = ("num_nodes", "gpus_per_node", "num_gpus", "num_processes")
    return ("node_rank", "rdzv_endpoint", "launch", "elastic", *(counts if job.min_nodes is not None else ()))


def restartable(job: Job, wanted: bool, flag: str) -> bool:
    """Whether a restarted job resumes.

    Args:
        wanted: the cluster restarts it.
        flag: flag that disables restarts.

    Raises:
        UserError: it is wanted, and the run would start over each time.
    """
    config = job.config
    if not wanted:
        return config.resume_from_checkpoint is True
    if config.checkpoint_dir is None:
        raise UserError(
            "a restarted job would start over: there are no checkpoints to resume from",
            field="checkpoint_dir",
            remedy=f"Set it to a directory that all nodes share, or set {flag}",
        )
    if isinstance(config.resume_from_checkpoint, str):
        raise UserError(
            "a restarted job would resume from that checkpoint each time",
            field="resume_from_checkpoint",
            got=config.resume_from_checkpoint,
            allowed="true: the newest in checkpoint_dir",
            remedy=f"Copy the checkpoint into checkpoint_dir, from which the job resumes, or set {flag}",
        )
    return True


def form_of(job: Job, forms: Mapping[str, _Form], target: str) -> _Form:
    """The form of `target` for the way in which the job's backend is deployed.

    Raises:
        UserError: `target` has no such form.
    """
    form = job.spec.deploy_form
    if form not in forms:
        raise UserError(
            f"backend '{job.spec.name}' is deployed as '{form}', which {target} does not support",
            field="backend",
            got=job.spec.name,
            allowed=f"backends deployed as {', '.join(forms)}",
        )
    return forms[form]


def torchrun_flags(job: Job, nodes: str) -> list[str]:
    """Flags of torchrun that the configuration decides, unquoted.

    Args:
        nodes: the cluster's expression for the number of hosts.
    """
    low = f"{job.min_nodes}:" if job.min_nodes is not None else ""
    flags = [f"--nnodes={low}{nodes}", f"--nproc-per-node={job.ranks_per_node}"]
    if job.config.is_elastic:
        flags.append(f"--max-restarts={job.config.max_restarts}")
    if job.min_nodes is not None:
        flags.append(f"--rdzv-conf=last_call_timeout={job.config.elastic.last_call:g}")
    return flags


def _check_secrets(config: DistributedConfig) -> None:
    for layer in as_layers(config):
        for name, value in layer.values.items():
            if holds_secret(value, name):
                raise UserError(
                    "it contains a password, and the files would hold it in plain text",
                    field=name,
                    remedy="Leave it out of the address, and give it to the job as an environment variable",
                )


def _uses_gpus(config: DistributedConfig) -> bool:
    if config.device != "auto":
        return config.device == "cuda"
    return config.num_gpus is not None or config.gpus_per_node is not None or config.num_processes is None


def _run_values(job: Job, drop: Iterable[str]) -> dict[str, Any]:
    dropped = set(drop)
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for layer in as_layers(job.config)
        for name, value in layer.values.items()
        if layer.origin not in native_names() and not {name, name.partition(".")[0]} & dropped
    }
    # A rank that finds no GPU should fail, not train on the CPU for days.
    return {**values, "device": "cuda" if job.uses_gpus else "cpu"}


def _check_plan(job: Job, catalog: Catalog) -> None:
    """Raise now what `fit` would raise on the cluster, on as many hosts as there may be."""
    if job.spec.remote:
        _plan(job, catalog, None)
        return
    if job.config.elastic.min_ranks is not None:
        raise UserError(
            "on a cluster the number of ranks changes by whole hosts",
            field="elastic.min_ranks",
            got=job.config.elastic.min_ranks,
            remedy="Set elastic.min_nodes",
        )
    plan = _plan(job, catalog, _place(job, job.num_nodes))
    if job.min_nodes is None:
        return
    if job.config.global_batch_size is None:
        raise UserError(
            "with fewer hosts the global batch would shrink",
            field="global_batch_size",
            allowed=f"a number, such as the {plan.batch.global_batch_size} of all {job.num_nodes} hosts",
            remedy="Set it; the batch size of each rank follows from it",
        )
    for nodes in range(job.min_nodes, job.num_nodes):
        try:
            _plan(job, catalog, _place(job, nodes))
        except UserError as error:
            raise UserError(
                f"with {nodes} of {job.num_nodes} hosts, {error.message}", **error.details
            ) from None


def _plan(job: Job, catalog: Catalog, joined: LauncherEnvironment | None) -> RunPlan:
    layers = [Layer("run.yaml", _run_values(job, (*_PLACE, "elastic")))]
    if joined is None:
        layers = as_layers(job.config)
    here = copy.copy(catalog)
    here.backends = {name: replace(spec, requires=()) for name, spec in catalog.backends.items()}
    gpus = job.ranks_per_node if joined is not None else job.num_ranks
    return resolve(load_layers(layers), here, Facts(), Resources(gpus if job.uses_gpus else 0), joined)


def _place(job: Job, nodes: int) -> LauncherEnvironment:
    local = job.ranks_per_node
    return LauncherEnvironment("torchrun", 0, nodes * local, 0, local, 0, nodes, "localhost", 29500)
