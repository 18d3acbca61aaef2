"""Compare the ranks' Flight Recorder records: which rank is behind, and which collectives differ.

torch has an analysis of its own, ``torchfrtrace``. It cannot be used here: it needs the members of every
group, which gloo does not record, and the dumps of all ranks of all hosts, and it prints its result instead
of returning it. The rules by which collectives match are torch's
(``torch/distributed/flight_recorder/components/types.py``), and a test compares the two.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from distributed.resilience.flight_records import Collective, FlightRecord
from distributed.resilience.hang_diagnosis import name_ranks

__all__ = ["Comparison", "compare"]

_UNEVEN_INPUTS = ("all_to_all", "scatter")
_UNEVEN_OUTPUTS = ("all_to_all", "gather")
_ONE_SIDED = ("broadcast", "reduce", "gather", "scatter")
"""Operations that some ranks complete without the others; no rank completes another one alone."""
_SHOWN = 6
"""Number of different collectives that a report names."""
_DEFAULT_GROUP = "default_pg"

_Calls = Mapping[int, Sequence[Collective]]
"""number of the collective -> what a rank has called under it, several where calls were coalesced."""


@dataclass(frozen=True)
class Comparison:
    """Result of `compare`.

    Attributes:
        text: sentences for a report; empty without records.
        differ: whether ranks have called different collectives, or a different number of them.
    """

    text: str = ""
    differ: bool = False


def compare(records: Sequence[FlightRecord]) -> Comparison:
    """Compare the records of the ranks of one host.

    Sequence numbers are those of one group, so that ranks are compared group by group.
    """
    told = [record for record in records if record.collectives]
    current = [record for record in told if not record.problem]
    found = [sentence for group in _groups(current) for sentence in _compare_group(group, current)]
    problems = [f"Of rank {record.rank}, {record.problem}." for record in records if record.problem]
    return Comparison(" ".join([*_last_ones(told), *found, *problems]), bool(found))


def _groups(records: Sequence[FlightRecord]) -> list[str]:
    return list(dict.fromkeys(one.group for record in records for one in record.collectives))


def _last_ones(records: Sequence[FlightRecord]) -> list[str]:
    """What each rank is in, or was in last."""
    places: dict[str, list[int]] = {}
    for record in records:
        if (last := record.last) is not None:
            places.setdefault(f"{last.describe()}, {last.state}", []).append(record.rank)
    if not places:
        return []
    shown = [f"{name_ranks(ranks)}: {place}" for place, ranks in list(places.items())[:_SHOWN]]
    rest = sum(len(ranks) for ranks in list(places.values())[_SHOWN:])
    shown += [f"{rest} more ranks elsewhere"] if rest else []
    return [f"Last collective by torch's Flight Recorder: {'; '.join(shown)}."]


def _compare_group(group: str, records: Sequence[FlightRecord]) -> list[str]:
    calls = {record.rank: _calls(record, group) for record in _members(group, records)}
    known = {rank: numbers for rank, numbers in calls.items() if numbers}
    if len(calls) < 2 or not known:
        return []
    if mismatch := _find_mismatch(known):
        return [mismatch]
    return _find_late(calls, known)


def _members(group: str, records: Sequence[FlightRecord]) -> list[FlightRecord]:
    """Records of the group's ranks: those that torch lists, all for the default group, and otherwise those
    that have called one of its collectives."""
    listed = {rank for record in records for rank in record.members.get(group, ())}
    everyone = any(
        one.description == _DEFAULT_GROUP
        for record in records
        for one in record.collectives
        if one.group == group
    )
    return [
        record
        for record in records
        if (record.rank in listed if listed else everyone)
        or any(one.group == group for one in record.collectives)
    ]


def _calls(record: FlightRecord, group: str) -> _Calls:
    calls: dict[int, list[Collective]] = {}
    for one in record.collectives:
        if one.group == group and not one.point_to_point:
            calls.setdefault(one.number, []).append(one)
    return calls


def _find_mismatch(calls: Mapping[int, _Calls]) -> str:
    """The first collective that ranks have called with different operations, or that hangs with different
    sizes; sizes that differ in a finished collective were allowed."""
    for number in sorted({number for numbers in calls.values() for number in numbers}):
        here = {rank: numbers[number] for rank, numbers in calls.items() if number in numbers}
        kinds = {rank: tuple(one.operation for one in ones) for rank, ones in here.items()}
        if len(set(kinds.values())) > 1:
            return _describe_mismatch(here, kinds, "operation")
        pending = any(not one.completed for ones in here.values() for one in ones)
        sizes = {rank: tuple(_sizes(one) for one in ones) for rank, ones in here.items()}
        if pending and len(set(sizes.values())) > 1:
            return _describe_mismatch(here, sizes, "size or dtype")
    return ""


def _sizes(one: Collective) -> tuple[object, ...]:
    """What has to be equal on all ranks."""
    inputs = None if one.operation in _UNEVEN_INPUTS else one.inputs
    outputs = None if one.operation in _UNEVEN_OUTPUTS else one.outputs
    return inputs, outputs, one.dtypes if one.inputs and one.outputs else None


def _describe_mismatch(
    calls: Mapping[int, Sequence[Collective]], kinds: Mapping[int, object], what: str
) -> str:
    # The least common kind first; of equally common ones, that of the highest rank.
    common = Counter(kinds[rank] for rank in sorted(kinds)).most_common()
    parts = []
    for kind, _ in reversed(common):
        ranks = [rank for rank in sorted(kinds) if kinds[rank] == kind]
        verb = "have" if len(ranks) > 1 else "has"
        parts.append(f"{name_ranks(ranks)} {verb} called {_describe(calls[ranks[0]])}")
    return f"The ranks differ in the {what} of a collective: {', and '.join(parts)}."


def _find_late(calls: Mapping[int, _Calls], known: Mapping[int, _Calls]) -> list[str]:
    """The ranks that have called fewer collectives than others, and the first one that they miss."""
    top = max(max(numbers) for numbers in known.values())
    late: dict[int, list[int]] = {}
    for rank, numbers in calls.items():
        if (reached := max(numbers, default=0)) < top:
            late.setdefault(reached, []).append(rank)
    found = []
    for reached, ranks in sorted(late.items())[:_SHOWN]:
        others = [rank for rank, numbers in known.items() if reached + 1 in numbers]
        if not others:
            continue  # the recorder has overwritten it
        if not any(_blocks_beyond(known[rank], reached) for rank in others):
            continue  # a broadcast that its source has sent, for example
        verb = "have" if len(ranks) > 1 else "has"
        missing = _describe(known[others[0]][reached + 1])
        found.append(
            f"{name_ranks(ranks).capitalize()} {verb} not called {missing}, which {name_ranks(others)}"
            f" {'have' if len(others) > 1 else 'has'} called."
        )
    return found


def _blocks_beyond(calls: _Calls, number: int) -> bool:
    """Whether a rank cannot have passed all its collectives after `number` without the ranks that are late.
    gloo's ``ended`` may mean that such a collective has failed."""
    later = [one for other, ones in calls.items() if other > number for one in ones]
    return any(not one.completed or one.operation not in _ONE_SIDED for one in later)


def _describe(ones: Iterable[Collective]) -> str:
    every = list(ones)
    more = f" and {len(every) - 1} more under that number" if len(every) > 1 else ""
    return f"{every[0].describe()}{more}"
