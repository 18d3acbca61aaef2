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

from distributed.config.compression import CompressionSection
from distributed.config.consistency import check_elastic, check_optimizer_bits, check_ranks
from distributed.config.low_communication import LowCommunicationSection
from distributed.config.parallel import ParallelSection
from distributed.config.planned import PlannedSection
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
from distributed.config.validation_errors import refuse_redacted, user_error
from distributed.errors import hide_own_frames

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
    backend: str = Field(
        "pytorch-ddp", description="Backend that trains the model; the command `backends` lists them."
    )
    num_gpus: PositiveInt | None = Field(
        None,
        description="Number of ranks over all nodes. Without a GPU, ranks run as CPU processes over gloo.",
    )
    num_processes: PositiveInt | None = Field(
        None, description="Number of ranks over all nodes (alternative to num_gpus)."
    )
    num_nodes: PositiveInt = Field(1, description="Number of hosts.")
    gpus_per_node: PositiveInt | None = Field(None, description="Number of ranks per host.")
    node_rank: NonNegativeInt | None = Field(
        None, description="Index of this host when `fit` starts ranks on several hosts; rank 0 is on node 0."
    )
    rdzv_endpoint: str | None = Field(
        None, description="Rendezvous address for several nodes: host:port on node 0."
    )
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Device type of the ranks.")
    launch: Literal["auto", "join", "spawn", "per-rank", "threads"] = Field(
        "auto",
        description="join: use the ranks of a launcher; spawn: start ranks; auto: join if there is a"
        " launcher, else spawn; per-rank: run the script on each rank; threads: ranks are threads of this"
        " process that take turns, for tests and for several ranks on one GPU.",
    )
    launch_start: Literal["auto", "warm", "fresh"] = Field(
        "auto",
        description="How a host starts its ranks. warm: as forks of a process that has imported the framework"
        " once; fresh: as new interpreters; auto: warm on CPU, fresh on GPUs.",
    )

    # Batch (C1)
    batch_size: PositiveInt | Literal["auto"] | None = Field(
        None,
        description="Samples per rank and micro-batch. None: the DataLoader's batch size; auto: the largest"
        " that fits into memory, which needs `global_batch_size`.",
    )
    global_batch_size: PositiveInt | None = Field(
        None,
        description="Samples per optimizer step: batch_size x gradient_accumulation_steps x number of"
        " data-parallel ranks.",
    )
    gradient_accumulation_steps: PositiveInt | None = Field(
        None,
        description="Micro-batches per optimizer step. None: 1, or the value that `global_batch_size`"
        " requires.",
    )

    # Training
    epochs: NonNegativeInt = Field(1, description="Number of passes over the training data.")
    max_steps: PositiveInt | None = Field(None, description="Maximum number of optimizer steps.")
    learning_rate: PositiveFloat = Field(
        1e-3, description="Learning rate of the optimizer that is built if none is passed to the trainer."
    )
    optimizer: Literal["adamw", "adam", "sgd"] = Field(
        "adamw", description="Optimizer to build if none is passed to the trainer."
    )
    weight_decay: NonNegativeFloat = Field(
        0.0, description="Weight decay of the optimizer that is built if none is passed to the trainer."
    )
    momentum: NonNegativeFloat = Field(
        0.0, description="Momentum of the SGD optimizer that is built if none is passed to the trainer."
    )
    scheduler: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="Built-in learning rate schedule per optimizer step, if no scheduler is passed.",
    )
    warmup_steps: NonNegativeInt = Field(0, description="Number of optimizer steps of linear warm-up from 0.")
    min_lr_ratio: float = Field(
        0.0,
        ge=0.0,
        le=1.0,
        description="Final learning rate as a fraction of learning_rate (linear, cosine).",
    )
    scheduler_interval: Literal["epoch", "step"] = Field(
        "epoch", description="Interval at which a scheduler passed to the trainer steps."
    )
    scheduler_metric: str | None = Field(
        None,
        description="Metric of an epoch that a scheduler such as ReduceLROnPlateau follows. Default: the"
        " validation loss, or the only metric of which larger values are better with `mode='max'`.",
    )
    seed: NonNegativeInt = Field(
        0, description="Seed of the data order, model factories and random generators."
    )
    deterministic: bool = Field(
        False, description="Use only deterministic kernels: slower, and bit-identical when repeated."
    )
    on_nan: Literal["stop", "skip", "ignore"] = Field(
        "stop",
        description="Action if a loss or gradient is not finite: stop the run, skip the step, or continue.",
    )

    # Optimisation
    mixed_precision: bool | Precision = Field(
        False, description="Precision: fp32, bf16 or fp16; true is fp16 on CUDA and bf16 on CPU."
    )
    scaler_init_scale: PositiveFloat = Field(2.0**16, description="Initial loss scale under fp16.")
    scaler_growth_interval: PositiveInt = Field(
        2000, description="Consecutive steps without overflow after which the loss scale doubles."
    )
    gradient_clipping: PositiveFloat | None = Field(
        None, description="Maximum global L2 norm of the gradient; None disables clipping."
    )

    # Memory and speed
    activation_checkpointing: Literal["none", "full", "selective", "offload"] = Field(
        "none",
        description="Recompute the activations of the model's blocks in backward instead of storing them."
        " full: all of them; selective: all but the results of matrix multiplications and attention; offload:"
        " all, and store the inputs of the blocks in host memory.",
    )
    compile: Literal["none", "blocks", "model"] = Field(
        "none",
        description="Compile the forward pass of each of the model's blocks, or of the whole model, by"
        " torch.compile.",
    )
    optimizer_offload: bool = Field(
        False,
        description="Keep the optimizer's state in host memory and step on the CPU; no effect on CPU ranks.",
    )
    optimizer_bits: Literal[32, 8, 4] = Field(
        32,
        description="Bits per number of the state of the adamw or adam that is built if no optimizer is"
        " passed to the trainer. 8 and 4 need torchao.",
    )
    matmul_precision: Literal["default", "tf32", "fp8"] = Field(
        "default",
        description="Precision of matrix products. tf32: those in float32 use TF32 units of a GPU; fp8: those"
        " of linear layers use fp8 units (needs torchao), emulated on CPU.",
    )
    block_classes: tuple[str, ...] = Field(
        (),
        description="Class names of the model's blocks, for `activation_checkpointing` and `compile`. Empty:"
        " the units of `fsdp`, else the model's `_no_split_modules`, else modules that have submodules and"
        " are repeated (same class) in a ModuleList or Sequential.",
    )

    # Communication
    communication_backend: Literal["auto", "nccl", "gloo", "mpi"] = Field(
        "auto", description="Transport of the collectives; auto is nccl on CUDA and gloo on CPU."
    )
    find_unused_parameters: bool = Field(
        False, description="Allow parameters that are not used in every forward pass."
    )
    gradient_as_bucket_view: bool = Field(
        True, description="Store gradients as views of the reduction buckets."
    )
    bucket_cap_mb: PositiveFloat = Field(25.0, description="Size of a gradient bucket, in MiB.")
    collective_timeout: PositiveFloat = Field(600.0, description="Timeout of a collective, in seconds.")
    stall_report: PositiveFloat | None = Field(
        30.0,
        description="Seconds without progress after which a rank is reported, with phase, step and stack;"
        " the run continues. None disables.",
    )
    hang_timeout: PositiveFloat | None = Field(
        600.0,
        description="Seconds without progress after which the run is terminated; the error contains the same"
        " report as `stall_report`. None disables.",
    )
    host_timeout: PositiveFloat | None = Field(
        10.0,
        description="Seconds without a heartbeat after which another host is treated as lost; None disables.",
    )
    divergence_check_steps: PositiveInt | None = Field(
        100,
        description="Minimum number of optimizer steps between comparisons of replicated parameters, which"
        " run at log steps; None disables.",
    )
    sync_batchnorm: bool = Field(False, description="Compute BatchNorm statistics over all ranks.")
    carried_state: Literal["exact", "per_rank"] = Field(
        "exact",
        description="State that a model carries from one forward pass to the next, such as a hidden state or"
        " a queue. exact: refuse it where a step has several micro-batches or ranks; per_rank:"
        " each rank carries the state of its own micro-batches.",
    )

    # ZeRO
    zero_stage: int | None = Field(
        None,
        ge=0,
        le=3,
        description="ZeRO stage. 0: no sharding; 1: shard the optimizer; 2: also gradients; 3: also"
        " parameters. None means stage 2 under `deepspeed`. If `zero_stage` is set and `backend` is not, a"
        " backend that supports it is selected.",
    )

    # Checkpointing
    checkpoint_dir: str | None = Field(
        None,
        description="Directory of the checkpoints: a path, or a URL such as s3://bucket/run; None disables"
        " saving.",
        json_schema_extra={"path": True},
    )
    checkpoint_frequency: PositiveInt = Field(1, description="Number of epochs between checkpoints.")
    resume_from_checkpoint: bool | str = Field(
        False,
        description="True: resume from the newest intact checkpoint in `checkpoint_dir`, if any. Text: path"
        " or URL.",
        json_schema_extra={"path": True},
    )
    init_from: str | None = Field(
        None,
        description="Path or URL of a checkpoint of which a new run takes only the weights: those whose name"
        " and shape are the model's. A resumed run takes everything from its own checkpoint.",
        json_schema_extra={"path": True},
    )
    return_weights: Literal["auto", "full", "none"] = Field(
        "auto", description="Whether `fit` copies the trained weights into the caller's model."
    )

    # Monitoring
    mlflow_tracking: bool = Field(False, description="Record the run in MLflow.")
    tensorboard: bool = Field(False, description="Write TensorBoard events to `tensorboard_dir` or ./runs.")
    tensorboard_dir: str | None = Field(
        None,
        description="Folder for TensorBoard events; implies `tensorboard`.",
        json_schema_extra={"path": True},
    )
    log_every_n_steps: PositiveInt = Field(50, description="Number of optimizer steps between log records.")

    # Sections
    parallel: ParallelSection = Field(
        default_factory=ParallelSection, description="Number of ranks along each axis of the mesh."
    )
    planned: PlannedSection = Field(
        default_factory=PlannedSection, description="Predictions of `plan` for this configuration."
    )
    compression: CompressionSection = Field(
        default_factory=CompressionSection, description="Compression of the gradients that ranks exchange."
    )
    low_communication: LowCommunicationSection = Field(
        default_factory=LowCommunicationSection,
        description="Optimizer steps of each rank on its own, with an exchange of parameters now and then.",
    )
    lr_scaling: LrScaling = Field(default_factory=LrScaling, description="Learning rate by batch size.")
    data: DataSection = Field(default_factory=DataSection, description="Data order, randomness and checks.")
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

    @hide_own_frames
    def __init__(self, **values: Any) -> None:
        complete()
        origins: dict[str, str] = {}
        for native in self.native_fields:
            values, found = native.read(values)
            origins |= found
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise user_error(error, type(self), values) from None
        refuse_redacted(values)
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

    @field_validator("checkpoint_dir", "init_from", "tensorboard_dir", mode="before")
    @classmethod
    def _path_to_text(cls, value: Any) -> Any:
        return str(value) if hasattr(value, "__fspath__") else value

    @field_validator("optimizer_bits", mode="before")
    @classmethod
    def _text_to_number(cls, value: Any) -> Any:
        return int(value) if isinstance(value, str) and value.isdecimal() else value  # of a flag

    @model_validator(mode="after")
    def _agree(self) -> Self:
        check_ranks(self)
        if self.lr_scaling.rule != "none" and self.lr_scaling.base_batch_size is None:
            raise ValueError(
                "lr_scaling.base_batch_size is missing: a rule needs the global batch size that"
                " learning_rate was tuned for"
            )
        if self.num_nodes > 1 and self.launch == "spawn" and self.rdzv_endpoint is None:
            raise ValueError("rdzv_endpoint is missing: several nodes need host:port of node 0")
        if self.resume_from_checkpoint is True and self.checkpoint_dir is None:
            raise ValueError("resume_from_checkpoint=True needs checkpoint_dir: there is nowhere to look")
        check_elastic(self)
        check_optimizer_bits(self)
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
    def chooses_batch(self) -> bool:
        """Whether the run chooses the size of a micro-batch by the memory there is."""
        return self.batch_size == "auto"

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
    def times_phases(self) -> bool:
        """Whether ranks report the time of their phases. Threads have none of their own: they take turns."""
        return self.tracking.phase_timers and self.launch != "threads"

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
        return local_path(self.tracking.record_dir or self.checkpoint_dir)

    @property
    def heeds_signals(self) -> bool:
        """Whether SIGTERM, SIGUSR1 and SIGINT save and end the run."""
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
