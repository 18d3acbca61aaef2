"""Wrong forms of the predicted step, each of which a test notices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from distributed.planner.estimates import facts_time
from distributed.planner.estimates.facts_time import _Step

__all__ = ["MUTANTS"]

_pass, _gathers, _accumulation = _Step._pass, _Step._gathers, _Step._accumulation
_update, _last_bucket, _exchanges = _Step._update, _Step._last_bucket, _Step._exchanges
_copies = _Step._copies


def no_recomputation(self: Any, facts: Any) -> Any:
    """Backward has the activations that were not kept."""
    passed = _pass(self, facts)
    ahead = sum(self.rates.compute(block.forward, self.split.micro_batch) for block in facts.work.blocks[1:])
    again = ahead if self.split.activation_checkpointing else 0.0
    return passed._replace(backward=passed.backward - again)


def gathers_once(self: Any, facts: Any) -> float:
    """Parameters stay gathered from forward to backward."""
    return _gathers(self, facts) / 2


def gathers_in_one_micro_batch(self: Any, facts: Any) -> float:
    """Parameters stay gathered for all micro-batches."""
    return _gathers(self, facts) / self.split.num_micro_batches


def adds_nothing(self: Any, facts: Any) -> float:
    """Gradients of later micro-batches are added in no time."""
    return 0.0


def updates_everything(self: Any, facts: Any) -> float:
    """Each rank updates all parameters."""
    ranks = self.split.dims.shard * (self.split.dims.data if self.split.zero_stage else 1)
    return _update(self, facts) * ranks


def hides_the_last_bucket(self: Any, facts: Any) -> float:
    """Also what is complete when backward ends is hidden."""
    return 0.0


def copies_into_buckets_only(self: Any, facts: Any) -> float:
    """Reduced gradients stay in their buckets."""
    return _copies(self, facts) / 2


def hooks_take_no_time(self: Any, facts: Any) -> float:
    """DDP copies gradients in no more time than the copies take."""
    return _copies(self, facts) - self.rates.replicas(sum(p.trained for p in facts.parameters))


def exchanges_in_one_direction(self: Any, facts: Any) -> float:
    """Ranks that share the model exchange activations, and no gradients of them."""
    return _exchanges(self, facts) / 2


def no_weights_are_gathered(self: Any) -> float:
    """ZeRO 1 and 2 update shards and omit the all-gather of the weights."""
    return 0.0


MUTANTS: dict[str, Callable[..., Any]] = {
    "_pass": no_recomputation,
    "_gathers": gathers_once,
    "_gathers ": gathers_in_one_micro_batch,
    "_accumulation": adds_nothing,
    "_update": updates_everything,
    "_last_bucket": hides_the_last_bucket,
    "_copies": copies_into_buckets_only,
    "_copies ": hooks_take_no_time,
    "_exchanges": exchanges_in_one_direction,
    "_updates": no_weights_are_gathered,
}
"""Method of `_Step`, with spaces behind it where it has several -> what replaces it."""
assert all(hasattr(facts_time._Step, name.strip()) for name in MUTANTS)
