"""Validator: every validation sample counts exactly once, or the run fails (C5)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from time import perf_counter
from typing import Any

import torch

from distributed.communication.equal_values import differences, have_equal
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
        feeds: the validation sets of this rank by name; a single one is called "".
    """

    def __init__(self, backend: Backend, feeds: Mapping[str, Feed]) -> None:
        self.backend, self.feeds = backend, feeds

    def validate(self) -> dict[str, float]:
        """``{"val_loss": ..., "val_<metric>": ...}`` over all ranks and sets, and the same for each set with
        a name, ``val_<set>_loss``; empty without data. Collective.

        Raises:
            UserError: no validation sample.
            RuntimeError: samples counted differ from the dataset's length.
        """
        if not self.feeds:
            return {}
        started = perf_counter()
        self.backend.set_training(False)
        own: dict[str, tuple[float, float]] = {}
        found: dict[str, tuple[float, float]] = {}
        with self.backend.undisturbed():
            for name, feed in self.feeds.items():
                for metric, pair in self._evaluate(feed).items():
                    if name:
                        own[f"val_{name}_{metric}"] = pair
                    before = found.get(f"val_{metric}", (0.0, 0.0))
                    found[f"val_{metric}"] = (before[0] + pair[0], before[1] + pair[1])
        self.backend.set_training(True)
        self.backend.timers.add("validation", perf_counter() - started)
        return {
            name: total / count if count else float("nan") for name, (total, count) in (found | own).items()
        }

    def _evaluate(self, feed: Feed) -> dict[str, tuple[float, float]]:
        """``{metric: (sum, count)}`` of a set over all ranks. Collective."""
        sums: dict[str, list[Any]] = {}
        counted = expected = 0
        enter = self.backend.timers.enter
        enter("validation")
        for window in feed.windows(0):
            enter("validation")
            for name, (total, count) in self.backend.evaluate_window(window).items():
                pair = sums.setdefault(name, [0.0, 0.0])
                pair[0], pair[1] = pair[0] + _double(total), pair[1] + _double(count)
            counted += sum(micro.num_samples for micro in window.micro_batches)
            expected += window.num_samples
        # Of ranks that share a model, only some see the output, and with it the metrics.
        names = list(sums)
        if not have_equal(self.backend, names):
            names = list(dict.fromkeys(name for part in self.backend.gather_objects(names) for name in part))
        flat = [float(value) for name in names for value in sums.get(name, (0.0, 0.0))]
        counted_all, *reduced = self.backend.all_reduce([float(counted), *flat])
        counted = int(counted_all) // self.backend.world.model_parallel_size
        _check_count(counted, feed.num_read or feed.source.length or expected, feed.source.argument)
        pairs = zip(reduced[::2], reduced[1::2], strict=True)
        return dict(zip(names, pairs, strict=True))


def _check_count(counted: int, expected: int, argument: str) -> None:
    if expected == 0:
        raise UserError(
            "validation data yielded no sample",
            field=argument,
            remedy=f"Check the source it reads from, or leave {argument} out",
        )
    if counted != expected:
        raise RuntimeError(
            f"validation counted {counted} samples of {expected} in {argument}: some were"
            " evaluated twice or not at all (contract C5)"
        )


def check_same_data(plan: RunPlan, backend: Backend, task: Task) -> None:
    """Ranks that a launcher started built their own datasets: refuse different ones. Collective.

    Raises:
        UserError: lengths or first samples differ; names the ranks.
    """
    if plan.mode != "join" or backend.world.size == 1 or not plan.config.data.verify:
        return
    sources = [source for source in (task.train_data, *task.val_data.values()) if source is not None]
    arguments = [source.argument for source in sources]
    for rank, first, others in differences(backend, arguments):
        raise UserError(
            f"the ranks were given different data: rank {rank} has {', '.join(others)}",
            field="val_loader",
            got=", ".join(first),
            allowed="the same arguments on all ranks",
            remedy="Give every rank the same training and validation sets",
        )
    for source in sources:
        if not source.is_map:
            continue
        for rank, (usual, _), (length, _) in differences(backend, (_length(source), _fingerprint(source))):
            what = (
                f"{length} samples, rank 0 has {usual}"
                if length != usual
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
