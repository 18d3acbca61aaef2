"""Hostile checkpoints are refused or restored exactly: a part of the campaign of 10,000 cases."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.campaigns.hostile_checkpoints.cases import BAD, outcomes_of


@pytest.mark.slow
def test_hostile_checkpoints_are_refused_or_restored_exactly(tmp_path: Path) -> None:
    outcomes = outcomes_of(tmp_path, range(200), seed=1)
    assert [outcome for outcome in outcomes if outcome.verdict in BAD] == []
    assert len([outcome for outcome in outcomes if outcome.verdict == "refused"]) > 50
