"""Operations of a Trainer's step beyond those of the hand-written loop, counted inside a rank."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from distributed import Callback

__all__ = ["BATCH", "COUNTED", "ByHand", "CountSteps", "Excess", "build", "data"]

BATCH, SAMPLES = 4, 160
"""Samples of a rank in a step, and of the data."""
COUNTED = (5, 7)
"""Steps after which counting begins and ends: between them ranks do not ask each other about signals, which
they do after steps 1, 2, 4, 8 and, once they know how long a step takes, every second."""

_NAME = "cpu:0"
"""What a rank takes for the name of a device that is no CPU. A copy to it is one operation."""
_VIEWS = {"alias", "as_strided", "detach", "lift_fresh", "select", "slice", "t", "unsqueeze", "view"}
"""Operations that compute nothing."""
_READS = {"_local_scalar_dense", "tolist", "equal", "is_nonzero", "nonzero", "masked_select", "_unique2"}
"""Operations that return a number to the host, or a shape that depends on values: the host has to wait."""


class Operations(TorchDispatchMode):
    """Counts operations of torch by name while it is active, and calls of `tolist`, which is none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self._functions = _Lists(self.calls)

    def __enter__(self) -> Operations:
        super().__enter__()
        self._functions.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._functions.__exit__(*error)
        super().__exit__(*error)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name, *_ = str(function).split(".")
        if namespace != "profiler":
            self.calls[name if namespace == "aten" else f"{namespace}.{name}"] += 1
        return function(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Excess:
    """What a rank's steps have beyond those by hand, per step.

    Attributes:
        operations: number of operations that compute; below 0 if there are less.
        reads: operations that the host waits for -> number, where there are more.
        kinds: operations of which there are more, and less, for messages.
    """

    operations: float
    reads: dict[str, float]
    kinds: str

    @classmethod
    def read(cls, path: Path) -> Excess:
        """What `CountSteps` has written."""
        written = json.loads(path.read_text(encoding="utf-8"))
        ours, theirs = Counter(written["ours"]), Counter(written["by hand"])
        steps = COUNTED[1] - COUNTED[0]
        more = {name: number / steps for name, number in (ours - theirs).items()}
        less = {name: number / steps for name, number in (theirs - ours).items()}
        operations = (_computed(ours) - _computed(theirs)) / steps
        reads = {name: number for name, number in more.items() if name in _READS}
        return cls(operations, reads, f"more: {more}, less: {less}")


def _computed(calls: Counter[str]) -> int:
    return sum(number for name, number in calls.items() if name not in _VIEWS | _READS)


class _Lists(TorchFunctionMode):
    """Counts calls of `Tensor.tolist`."""

    def __init__(self, calls: Counter[str]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.tolist:
            self._calls["tolist"] += 1
        return function(*args, **(kwargs or {}))


def build() -> nn.Module:
    """The model of both loops."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 5))


def data(masked: bool) -> tuple[Tensor, Tensor]:
    """Samples and classes; `masked` ones are sequences, of each of which one target is -100."""
    generator = torch.Generator().manual_seed(0)
    shape = (SAMPLES, 4) if masked else (SAMPLES,)
    x, y = torch.randn(*shape, 8, generator=generator), torch.randint(0, 5, shape, generator=generator)
    if masked:
        y[:, 0] = -100
    return x, y


@dataclass(frozen=True)
class ByHand:
    """The loop that a careful user writes for the same training.

    Attributes:
        wrap: ``none``, ``ddp`` or ``fsdp``.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        max_norm: to clip to.
        accumulation: micro-batches in a step.
        masked: the ranks add up the unmasked targets of a step before its forward pass.
    """

    wrap: str = "none"
    precision: str = "fp32"
    max_norm: float | None = None
    accumulation: int = 1
    masked: bool = False

    def steps(self, device: str) -> Iterator[None]:
        """Yield after each step on `device`."""
        model, (x, y) = self._model(device), data(self.masked)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
        scaler = torch.amp.GradScaler("cpu") if self.precision == "fp16" else None
        order, size = torch.randperm(len(x)), BATCH // self.accumulation
        for start in range(0, len(x) - BATCH + 1, BATCH):
            batches = []
            for first in range(start, start + BATCH, size):
                index = order[first : first + size]
                batches.append((x[index], y[index]))
            self._backward(model, batches, scaler, device)
            if scaler is not None:
                scaler.unscale_(optimizer)
            if self.max_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), self.max_norm)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
            yield

    def _model(self, device: str) -> nn.Module:
        model = build().to(device)
        if self.wrap == "ddp":
            return DistributedDataParallel(model, gradient_as_bucket_view=True)
        if self.wrap == "fsdp":
            fully_shard(model)
        return model

    def _backward(self, model: nn.Module, batches: list[Any], scaler: Any, device: str) -> None:
        share = self._share([y for _, y in batches])
        for number, (x, y) in enumerate(batches):
            with self._held_back(model, number == len(batches) - 1), self._autocast():
                output = model(x.to(device, non_blocking=True))
                target = y.to(device, non_blocking=True)
                if self.masked:
                    output, target = output.flatten(0, 1), target.flatten()
                    loss = F.cross_entropy(output, target, reduction="sum") * share
                else:
                    loss = F.cross_entropy(output, target)
                    loss = loss if len(batches) == 1 else loss / len(batches)
            (loss if scaler is None else scaler.scale(loss)).backward()

    def _share(self, targets: list[Tensor]) -> Any:
        """Of each unmasked target in the sum that DDP and FSDP average over the ranks."""
        if not self.masked:
            return 1.0
        count = sum(y.numel() - y.flatten().tolist().count(-100) for y in targets)
        if self.wrap == "none":
            return 1.0 / count
        total = torch.tensor(float(count))
        dist.all_reduce(total)
        return dist.get_world_size() / total

    def _held_back(self, model: Any, last: bool) -> Any:
        if self.wrap == "fsdp":
            model.set_requires_gradient_sync(last)
        return model.no_sync() if self.wrap == "ddp" and not last else nullcontext()

    def _autocast(self) -> Any:
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


class CountSteps(Callback):
    """Counts operations of a rank's steps and of `by_hand`'s, both after as many steps, and writes both.

    The rank then takes its device for one that is no CPU: the loop and its parts take the ways of a GPU, and
    a read of a value is an operation that shows.

    Args:
        folder: for ``<rank>.json``.
        by_hand: None to count the Trainer's alone.
        each_step: called after every step, for mutants.
    """

    all_ranks = True

    def __init__(self, folder: Path, by_hand: ByHand | None, each_step: Callable[[Any], Any] | None = None):
        self.folder, self.by_hand, self.each_step = folder, by_hand, each_step

    def on_run_start(self, context: Any) -> None:
        self._theirs = Operations() if self.by_hand is None else self._count_by_hand(self.by_hand)
        self._ours = Operations()
        context.world = context.backend.world = replace(context.world, device=_NAME)
        # Each tensor of the rank, but its batches, whose device is read by name.
        torch.Tensor.is_cpu = property(lambda self: False)  # type: ignore[assignment, misc]

    def on_step_end(self, context: Any) -> None:
        if self.each_step is not None:
            self.each_step(context)
        if context.progress.step == COUNTED[0]:
            self._ours.__enter__()
        elif context.progress.step == COUNTED[1]:
            self._ours.__exit__(None, None, None)
            found = {"ours": self._ours.calls, "by hand": self._theirs.calls}
            path = self.folder / f"{context.world.rank}.json"
            path.write_text(json.dumps(found), encoding="utf-8")

    def on_run_end(self, context: Any, status: str) -> None:
        if "is_cpu" in vars(torch.Tensor):
            del torch.Tensor.is_cpu

    @staticmethod
    def _count_by_hand(by_hand: ByHand) -> Operations:
        steps, counted = by_hand.steps(_NAME), Operations()
        for _ in range(COUNTED[0]):
            next(steps)
        with counted:
            for _ in range(*COUNTED):
                next(steps)
        return counted
