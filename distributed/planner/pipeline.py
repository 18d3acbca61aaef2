"""The pipeline of a run: stages of each rank, and pieces of a micro-batch as the schedule accepts them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from distributed.config import DistributedConfig
from distributed.errors import UserError
from distributed.interfaces.parallel_dims import ParallelDims
from distributed.interfaces.plan import BatchPlan

__all__ = ["MEASURABLE", "ZERO_BUBBLE", "PipelineShape", "pipeline_shape", "plain_shape"]

ZERO_BUBBLE = ("interleaved-zero-bubble", "zbv", "dualpipev")
"""Schedules that compute the gradients of weights apart from those of activations."""

MEASURABLE = ("gpipe", "1f1b")
"""Schedules of one stage a rank, whose waiting is longer than what the program itself takes."""

_DEFAULT = "1f1b"


@dataclass(frozen=True)
class _Rule:
    """What a schedule accepts.

    Attributes:
        stages: of a rank: the fewest and the most; None for any number.
        accepts: whether it can have ``(num_microbatches, num_ranks)``.
        text: the same in words.
        folded: the stages of the ranks form a V: the first rank has the first and the last stage.
    """

    stages: tuple[int, int | None]
    accepts: Callable[[int, int], bool]
    text: str
    folded: bool = False


def _any(num_microbatches: int, num_ranks: int) -> bool:
    return True


def _in_rounds(num_microbatches: int, num_ranks: int) -> bool:
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


_RULES: dict[str, _Rule] = {
    "gpipe": _Rule((1, 1), _any, "any number of micro-batches"),
    "1f1b": _Rule((1, 1), lambda m, w: m >= w, "a micro-batch or more for each rank"),
    "interleaved-1f1b": _Rule((2, None), _in_rounds, "M micro-batches, a multiple of M // ranks"),
    "looped-bfs": _Rule((2, None), _any, "any number of micro-batches"),
    "interleaved-zero-bubble": _Rule((2, None), _in_rounds, "M micro-batches, a multiple of M // ranks"),
    "zbv": _Rule((2, 2), _any, "any number of micro-batches", folded=True),
    "dualpipev": _Rule(
        (2, 2), lambda m, w: m >= 2 * w, "two micro-batches or more for each rank", folded=True
    ),
}


@dataclass(frozen=True)
class PipelineShape:
    """How a pipeline is laid out.

    Attributes:
        schedule: name of the order of forward and backward.
        num_ranks: ranks along the axis.
        num_stages: stages over all of them.
        pieces: into how many pieces each micro-batch is cut.
        num_microbatches: pieces in one optimizer step.
        piece_rows: samples of a full piece.
    """

    schedule: str
    num_ranks: int
    num_stages: int
    pieces: int
    num_microbatches: int
    piece_rows: int

    def rank_of(self, stage: int) -> int:
        """Index, along the axis, of the rank that has `stage`."""
        turn, place = divmod(stage, self.num_ranks)
        return self.num_ranks - 1 - place if _RULES[self.schedule].folded and turn % 2 else place

    def stages_of(self, rank: int) -> list[int]:
        """The stages of a rank, in order."""
        return [stage for stage in range(self.num_stages) if self.rank_of(stage) == rank]

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed apart from those of activations."""
        return self.schedule in ZERO_BUBBLE

    @property
    def bubble(self) -> float:
        """Share of a step in which a rank waits, if forward, backward to activations and backward to weights
        of all stages take equal time and communication none.

        Source: Narayanan et al., 2021 (arXiv:2104.04473); Qi et al., 2024 (arXiv:2401.10241, 2405.15362).
        """
        v, m = self.num_stages // self.num_ranks, self.num_microbatches
        work = m * v * (3 if self.splits_backward else 1)
        return (self.num_ranks - 1) / (work + self.num_ranks - 1)


_SPLIT = {
    "compile": (("none",), "a compiled block computes both in one"),
    "activation_checkpointing": (("none",), "a block that is computed again computes both in one"),
}
"""Field -> values with which the schedules of `ZERO_BUBBLE` are exact, and why not with others."""


