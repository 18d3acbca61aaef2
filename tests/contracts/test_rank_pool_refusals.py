"""When the ranks of a pool may go on after a run that they refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distributed.errors import UserError
from distributed.resilience.failure_reports import FailureReport
from distributed.testing.rank_pool import _is_one_refusal


def refusal(rank: int, text: str = "rank {}: a layer has no gradient", allowed: str = "w") -> FailureReport:
    error = UserError(text.format(rank), field="a", allowed=allowed, remedy="Freeze it")
    return FailureReport.from_error(error, rank)


def crash(rank: int) -> FailureReport:
    return replace(refusal(rank), user_error=None)


@pytest.mark.parametrize(
    ("reports", "one"),
    [
        ([refusal(0), refusal(1), refusal(2)], True),
        ([refusal(0, "the same"), refusal(1, "the same")], True),
        # Ranks that miss other parameters have begun other collectives.
        ([refusal(0, allowed="v"), refusal(1)], False),
        ([refusal(0, "rank 1: lost"), refusal(1, "rank 0: lost")], False),
        ([refusal(0), crash(1)], False),
        ([refusal(0), None], False),
        ([crash(0), crash(1)], False),
    ],
)
def test_ranks_go_on_if_all_refuse_in_the_same_words(reports: list[FailureReport | None], one: bool) -> None:
    """But for the number of the rank that speaks."""
    assert _is_one_refusal(reports) is one
