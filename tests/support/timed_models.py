"""Models of three kinds in any size, and runs of them whose steps are timed."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from distributed import Callback
from distributed.planner.estimates.split import Split
from tests.support.training import make_trainer

__all__ = ["TimedRun", "batch_of", "build", "measured_seconds"]

_WARM_UP = 3
_CLASSES = 10


@dataclass(frozen=True)
class TimedRun:
    """A configuration whose steps are timed.

    Attributes:
        name: of the row.
        kind: ``llama``, ``convnet`` or ``mlp``.
        size: arguments of the model.
        split: how it is divided; `Split.micro_batch` samples on each rank.
        options: further fields of the configuration.
    """

    name: str
    kind: str
    size: tuple[int, ...]
    split: Split
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def fields(self) -> dict[str, Any]:
        """Of the configuration."""
        split, dims = self.split, self.split.dims
        own = {axis: size for axis, size in vars(dims).items() if size > 1}
        samples, number = split.micro_batch, split.num_micro_batches
        found: dict[str, Any] = {"backend": split.backend, "optimizer": split.optimizer}
        if dims.pipeline > 1:
            own |= {"schedule": split.schedule, "num_microbatches": number}
            samples, number = samples * number, 1
        if set(own) - {"data"} and (split.backend, set(own)) != ("fsdp", {"shard"}):
            found["parallel"] = own
        if split.zero_stage:
            found["zero_stage"] = split.zero_stage
        if split.activation_checkpointing:
            found["activation_checkpointing"] = "full"
        return {**found, "batch_size": samples, "gradient_accumulation_steps": number, **self.options}

    @property
    def step_samples(self) -> int:
        """Samples of a step on all ranks."""
        split = self.split
        return split.micro_batch * split.num_micro_batches * split.dims.data * split.dims.shard


class _Residual(nn.Module):
    """Two convolutions beside the identity, as in He et al., 2015 (arXiv:1512.03385)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.second = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norms[0](self.first(x)))
        found: Tensor = torch.relu(x + self.norms[1](self.second(y)))
        return found


def _convnet(width: int, blocks: int, side: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        *(_Residual(width) for _ in range(blocks)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, _CLASSES),
    )


class _Linear(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.relu(self.linear(x))
        return found


def _mlp(width: int, depth: int) -> nn.Module:
    return nn.Sequential(*(_Linear(width) for _ in range(depth)), nn.Linear(width, _CLASSES))


def _llama(width: int, layers: int, length: int, vocabulary: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            num_key_value_heads=width // 128,
            max_position_embeddings=length,
            attn_implementation="sdpa",
            use_cache=False,
        )
    )


def build(kind: str, size: tuple[int, ...]) -> nn.Module:
    """The model of a row, with the same values each time."""
    torch.manual_seed(0)
    return {"llama": _llama, "convnet": _convnet, "mlp": _mlp}[kind](*size)


def batch_of(kind: str, size: tuple[int, ...], number: int) -> tuple[Tensor, Tensor]:
    """Inputs and targets of `number` samples."""
    if kind == "llama":
        _, _, length, vocabulary = size
        return torch.randint(0, vocabulary, (number, length)), torch.randint(0, vocabulary, (number, length))
    classes = torch.randint(0, _CLASSES, (number,))
    if kind == "convnet":
        return torch.randn(number, 3, size[2], size[2]), classes
    return torch.randn(number, size[0]), classes


class _Clock(Callback):
    """Writes the seconds of each step of rank 0."""

    def __init__(self, path: Path) -> None:
        self._path, self._times = path, list[float]()

    def on_step_end(self, context: Any) -> None:
        self._times.append(perf_counter())

    def on_run_end(self, context: Any, status: str) -> None:
        self._path.write_text(json.dumps(self._times), encoding="utf-8")


def measured_seconds(run: TimedRun, steps: int) -> tuple[float, dict[str, float]]:
    """Median time of a step of a real run after the first ones, on rank 0, and the mean seconds of its phases
    as the run recorded them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "steps.json"
        fields = {"log_every_n_steps": _WARM_UP, "max_steps": steps + _WARM_UP, **run.fields}
        trainer = make_trainer(
            build(run.kind, run.size), run.split.dims.world_size, callbacks=[_Clock(path)], **fields
        )
        samples = run.step_samples * (steps + _WARM_UP)
        history = trainer.fit(TensorDataset(*batch_of(run.kind, run.size, samples)))
        times = json.loads(path.read_text(encoding="utf-8"))
    seconds = median(b - a for a, b in zip(times[_WARM_UP - 1 :], times[_WARM_UP:], strict=False))
    logs = history.logs[1:]
    shares = {
        name.removeprefix("time_"): sum(log.get(name, 0.0) for log in logs) / len(logs)
        for name in logs[0]
        if name.startswith("time_")
    }
    return seconds, {name: share * seconds for name, share in shares.items()}
