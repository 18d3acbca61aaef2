"""The sections of the configuration: what few people set, grouped by who reads it."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

__all__ = [
    "CheckpointSection",
    "DataSection",
    "ElasticSection",
    "FSDPSection",
    "HorovodSection",
    "LrScaling",
    "ProfileSection",
    "RaySection",
    "TensorFlowSection",
    "TrackingSection",
    "ZeroSection",
    "is_object_store",
    "local_path",
]


def local_path(place: str | None) -> str | None:
    """`place` as a path of a host, ``file://`` taken off; None for an object store's URL, and for None."""
    scheme, is_url, path = (place or "").partition("://")
    if not is_url:
        return place
    return path if scheme.lower() in ("file", "local") else None


def is_object_store(place: str | None) -> bool:
    """Whether `place` is a URL of something that is no folder."""
    return place is not None and local_path(place) is None


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class LrScaling(Section):
    """Rescale the learning rate with the global batch size. Off unless asked for (C7)."""

    rule: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="linear: lr x k; sqrt: lr x sqrt(k), where k = global_batch_size / base_batch_size.",
    )
    base_batch_size: PositiveInt | None = Field(
        None, description="Global batch size that `learning_rate` was tuned for; needed by a rule."
    )


class DataSection(Section):
    """How data reaches the ranks."""

    per_sample_rng: bool = Field(
        False,
        description="Seed random, NumPy and torch from (seed, epoch, global index) before every"
        " sample, so that augmentation does not depend on ranks or workers.",
    )
    drop_last: bool | None = Field(
        None,
        description="Drop the last, smaller global batch of an epoch. None follows the DataLoader.",
    )
    shuffle: bool | None = Field(
        None,
        description="Shuffle training samples. None follows the DataLoader; a bare dataset or tensors"
        " are shuffled.",
    )
    verify: bool = Field(
        True, description="Joined ranks compare dataset length and a fingerprint of its first samples."
    )


class CheckpointSection(Section):
    """When to save, what to keep, what counts as best."""

    every_n_steps: PositiveInt | None = Field(
        None, description="Also save every n optimizer steps. None saves by `checkpoint_frequency` alone."
    )
    keep_last: PositiveInt | None = Field(3, description="Newest checkpoints to keep; None keeps all.")
    keep_every_n_steps: PositiveInt | None = Field(
        None, description="Keep also the checkpoints of steps that n divides; None keeps none of them."
    )
    keep_best: bool = Field(True, description="Keep the best checkpoint beside the newest.")
    asynchronous: bool = Field(
        True,
        description="Training waits only until the state is copied; a thread writes it, one save at a time.",
    )
    max_failures: PositiveInt = Field(
        3, description="Saves that may fail in a row before the run is stopped; 1 stops at the first."
    )
    on_signal: bool = Field(
        True,
        description="SIGTERM and SIGUSR1 save at the same step on every rank and end the run with exit code"
        " 75; false, and a run without `checkpoint_dir`, leave them their usual meaning.",
    )
    hyperparameters: Literal["saved", "given"] = Field(
        "saved",
        description="Learning rate, weight decay and the like of a resumed run: as they were saved, or as"
        " they are given now, a schedule going on with the given rate.",
    )
    metric: str | None = Field(
        None,
        description="Metric that decides `best`: a name of a validation figure. None takes"
        " val_accuracy where there is one, else val_loss.",
    )
    mode: Literal["auto", "max", "min"] = Field(
        "auto", description="Whether more is better; auto minimises names with 'loss' or 'error'."
    )


