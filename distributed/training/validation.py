"""Validator: every validation sample counts exactly once, or the run fails (C5)."""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter
from typing import Any

import torch

from distributed.data import Feed, Source
from distributed.data.fingerprint import fingerprint
from distributed.data.sample_rng import RandomStreams
from distributed.errors import UserError
from distributed.interfaces.backend import Backend
from distributed.interfaces.plan import RunPlan
from distributed.interfaces.task import Task


class Validator:
    """Evaluates the model on the validation data.

    Args:
        feed: the validation data of this rank, None without.
    """

    def __init__(self, backend: Backend, feed: Feed | None) -> None:
        self.backend, self.feed = backend, feed

    def validate(self) -> dict[str, float]:
        """``{"val_loss": ..., "val_<metric>": ...}`` over all ranks; empty without data. Collective.

        Raises:
            UserError: no validation sample.
            RuntimeError: samples counted differ from the dataset's length.
        """
        if self.feed is None:
            return {}
        started = perf_counter()
        self.backend.set_training(False)
        sums: dict[str, list[Any]] = {}
        counted = expected = 0
        enter = self.backend.timers.enter
        enter("validation")
        for window in self.feed.windows(0):
            enter("validation")
            for name, (total, count) in self.backend.evaluate_window(window).items():
                pair = sums.setdefault(name, [0.0, 0.0])
                pair[0], pair[1] = pair[0] + _double(total), pair[1] + _double(count)
            counted += sum(micro.num_samples for micro in window.micro_batches)
            expected += window.num_samples
        # Of ranks that share a model, only some see the output, and with it the metrics.
        names = list(dict.fromkeys(name for part in self.backend.gather_objects(list(sums)) for name in part))
        flat = [float(value) for name in names for value in sums.get(name, (0.0, 0.0))]
        counted_all, *reduced = self.backend.all_reduce([float(counted), *flat])
        self._check_count(
            int(counted_all) // self.backend.world.model_parallel_size, self.feed.source.length or expected
        )
        self.backend.set_training(True)
        self.backend.timers.add("validation", perf_counter() - started)
        pairs = zip(reduced[::2], reduced[1::2], strict=True)
        return {
            f"val_{name}": total / count if count else float("nan")
            for name, (total, count) in zip(names, pairs, strict=True)
        }

    def _check_count(self, counted: int, expected: int) -> None:
        if expected == 0:
            raise UserError(
                "validation data yielded no sample",
                field="val_loader",
                remedy="Check the source it reads from, or leave val_loader out",
            )
        if counted != expected:
            raise RuntimeError(
                f"validation counted {counted} samples of {expected}: some were"
                " evaluated twice or not at all (contract C5)"
            )


def check_same_data(plan: RunPlan, backend: Backend, task: Task) -> None:
    """Ranks that a launcher started built their own datasets: refuse different ones. Collective.

    Raises:
        UserError: lengths or first samples differ; names the ranks.
    """
    if plan.mode != "join" or backend.world.size == 1 or not plan.config.data.verify:
        return
    for source in (task.train_data, task.val_data):
        if source is None or not source.is_map:
            continue
        found = backend.gather_objects((_length(source), _fingerprint(source)))
        for rank, (length, first) in enumerate(found):
            if (length, first) != found[0]:
                what = (
                    f"{length} samples, rank 0 has {found[0][0]}"
                    if length != found[0][0]
                    else "other first samples than rank 0"
                )
                raise UserError(
                    f"the ranks hold different datasets: rank {rank} has {what}",
                    field=source.argument,
                    remedy="Give all ranks the whole dataset, which is then sharded;"
                    " or set data.verify=false if its samples are random",
                )


def _length(source: Source) -> int:
    known = len(source.dataset) if hasattr(source.dataset, "__len__") else source.length
    return known or 0


def _fingerprint(source: Source) -> str:
    """Digest of the first three samples, drawn under one seed."""
    with RandomStreams(0):
        return fingerprint(_first_samples(source))


def _first_samples(source: Source) -> Iterator[Any]:
    for index in range(min(3, _length(source))):
        try:
            yield source.dataset[index]
        except (KeyError, IndexError, TypeError):
            return  # keyed by its sampler: only the length can be compared


def _double(value: Any) -> Any:
    # In float32, sums over a large set would lose whole samples.
    return value.double() if isinstance(value, torch.Tensor) else float(value)
