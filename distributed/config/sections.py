"""Sections of the configuration: the base of all, and those that the core itself reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from distributed._moved import moved_names

__all__ = [
    "CheckpointSection",
    "DataSection",
    "ElasticSection",
    "LrScaling",
    "NativeField",
    "ProfileSection",
    "Section",
    "TrackingSection",
    "is_object_store",
    "local_path",
]

__getattr__ = moved_names(__name__)


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
        True,
        description="Joined ranks compare dataset length and a fingerprint of its first samples.",
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
        description="Metric that decides `best`: the name of a validation metric. None takes"
        " val_accuracy where there is one, else val_loss.",
    )
    mode: Literal["auto", "max", "min"] = Field(
        "auto", description="Whether more is better; auto minimises names with 'loss' or 'error'."
    )


class ElasticSection(Section):
    """Restarts of the ranks after a failure, with fewer or more of them if necessary. The global
    batch stays: what each rank takes of it, and accumulation, follow the number of ranks."""

    max_restarts: NonNegativeInt | None = Field(
        None,
        description="Number of failures after which all ranks restart from the newest checkpoint. None is"
        " 3 with `min_ranks` or `min_nodes`, and otherwise 0.",
        json_schema_extra={"flag": "--max-restarts"},
    )
    min_ranks: PositiveInt | None = Field(
        None,
        description="Fewest ranks with which the run continues. None: as many as at the start.",
        json_schema_extra={"flag": "--min-ranks"},
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
    mlflow_experiment: str | None = Field(
        None,
        description="MLflow experiment name; None is Default.",
        json_schema_extra={"flag": "--mlflow-experiment"},
    )
    run_name: str | None = Field(None, description="Name of the run in the trackers.")
    record_dir: str | None = Field(
        None,
        description="Folder for the run's record, which `report` reads. None is `checkpoint_dir` where that"
        " is a path of this host; without either, nothing is written.",
        json_schema_extra={"flag": "--record-dir"},
    )
    phase_timers: bool = Field(True, description="Log the share of time per phase, and stragglers.")


class ProfileSection(Section):
    """torch.profiler around a few steps: a chrome trace per rank and a table."""

    enabled: bool = Field(False, description="Profile this run.", json_schema_extra={"flag": "--profile"})
    output_dir: str = Field("profile", description="Folder for the traces and tables.")
    skip_steps: NonNegativeInt = Field(2, description="Optimizer steps to pass over first.")
    steps: PositiveInt = Field(5, description="Optimizer steps to record.")
