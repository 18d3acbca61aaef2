"""History: what a run leaves in the caller's hands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = ["History"]


@dataclass
class History:
    """The record of a `fit`.

    Attributes:
        epochs: one dict per epoch: ``epoch``, ``step``, ``train_loss``, and with validation
            ``val_loss`` and ``val_<metric>``.
        steps: per-step series of equal length, keyed by name: ``step``, ``loss`` (mean over
            the global batch), ``learning_rate``. Empty series where nothing was left to train.
        logs: what was logged every `log_every_n_steps`: ``step``, ``loss``,
            ``learning_rate``, ``grad_norm``, ``samples_per_second``, memory, phase times.
        total_time: seconds spent in `fit`, starting ranks included.
        train_time: seconds spent training and validating.
        num_samples: samples trained on.
        best_accuracy: best validation accuracy in 0..1, None when there was none.
        checkpoint: path of the newest checkpoint, None without.
        best_checkpoint: path of the best checkpoint, None without.
        stop_reason: why the run ended before its last step, None when it did not.
        restarts: reason of each restart of all ranks; the records start over at a restart.
        preempted: the signal that asked the run to stop and save, None without.
        num_skipped_steps: optimizer steps not taken because gradients were not finite.
        world_size: ranks that trained.
        backend: the backend's name.
        batch: the batch identity (C1): ``batch_size``, ``gradient_accumulation_steps``,
            ``data_parallel_size``, ``global_batch_size``.
    """

    epochs: list[dict[str, Any]] = field(default_factory=list)
    steps: dict[str, list[float]] = field(
        default_factory=lambda: {"step": [], "loss": [], "learning_rate": []}
    )
    logs: list[dict[str, float]] = field(default_factory=list)
    total_time: float = 0.0
    train_time: float = 0.0
    num_samples: int = 0
    best_accuracy: float | None = None
    checkpoint: str | None = None
    best_checkpoint: str | None = None
    stop_reason: str | None = None
    restarts: list[str] = field(default_factory=list)
    preempted: str | None = None
    num_skipped_steps: int = 0
    world_size: int = 1
    backend: str = ""
    batch: dict[str, int] = field(default_factory=dict)

    @property
    def samples_per_second(self) -> float:
        """Training samples per second of training time, over all ranks."""
        return self.num_samples / self.train_time if self.train_time > 0 else 0.0

    def to_dict(self) -> dict[str, Any]:
        """A JSON-able copy."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> History:
        """The inverse of `to_dict`."""
        return cls(**data)
