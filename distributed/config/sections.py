"""Sections of the configuration: the base of all, and those that the core itself reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)


def local_path(place: str | None) -> str | None:
    """`place` as a path of a host, ``file://`` taken off; None for an object store's URL, and for None."""
    scheme, is_url, path = (place or "").partition("://")
    if not is_url:
        return place
    return path if scheme.lower() in ("file", "local") else None


def is_object_store(place: str | None) -> bool:
    """Whether `place` is a URL of something that is no folder."""
    return place is not None and local_path(place) is None


@dataclass(frozen=True)
class NativeField:
    """A flat field that holds a framework's own configuration, registered together with a section.

    Attributes:
        name: of the field.
        description: one or two sentences, for ``--help`` and the reference.
        read: called with all given values, before they are validated; returns them with what the native
            configuration sets in our terms, and the dotted names of these -> `name`, their origin.
        wants_zero: a value asks for a backend that implements ZeRO, as `zero_stage` does.
    """

    name: str
    description: str
    read: Callable[[Mapping[str, Any]], tuple[dict[str, Any], dict[str, str]]]
    wants_zero: bool = False


class Section(BaseModel):
    """Base of all sections: frozen, unknown keys refused, every field with a default.

    The first paragraph of the docstring describes the section. A field is set by ``--set``; one with
    ``json_schema_extra={"flag": "--name"}`` has a flag too.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    native: ClassVar[NativeField | None] = None
    """The framework's own configuration, where users have one."""

    @classmethod
    def of(cls, config: BaseModel) -> Self:
        """The section of this class in `config`.

        Raises:
            LookupError: no plugin registered it.
        """
        for value in vars(config).values():
            if isinstance(value, cls):
                return value
        raise LookupError(f"the configuration has no section {cls.__name__}")


class LrScaling(Section):
    """Rescale the learning rate with the global batch size. Off by default (C7)."""

    rule: Literal["none", "linear", "sqrt"] = Field(
        "none",
        description="linear: lr x k; sqrt: lr x sqrt(k), where k = global_batch_size / base_batch_size.",
    )
    base_batch_size: PositiveInt | None = Field(
        None, description="Global batch size that `learning_rate` was tuned for; required by a rule."
    )


class DataSection(Section):
    """How data reaches the ranks."""

    per_sample_rng: bool = Field(
        False,
        description="Seed random, NumPy and torch from (seed, epoch, global index) before every"
        " sample, so that augmentation is independent of the number of ranks and workers.",
    )
    drop_last: bool | None = Field(
        None,
        description="Drop the last, smaller global batch of an epoch. None: as the DataLoader.",
    )
    shuffle: bool | None = Field(
        None,
        description="Shuffle training samples. None: as the DataLoader; a dataset or tensors without a"
        " DataLoader are shuffled.",
    )
    verify: bool = Field(
        True,
        description="Compare dataset lengths and first samples between ranks: of map-style data if a launcher"
        " started the ranks, and of streams in each epoch.",
    )
    num_workers: NonNegativeInt = Field(
        0,
        description="Number of processes per rank that read the samples of a dataset which is given without a"
        " DataLoader; a DataLoader has its own.",
    )
    pin_memory: bool = Field(
        False, description="Copy batches of such a dataset into pinned memory, as DataLoader does."
    )
    prefetch_factor: PositiveInt | None = Field(
        None, description="Number of batches that each such process reads ahead. None: as DataLoader, 2."
    )
    persistent_workers: bool = Field(False, description="Keep these processes from one epoch to the next.")
    prefetch_to_device: bool = Field(
        True,
        description="Read the next batch and begin to copy it to the GPU while the GPU computes a step: of"
        " tensors, which are read into pinned memory, and of map-style data that a DataLoader's workers"
        " read.",
    )

    @model_validator(mode="after")
    def _need_workers(self) -> Self:
        if not self.num_workers and (self.prefetch_factor or self.persistent_workers):
            raise ValueError("prefetch_factor and persistent_workers need num_workers of at least 1")
        return self

    @property
    def loader_options(self) -> dict[str, Any]:
        """Arguments of a DataLoader over data that is given without one, other than its defaults."""
        names = {"num_workers", "pin_memory", "prefetch_factor", "persistent_workers"}
        return {name: value for name, value in self.model_dump(include=names).items() if value}


