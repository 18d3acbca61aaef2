"""What codecs allocate, as recorded from the code that exchanges gradients: counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from distributed.config.compression import CompressionSection
from distributed.errors import UserError
from distributed.operations.planning import codec_trace
from distributed.operations.planning.codec_trace import ExchangeOptions
from distributed.operations.planning.collect_facts import collect_facts, facts_source
from distributed.planner.estimates.model_facts import BucketFacts, Cut, ExchangeFacts, Kind, ParameterFacts
from distributed.planner.estimates.replicated_layout import filled_buckets

ROWS, COLUMNS = 512, 256
DENSE = 4 * ROWS * COLUMNS


def exchange(codec: str, copies: int = 2, cap: float = 25.0, **options: Any) -> ExchangeFacts:
    """That of one weight, or of two with a bias each."""
    model = nn.Linear(COLUMNS, ROWS, bias=False)
    batch = torch.zeros(4, COLUMNS), torch.zeros(4, ROWS)
    section = CompressionSection(codec=codec, **options.pop("section", {}))
    given = ExchangeOptions(section, **options)
    source = facts_source(model, batch, given, loss_fn=nn.MSELoss(), bucket_cap_mb=cap)
    found = source(Cut(codec=codec, copies=copies)).exchange
    assert found is not None
    return found


def peaks(bucket: BucketFacts) -> tuple[int, int, int]:
    """Bytes that are kept, at most live besides, and live besides when the sums are there."""
    now = most = 0
    for kind, number in (*bucket.begun, *bucket.finished):
        now += {Kind.ALLOCATE: 1, Kind.FREE: -1}.get(kind, 0) * bucket.sizes[number] if kind < 2 else 0
        most = max(most, now)
    return sum(bucket.sizes[: bucket.kept]), most, now


def test_a_cast_without_feedback_keeps_nothing() -> None:
    (bucket,) = exchange("fp16").buckets
    kept, most, after = peaks(bucket)
    assert kept == 0
    # The total, and this rank's part of it.
    assert after == 2 * DENSE
    # Beside both, when the error of the sum is taken off. In 32 bits, of the rows that this rank adds up: the
    # sum and the difference. In 16 bits: the encoded gradient, the rows that have arrived, their encoded sum
    # and its copy that was sent, all sums as they have arrived, and in the order of the rows.
    assert most == (2 + 0.5 + 0.5 + 0.5 + 0.5 + 0.25 + 0.25 + 0.5 + 0.5) * DENSE


def test_feedback_keeps_a_residual_of_each_gradient() -> None:
    (bucket,) = exchange("fp16", section={"error_feedback": True}).buckets
    assert peaks(bucket)[0] == DENSE
    # A step that may be skipped keeps the residual of the step before beside its own.
    (revocable,) = exchange("fp16", section={"error_feedback": True}, revocable=True).buckets
    assert peaks(revocable)[2] == peaks(bucket)[2] + DENSE


def test_factors_are_kept_and_added_up() -> None:
    (bucket,) = exchange("powersgd", section={"rank": 8}).buckets
    right, left = 4 * 8 * COLUMNS, 4 * 8 * ROWS
    assert peaks(bucket)[0] == DENSE + right
    sums = [number for kind, number in (*bucket.begun, *bucket.finished) if kind == Kind.COLLECTIVE]
    assert sums == [left, right]


@pytest.mark.parametrize("codec", ["top-k", "random-k"])
def test_codecs_that_read_values_are_recorded_with_some(codec: str) -> None:
    """The total, this rank's part of it, and a residual."""
    (bucket,) = exchange(codec).buckets
    kept, most, after = peaks(bucket)
    assert kept == DENSE
    assert 2 * DENSE <= after <= 2.1 * DENSE
    assert most < 3 * DENSE


def test_values_of_many_elements_are_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_trace, "_MOST_VALUES", 1000)
    assert exchange("int8").buckets
    with pytest.raises(UserError, match="depends on the values of gradients") as caught:
        exchange("top-k")
    assert caught.value.got == f"top-k with {ROWS * COLUMNS} elements"


def test_what_arrives_grows_with_the_ranks() -> None:
    """All payloads are gathered under top-k: ranks times an index and a value of each element."""
    two, eight = (peaks(exchange("top-k", copies, section={"ratio": 0.25}).buckets[0]) for copies in (2, 8))
    sent = (4 + 4) * ROWS * COLUMNS // 4
    assert eight[1] >= 8 * sent + 2 * DENSE
    assert two[1] < eight[1]


def test_buckets_are_those_of_the_reducer() -> None:
    from distributed.parallel.gradient_reducer import _buckets

    shapes = [(300,), (100,), (50,), (2000,), (10,)]
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    facts = [ParameterFacts("", shape, 4, True, 0) for shape in shapes]
    theirs = _buckets(parameters, 1400, dict.fromkeys(parameters))
    number: dict[Tensor, int] = {p: at for at, p in enumerate(parameters)}
    assert filled_buckets(facts, 1400) == [[number[p] for p in bucket] for bucket in theirs]
    assert filled_buckets(facts, 1400) == [[4], [3], [2, 1], [0]]


@pytest.mark.parametrize(
    ("targets", "counts"),
    [(torch.zeros(4, dtype=torch.long), False), (torch.tensor([0, -100]), True), (None, True)],
)
def test_masked_targets_delay_the_exchange(targets: Tensor | None, counts: bool) -> None:
    model, batch = nn.Linear(8, 4), (torch.zeros(2, 8), torch.zeros(2, dtype=torch.long))
    assert collect_facts(model, batch, targets=targets).counts_targets == counts
    assert exchange("fp16").early
    assert not exchange("fp16", in_backward=False).early