def _check_settings(config: DistributedConfig, schedule: str, shards: int) -> None:
    """Raise a UserError for settings that `schedule` cannot train exactly with.

    Args:
        shards: ranks over which parameters are sharded.
    """
    splits = schedule in ZERO_BUBBLE
    for field, (allowed, why) in _SPLIT.items() if splits else ():
        if getattr(config, field) not in allowed:
            raise UserError(
                f"{schedule} computes the gradients of weights and of activations apart: {why}",
                field=field,
                got=getattr(config, field),
                allowed=", ".join(map(str, allowed)),
                remedy="Choose one of these, or parallel.schedule=1f1b",
            )
    if splits and shards > 1:
        raise UserError(
            f"{schedule} computes the gradients of weights and of activations apart, and FSDP reduces them"
            " when it has seen one of the two",
            field="parallel.schedule",
            got=schedule,
            allowed="gpipe, 1f1b, interleaved-1f1b, looped-bfs with shards",
            remedy="Choose one of these, or backend=pytorch-ddp",
        )


def plain_shape(schedule: str, num_ranks: int, num_microbatches: int) -> PipelineShape:
    """The shape with the fewest stages, for the flags of ``bench pipeline``.

    Raises:
        UserError: the schedule does not accept the numbers.
    """
    rule = _RULES[schedule]
    if num_ranks < 2 or not rule.accepts(num_microbatches, num_ranks):
        fits = [m for m in range(1, 4 * num_ranks + 1) if rule.accepts(m, num_ranks)]
        raise UserError(
            f"{schedule} on {num_ranks} ranks needs {rule.text}",
            field="--ranks" if num_ranks < 2 else "--microbatches",
            got=num_ranks if num_ranks < 2 else num_microbatches,
            allowed="2 or more" if num_ranks < 2 else f"{', '.join(map(str, fits[:8]))}, ...",
        )
    stages = num_ranks * rule.stages[0]
    return PipelineShape(schedule, num_ranks, stages, num_microbatches, num_microbatches, 1)


def pipeline_shape(config: DistributedConfig, dims: ParallelDims, batch: BatchPlan) -> PipelineShape:
    """Lay out the pipeline of `dims`.

    Raises:
        UserError: the schedule does not accept the stages, the micro-batches or other settings, with what it
            accepts.
    """
    section = config.parallel
    schedule = section.schedule or _DEFAULT
    _check_settings(config, schedule, dims.shard)
    rule, ranks = _RULES[schedule], dims.pipeline
    num_stages = len(section.stages) or ranks * rule.stages[0]
    fewest, most = rule.stages
    if num_stages % ranks or not fewest <= num_stages // ranks <= (most or num_stages):
        counts = [ranks * n for n in range(fewest, (most or fewest + 2) + 1)]
        raise UserError(
            f"{ranks} ranks under {schedule} cannot have {num_stages} stages",
            field="parallel.stages",
            got=f"{num_stages} names",
            allowed=", ".join(map(str, counts)) + ("" if most else ", ..."),
            remedy="Name the first module of each stage, or leave it out",
        )
    pieces = _pieces(config, schedule, ranks, batch)
    total = batch.gradient_accumulation_steps * pieces
    return PipelineShape(schedule, ranks, num_stages, pieces, total, batch.batch_size // pieces)


def _pieces(config: DistributedConfig, schedule: str, ranks: int, batch: BatchPlan) -> int:
    rule, accumulation, size = _RULES[schedule], batch.gradient_accumulation_steps, batch.batch_size
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    fitting = [n for n in divisors if rule.accepts(accumulation * n, ranks)]
    given = config.parallel.num_microbatches
    if given is None and fitting:
        return fitting[0]
    if given in fitting:
        return given
    if given is not None and given not in divisors:
        raise UserError(
            f"batch_size={size} cannot be cut into {given} equal pieces",
            field="parallel.num_microbatches",
            got=given,
            allowed=", ".join(map(str, fitting)) or None,
            remedy="Choose one of these, or another batch_size",
        )
    others = [name for name, r in _RULES.items() if r.accepts(accumulation, ranks) and r.stages[0] == 1]
    raise UserError(
        f"{schedule} on {ranks} ranks needs {rule.text} in a step, and batch_size={size}"
        f" with gradient_accumulation_steps={accumulation} makes"
        f" {accumulation * given if given else f'at most {accumulation * size}'}",
        field="parallel.num_microbatches",
        got=given,
        allowed=", ".join(map(str, fitting)) or None,
        remedy="Raise batch_size or gradient_accumulation_steps"
        + (f", or use parallel.schedule={others[0]}" if others else ""),
    )
