"""DistributedConfig: one frozen tree of all settings of a run."""

from __future__ import annotations

from importlib import import_module
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from distributed.config.sections import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    LrScaling,
    NativeField,
    ProfileSection,
    TrackingSection,
    local_path,
)
from distributed.config.validation_errors import user_error

__all__ = ["DistributedConfig", "complete"]

Precision = Literal["fp32", "bf16", "fp16"]
# The registry lies above this package and knows the plugins; it is found by name, as plugins are.
_REGISTRY = "distributed.registry.completion"


def complete() -> None:
    """Let the registry add the plugins' sections to `DistributedConfig`; later calls do nothing."""
    import_module(_REGISTRY).complete()


class DistributedConfig(BaseModel):
    """How to train: resources, batch, optimisation, communication, checkpoints, monitoring.

    The sections that plugins register are added when it is first used. Every value knows where it came
    from (`origin`). Build it directly, or with `distributed.config.load` from a file and overrides.

    Raises:
        UserError: an unknown field (with the nearest known name), a value out of range, or
            values that contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    # Resources
    backend: str = Field("pytorch-ddp", description="How ranks cooperate; see `backends`.")
    num_gpus: PositiveInt | None = Field(
        None, description="Ranks over all nodes. Without a GPU they run as CPU processes over gloo."
    )
    num_processes: PositiveInt | None = Field(
        None, description="Number of ranks over all nodes (alternative to num_gpus)."
    )
    num_nodes: PositiveInt = Field(1, description="Hosts.")
    gpus_per_node: PositiveInt | None = Field(None, description="Ranks per host.")
    node_rank: NonNegativeInt | None = Field(
        None, description="Index of this host when `fit` starts ranks on several; rank 0 is on node 0."
    )
    rdzv_endpoint: str | None = Field(
        None, description="host:port on node 0 where the ranks of several nodes meet."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Where ranks compute.")
    launch: Literal["auto", "join", "spawn", "per-rank"] = Field(
        "auto",
        description="auto joins a launcher's ranks or starts its own; per-rank starts a script on each.",
    )

    # Batch (C1)
    batch_size: PositiveInt | None = Field(
        None, description="Samples per rank and micro-batch. None takes the DataLoader's own."
    )
    global_batch_size: PositiveInt | None = Field(
        None, description="batch_size x gradient_accumulation_steps x data_parallel_size."
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        None, description="Micro-batches per optimizer step. None is 1, or what `global_batch_size` asks."
    )

    # Training
    epochs: NonNegativeInt = Field(1, description="Passes over the training data.")
    max_steps: PositiveInt | None = Field(None, description="Stop after this many optimizer steps.")
    learning_rate: PositiveFloat = Field(1e-3, description="Learning rate of an optimizer built here.")
    optimizer: Literal["adamw", "adam", "sgd"] = Field(
        "adamw", description="Optimizer to build when none is given."
    )
    weight_decay: NonNegativeFloat = Field(0.0, description="Of an optimizer built here.")
    momentum: NonNegativeFloat = Field(0.0, description="Of an SGD built here.")
    scheduler: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Built-in schedule over optimizer steps, when no scheduler is given."
    )
    warmup_steps: NonNegativeInt = Field(0, description="Optimizer steps of linear warm-up from 0.")
    min_lr_ratio: float = Field(
        0.0, ge=0.0, le=1.0, description="Where linear and cosine end, as a share of the learning rate."
    )
    scheduler_interval: Literal["epoch", "step"] = Field(
        "epoch", description="How often a user's scheduler object steps."
    )
    seed: NonNegativeInt = Field(0, description="Seeds data order, model factories and random streams.")
    deterministic: bool = Field(False, description="Only deterministic kernels; slower, same bits again.")
    on_nan: Literal["stop", "skip", "ignore"] = Field(
        "stop", description="A loss or gradient that is not finite: stop, skip the step, or continue."
    )

    # Optimisation
    mixed_precision: bool | Precision = Field(
        False, description="True is fp16 on CUDA and bf16 on CPU; or bf16, fp16, fp32 by name."
    )
    scaler_init_scale: PositiveFloat = Field(2.0**16, description="First loss scale under fp16.")
    scaler_growth_interval: PositiveInt = Field(2000, description="Good steps before the loss scale doubles.")
    gradient_clipping: PositiveFloat | None = Field(
        None, description="Largest global L2 norm of the gradient; None does not clip."
    )

    # Communication
    communication_backend: Literal["auto", "nccl", "gloo", "mpi"] = Field(
        "auto", description="Transport of the collectives; auto is nccl on CUDA, gloo on CPU."
    )
    find_unused_parameters: bool = Field(
        False, description="Some parameters take no part in some forward passes."
    )
    gradient_as_bucket_view: bool = Field(True, description="Gradients live in the reduction buckets.")
    bucket_cap_mb: PositiveFloat = Field(25.0, description="Size of a gradient bucket, in MiB.")
    collective_timeout: PositiveFloat = Field(600.0, description="Seconds a collective may take.")
    stall_report: PositiveFloat | None = Field(
        30.0,
        description="Seconds without a move after which a rank is reported, with phase, step and stack, and"
        " waited for; None never.",
    )
    hang_timeout: PositiveFloat | None = Field(
        600.0,
        description="Seconds after which a run that hangs is ended, with that report as its error; None"
        " never.",
    )
    host_timeout: PositiveFloat | None = Field(
        10.0,
        description="Seconds without a heartbeat after which another host counts as lost; None disables.",
    )
    divergence_check_steps: PositiveInt | None = Field(
        100,
        description="Optimizer steps after which a log step compares replicated parameters over the ranks;"
        " None never.",
    )
    sync_batchnorm: bool = Field(False, description="BatchNorm statistics over all ranks.")

    # ZeRO
    zero_stage: int | None = Field(
        None,
        ge=0,
        le=3,
        description="ZeRO stage: shard nothing, the optimizer, gradients too, parameters too. None is 2 under"
        " `deepspeed`. Moves a default backend to one that has it.",
    )

    # Checkpointing
    checkpoint_dir: str | None = Field(
        None, description="Where checkpoints go: a path, or a URL such as s3://bucket/run; None saves none."
    )
    checkpoint_frequency: PositiveInt = Field(1, description="Epochs between checkpoints.")
    resume_from_checkpoint: bool | str = Field(
        False, description="True: newest good checkpoint in `checkpoint_dir`, if any; or a path or URL."
    )
    return_weights: Literal["auto", "full", "none"] = Field(
        "auto", description="Whether `fit` puts the trained weights into the caller's model."
    )

    # Monitoring
    mlflow_tracking: bool = Field(False, description="Record the run in MLflow.")
    tensorboard: bool = Field(False, description="TensorBoard events, to `tensorboard_dir` or ./runs.")
    tensorboard_dir: str | None = Field(None, description="Folder for the events; implies `tensorboard`.")
    log_every_n_steps: PositiveInt = Field(50, description="Optimizer steps between log records.")

    # Sections
    lr_scaling: LrScaling = Field(default_factory=LrScaling, description="Learning rate by batch size.")
    data: DataSection = Field(default_factory=DataSection, description="How data reaches the ranks.")
    checkpoint: CheckpointSection = Field(
        default_factory=CheckpointSection, description="When to save and what to keep."
    )
    elastic: ElasticSection = Field(
        default_factory=ElasticSection, description="Restarts after failures, with fewer or more ranks."
    )
    tracking: TrackingSection = Field(default_factory=TrackingSection, description="Progress and trackers.")
    profile: ProfileSection = Field(default_factory=ProfileSection, description="torch.profiler.")

    native_fields: ClassVar[tuple[NativeField, ...]] = ()
    """Flat fields of plugins, for their frameworks' own configuration."""

    _origins: dict[str, str] = PrivateAttr(default_factory=dict)

    def __init__(self, **values: Any) -> None:
        complete()
        origins: dict[str, str] = {}
        for native in self.native_fields:
            values, found = native.read(values)
            origins |= found
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise user_error(error, type(self)) from None
        self._origins = origins

    @classmethod
    def model_json_schema(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As pydantic's, with the sections of plugins."""
        complete()
        return super().model_json_schema(*args, **kwargs)

    def __setstate__(self, state: dict[Any, Any]) -> None:
        complete()
        super().__setstate__(state)

    @field_validator("lr_scaling", mode="before")
    @classmethod
    def _rule_alone(cls, value: Any) -> Any:
        return {"rule": value} if isinstance(value, str) else value

    @field_validator("checkpoint_dir", "tensorboard_dir", mode="before")
    @classmethod
    def _path_to_text(cls, value: Any) -> Any:
        return str(value) if hasattr(value, "__fspath__") else value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        _check_ranks(self)
        if self.lr_scaling.rule != "none" and self.lr_scaling.base_batch_size is None:
            raise ValueError(
                "lr_scaling.base_batch_size is missing: a rule needs the global batch size that"
                " learning_rate was tuned for"
            )
        if self.num_nodes > 1 and self.launch == "spawn" and self.rdzv_endpoint is None:
            raise ValueError("rdzv_endpoint is missing: several nodes need host:port of node 0")
        if self.resume_from_checkpoint is True and self.checkpoint_dir is None:
            raise ValueError("resume_from_checkpoint=True needs checkpoint_dir: there is nowhere to look")
        _check_elastic(self)
        return self

    @property
    def num_ranks(self) -> int | None:
        """Number of ranks over all nodes, if the config sets it; None leaves it to the machine."""
        if self.num_processes is not None:
            return self.num_processes
        if self.num_gpus is not None:
            return self.num_gpus
        if self.gpus_per_node is not None:
            return self.gpus_per_node * self.num_nodes
        return self.elastic.max_ranks

    @property
    def max_restarts(self) -> int:
        """How many failures of a rank a run survives."""
        asked, section = self.elastic.max_restarts, self.elastic
        return asked if asked is not None else 3 if section.min_ranks or section.min_nodes else 0

    @property
    def is_elastic(self) -> bool:
        """Whether ranks restart, after a failure or for another host."""
        return bool(self.max_restarts or self.elastic.min_ranks or self.elastic.min_nodes)

    @property
    def wants_tensorboard(self) -> bool:
        """Whether TensorBoard events are written."""
        return self.tensorboard or self.tensorboard_dir is not None

    @property
    def wants_mlflow(self) -> bool:
        """Whether the run is recorded in MLflow."""
        return self.mlflow_tracking or self.tracking.mlflow_experiment is not None

    @property
    def record_dir(self) -> str | None:
        """Where the run's record is written; None nowhere."""
        folder = self.tracking.record_dir or self.checkpoint_dir
        return local_path(folder)

    @property
    def heeds_signals(self) -> bool:
        """Whether SIGTERM and SIGUSR1 save and end the run."""
        return self.checkpoint_dir is not None and self.checkpoint.on_signal

    @property
    def zero_fields(self) -> list[str]:
        """Fields that, when set, need a backend that implements ZeRO."""
        return ["zero_stage", *(native.name for native in self.native_fields if native.wants_zero)]

    @property
    def wants_zero(self) -> bool:
        """Whether the backend has to be one that implements ZeRO."""
        return any(getattr(self, name) is not None for name in self.zero_fields)

    def is_explicit(self, name: str) -> bool:
        """Whether the flat field `name` was set explicitly."""
        return name in self.model_fields_set and getattr(self, name) is not None

    def origin(self, name: str) -> str:
        """Where the value of `name` (dotted for sections) came from."""
        if name in self._origins:
            return self._origins[name]
        owner: BaseModel = self
        for part in name.split(".")[:-1]:
            owner = getattr(owner, part)
        return "argument" if name.split(".")[-1] in owner.model_fields_set else "default"


def _check_ranks(config: DistributedConfig) -> None:
    """Raise ValueError unless num_gpus, num_processes, num_nodes and gpus_per_node agree."""
    total = config.num_ranks
    if config.num_gpus is not None and config.num_processes not in (None, config.num_gpus):
        raise ValueError(
            f"num_gpus={config.num_gpus} and num_processes={config.num_processes} disagree:"
            " both count the ranks over all nodes; give one of them"
        )
    if config.gpus_per_node is not None and total != config.gpus_per_node * config.num_nodes:
        raise ValueError(
            f"num_gpus={total} is not num_nodes={config.num_nodes} x gpus_per_node={config.gpus_per_node}"
            f" = {config.num_nodes * config.gpus_per_node}: num_gpus counts the ranks over all nodes;"
            f" set num_gpus={config.num_nodes * config.gpus_per_node} or leave it out"
        )
    if total is not None and total % config.num_nodes:
        raise ValueError(
            f"num_gpus={total} cannot be spread evenly over num_nodes={config.num_nodes}:"
            f" use {total - total % config.num_nodes or config.num_nodes} or"
            f" {total + config.num_nodes - total % config.num_nodes}"
        )
    if config.node_rank is not None and config.node_rank >= config.num_nodes:
        raise ValueError(
            f"node_rank={config.node_rank} is not below num_nodes={config.num_nodes}: nodes count from 0"
        )


def _check_elastic(config: DistributedConfig) -> None:
    """Raise ValueError if a field that `elastic` needs is missing."""
    section, ranks = config.elastic, config.num_ranks
    if section.max_ranks is not None and ranks != section.max_ranks:
        raise ValueError(
            f"elastic.max_ranks={section.max_ranks} and num_gpus={ranks} disagree: a run starts with all the"
            " ranks it may have; give one of them"
        )
    if section.min_ranks is not None and ranks is not None and section.min_ranks > ranks:
        raise ValueError(f"elastic.min_ranks={section.min_ranks} is above the {ranks} ranks of the run")
    if section.min_nodes is not None and section.min_nodes > config.num_nodes:
        raise ValueError(f"elastic.min_nodes={section.min_nodes} is above num_nodes={config.num_nodes}")
    if config.is_elastic and config.checkpoint_dir is None:
        raise ValueError("elastic needs checkpoint_dir: without checkpoints there is nothing to go on from")