class ElasticSection(Section):
    """Ranks that are started again after a failure, with fewer or more of them if need be. The global
    batch stays: what each rank takes of it, and accumulation, follow the number of ranks."""

    max_restarts: NonNegativeInt | None = Field(
        None,
        description="Failures after which all ranks start again from the newest checkpoint. None is 3 with"
        " `min_ranks` or `min_nodes`, and otherwise 0.",
    )
    min_ranks: PositiveInt | None = Field(
        None, description="Fewest ranks to go on with. None: as many as at the start."
    )
    max_ranks: PositiveInt | None = Field(
        None, description="Most ranks, which is what a run starts with: another word for `num_gpus`."
    )
    min_nodes: PositiveInt | None = Field(None, description="`min_ranks`, counted in hosts.")
    last_call: PositiveFloat = Field(
        10.0, description="Seconds to wait for more hosts once there are enough to start."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.min_ranks is not None and self.min_nodes is not None:
            raise ValueError("min_ranks and min_nodes say the same thing: give one of them")
        if self.max_ranks is not None and (self.min_ranks or 1) > self.max_ranks:
            raise ValueError(f"min_ranks={self.min_ranks} is above max_ranks={self.max_ranks}")
        return self


class TrackingSection(Section):
    """What is written about a run besides the flat switches."""

    progress: Literal["auto", "on", "off"] = Field(
        "auto", description="Progress bar; auto shows it on a terminal and stays quiet elsewhere."
    )
    mlflow_tracking_uri: str | None = Field(
        None, description="MLflow store. None: MLFLOW_TRACKING_URI, or a local SQLite file mlflow.db."
    )
    mlflow_experiment: str | None = Field(None, description="MLflow experiment name; None is Default.")
    run_name: str | None = Field(None, description="Name of the run in the trackers.")
    record_dir: str | None = Field(
        None,
        description="Folder for the run's record, which `report` reads. None is `checkpoint_dir` where that"
        " is a path of this host; without either, nothing is written.",
    )
    phase_timers: bool = Field(True, description="Log the share of time per phase, and stragglers.")


class ProfileSection(Section):
    """torch.profiler around a few steps: a chrome trace per rank and a table."""

    enabled: bool = Field(False, description="Profile this run.")
    output_dir: str = Field("profile", description="Folder for the traces and tables.")
    skip_steps: NonNegativeInt = Field(2, description="Optimizer steps to pass over first.")
    steps: PositiveInt = Field(5, description="Optimizer steps to record.")


class FSDPSection(Section):
    """What backend ``fsdp`` shards together, and what it trades for memory."""

    wrap: Literal["auto", "whole", "blocks", "size"] = Field(
        "auto",
        description="What is gathered together. blocks: each module of `block_classes`; size: each module"
        " of at least `min_params`; whole: the model at once; auto: the blocks the model names or repeats,"
        " else whole.",
    )
    block_classes: tuple[str, ...] = Field(
        (), description="Class names of the model's blocks, for wrap blocks and auto."
    )
    min_params: PositiveInt = Field(1_000_000, description="Parameters of a module that wrap size takes.")
    reshard_after_forward: bool = Field(
        True,
        description="Free gathered blocks between forward and backward, as ZeRO stage 3 does; false"
        " gathers once a step and keeps them, as stage 2.",
    )
    reduce_every_micro_batch: bool = Field(
        False,
        description="While accumulating, reduce each micro-batch's gradients at once: more communication,"
        " and no gradient of the whole model in memory.",
    )
    replicate: PositiveInt = Field(
        1, description="Copies of the sharded model: ranks / replicate share one (hybrid sharding)."
    )
    cpu_offload: bool = Field(
        False, description="Keep shards, gradients and optimizer in host memory, and step there."
    )
    reduce_dtype: Literal["fp32", "bf16", "fp16"] | None = Field(
        None, description="dtype in which gradients travel; None is the parameters' own."
    )
    activation_checkpointing: bool = Field(
        False, description="Recompute the blocks' activations in backward instead of keeping them."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.wrap == "blocks" and not self.block_classes:
            raise ValueError("block_classes is missing: wrap=blocks needs the class names of the blocks")
        if self.wrap in ("whole", "size") and self.block_classes:
            raise ValueError(f"block_classes has no meaning with wrap={self.wrap}: use wrap=blocks")
        return self


class HorovodSection(Section):
    """What only Horovod has. Another backend refuses it."""

    compression: Literal["none", "fp16"] = Field(
        "none",
        description="How gradients travel; fp16 halves float32's bytes, and rounds.",
    )
    timeline: str | None = Field(None, description="File for Horovod's timeline (chrome trace), by rank 0.")

    @field_validator("compression", mode="before")
    @classmethod
    def _horovods_own(cls, value: Any) -> Any:
        name = getattr(value, "__name__", None)
        return {"NoneCompressor": "none", "FP16Compressor": "fp16"}.get(name, value) if name else value


class ZeroSection(Section):
    """What ZeRO keeps in host memory, so that more fits on a device."""

    offload_optimizer: Literal["none", "cpu"] = Field(
        "none", description="Where the optimizer's state lives and steps; cpu needs ZeRO stage 1 or more."
    )
    offload_parameters: Literal["none", "cpu"] = Field(
        "none", description="Where parameters wait until they are used; cpu needs ZeRO stage 3."
    )


class RaySection(Section):
    """Where backend ``ray`` starts ranks, and what they run. Another backend refuses it."""

    inner: str = Field("pytorch-ddp", description="The torch backend that the ranks run.")
    address: str | None = Field(
        None,
        description="The cluster: auto, HOST:PORT or ray://HOST:PORT. None: the one that this process is"
        " connected to, RAY_ADDRESS's, or a cluster on this host for the run alone.",
    )
    num_cpus_per_rank: NonNegativeFloat = Field(1.0, description="CPUs that Ray sets aside for each rank.")
    resources: dict[str, NonNegativeFloat] = Field(
        default_factory=dict, description="Other resources each rank needs, by Ray's names for them."
    )
    start_timeout: PositiveFloat = Field(
        300.0, description="Seconds to wait for a busy cluster to have room for the ranks."
    )
    storage_path: str | None = Field(
        None, description="Where Ray Train keeps its own record of the run; None keeps none."
    )


class TensorFlowSection(Section):
    """What only TensorFlow has. Another backend refuses it."""

    strategy: Literal["auto", "mirrored", "multi_worker"] = Field(
        "auto",
        description="mirrored: one process drives all devices of this host; multi_worker: a process for"
        " each; auto: mirrored for num_gpus on one host, multi_worker for num_processes and several hosts.",
    )