class CheckpointSection(Section):
    """When to save, what to keep, what counts as best."""

    every_n_steps: PositiveInt | None = Field(
        None,
        description="Also save after every n optimizer steps. None: only after epochs"
        " (`checkpoint_frequency`).",
    )
    keep_last: PositiveInt | None = Field(
        3, description="Number of newest checkpoints to keep; None keeps all."
    )
    keep_every_n_steps: PositiveInt | None = Field(
        None, description="Also keep checkpoints of steps divisible by n; None: no additional ones."
    )
    keep_best: bool = Field(True, description="Also keep the best checkpoint.")
    asynchronous: bool = Field(
        True,
        description="Block training only while the state is copied; a thread writes it, one save at a time.",
    )
    max_failures: PositiveInt = Field(
        3, description="Number of consecutive failed saves after which the run ends; 1 ends it at the first."
    )
    lease_timeout: PositiveFloat = Field(
        60.0,
        description="Seconds without a heartbeat after which a run of another host or container, which wrote"
        " into `checkpoint_dir`, is treated as ended. On the same host, processes are checked instead.",
    )
    on_signal: bool = Field(
        True,
        description="On SIGTERM and SIGUSR1, save at the same step on every rank and exit with code 75; on"
        " Ctrl-C (SIGINT), save and exit with 130. If false, or without `checkpoint_dir`, the signals have"
        " their default effect.",
    )
    continue_stopped: bool = Field(
        False,
        description="Train further when the resumed run had been stopped by a callback, such as"
        " EarlyStopping. If false, such a run ends at once unless `epochs` or `max_steps` is raised.",
    )
    trainable_only: bool | None = Field(
        None,
        description="Leave frozen parameters out of checkpoints, as long as they have the values with which"
        " the model came; a resumed run checks that its model has the same. None: for models of PEFT.",
    )
    hyperparameters: Literal["saved", "given"] = Field(
        "saved",
        description="Source of learning rate, weight decay and other optimizer hyperparameters in a resumed"
        " run. saved: the checkpoint; given: the current configuration, and the schedule continues with the"
        " given rate.",
    )
    metric: str | None = Field(
        None,
        description="Validation metric that selects the best checkpoint. None: val_accuracy if it is"
        " reported, else val_loss.",
    )
    mode: Literal["auto", "max", "min"] = Field(
        "auto",
        description="Whether the metric is maximised or minimised; auto minimises names with 'loss' or"
        " 'error'.",
    )


class ElasticSection(Section):
    """Restarts of the ranks after a failure, with fewer or more of them if necessary. The global
    batch size does not change; the samples per rank and the accumulation depend on the number of ranks."""

    max_restarts: NonNegativeInt | None = Field(
        None,
        description="Maximum number of restarts: after a failure, all ranks restart from the newest"
        " checkpoint at most this many times. None is 3 with `min_ranks` or `min_nodes`, otherwise 0.",
        json_schema_extra={"flag": "--max-restarts"},
    )
    min_ranks: PositiveInt | None = Field(
        None,
        description="Minimum number of ranks with which the run continues. None: the number at the start.",
        json_schema_extra={"flag": "--min-ranks"},
    )
    max_ranks: PositiveInt | None = Field(
        None,
        description="Maximum number of ranks. The run starts with this number. Alias of `num_gpus`.",
    )
    min_nodes: PositiveInt | None = Field(
        None, description="Minimum number of hosts with which the run continues (alternative to min_ranks)."
    )
    last_call: PositiveFloat = Field(
        10.0, description="Seconds to wait for further hosts after the minimum number has joined."
    )

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.min_ranks is not None and self.min_nodes is not None:
            raise ValueError("min_ranks and min_nodes set the same limit: give one of them")
        if self.max_ranks is not None and (self.min_ranks or 1) > self.max_ranks:
            raise ValueError(f"min_ranks={self.min_ranks} is above max_ranks={self.max_ranks}")
        return self


def _as_word(value: Any) -> Any:
    """YAML reads ``on`` and ``off`` as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


def _as_folder(name: str | None) -> str | None:
    if name and (name.startswith("/") or ".." in name.split("/")):
        raise ValueError("names a folder, which would be outside of tensorboard_dir")
    return name


class TrackingSection(Section):
    """Progress bar, trackers and the run record."""

    progress: Annotated[Literal["auto", "on", "off"], BeforeValidator(_as_word)] = Field(
        "auto", description="Progress bar; auto shows it only on a terminal."
    )
    mlflow_tracking_uri: str | None = Field(
        None,
        description="MLflow tracking URI. None: MLFLOW_TRACKING_URI, or a local SQLite file mlflow.db.",
        json_schema_extra={"path": "store"},
    )
    mlflow_experiment: str | None = Field(
        None,
        description="MLflow experiment name; None is Default.",
        json_schema_extra={"flag": "--mlflow-experiment"},
    )
    run_name: Annotated[str | None, AfterValidator(_as_folder)] = Field(
        None, description="Name of the run in the trackers."
    )
    record_dir: str | None = Field(
        None,
        description="Folder for the run record, which `report` reads. None: `checkpoint_dir`, if it is a"
        " local path; otherwise no record is written.",
        json_schema_extra={"flag": "--record-dir", "path": True},
    )
    baseline_throughput: PositiveFloat | None = Field(
        None,
        description="Measured samples per second of one device. Trackers get the speed-up over it as"
        " `speedup`.",
    )
    phase_timers: bool = Field(
        True, description="Log the fraction of time spent in each phase, and stragglers."
    )


class ProfileSection(Section):
    """torch.profiler around a few steps: a chrome trace per rank and a table."""

    enabled: bool = Field(False, description="Profile this run.", json_schema_extra={"flag": "--profile"})
    output_dir: str = Field(
        "profile", description="Folder for traces and tables.", json_schema_extra={"path": True}
    )
    skip_steps: NonNegativeInt = Field(2, description="Number of optimizer steps to skip before profiling.")
    steps: PositiveInt = Field(5, description="Number of optimizer steps to profile.")
