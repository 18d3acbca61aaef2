"""Bytes that a block's forward leaves for backward, counted from a timeline."""

from __future__ import annotations

from distributed.planner.estimates.model_facts import Kind, ModelFacts, Size


def saved_bytes(facts: ModelFacts, block: int) -> Size:
    """Count what is allocated in `block`, but not in one inside of it, and live when backward begins."""
    inside, live = [0], dict[int, int]()
    for kind, number in facts.first.events[: facts.first.events.index((Kind.BACKWARD, 0))]:
        if kind == Kind.ENTER_FORWARD:
            inside.append(number)
        elif kind == Kind.LEAVE_FORWARD:
            inside.pop()
        elif kind == Kind.ALLOCATE:
            live[number] = inside[-1]
        elif kind == Kind.FREE:
            live.pop(number, None)
    sizes = [facts.first.sizes[number] for number, owner in live.items() if owner == block]
    return Size(sum(size.fixed for size in sizes), sum(size.per_sample for size in sizes))
