"""Codec: what goes in comes out, with its type and its bits, and nothing else goes in."""

from __future__ import annotations

import json
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from enum import IntEnum
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from distributed.checkpoint.codec import decode, encode
from distributed.errors import UserError

KEYS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.recursive(KEYS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
VALUES = st.recursive(
    HASHABLE | st.floats() | st.sets(HASHABLE, max_size=3) | st.frozensets(HASHABLE, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.builds(deque, st.lists(inner, max_size=4), st.none() | st.integers(0, 3))
        | st.dictionaries(HASHABLE | st.just("$"), inner, max_size=4)
        | st.dictionaries(HASHABLE, st.integers(), max_size=3).map(Counter)
    ),
    max_leaves=20,
)


def through_json(value: Any) -> Any:
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


def fingerprint(value: Any) -> Any:
    """Type and bits, comparable: 1, 1.0 and True differ, nan equals nan, -0.0 is not 0.0."""
    kind = type(value).__name__
    if isinstance(value, float):
        return kind, "nan" if math.isnan(value) else value.hex()
    if isinstance(value, dict):
        return kind, [(fingerprint(k), fingerprint(v)) for k, v in value.items()]
    if isinstance(value, set | frozenset):
        return kind, sorted(map(repr, map(fingerprint, value)))
    if isinstance(value, deque):
        return kind, value.maxlen, [fingerprint(item) for item in value]
    if isinstance(value, list | tuple):
        return kind, [fingerprint(item) for item in value]
    return kind, repr(value)


@pytest.mark.slow
@given(VALUES)
def test_any_nesting_comes_back_with_its_types(value: Any) -> None:
    assert fingerprint(through_json(value)) == fingerprint(value)


def test_huge_integers_and_mapping_types() -> None:
    assert through_json(7**6000) == 7**6000
    counts = defaultdict(list, {3: [1]})
    assert fingerprint(through_json(counts)) == fingerprint({3: [1]})
    assert through_json(OrderedDict(a=1, b=2)) == {"a": 1, "b": 2}


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8,
          torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)], ids=str)
def test_tensors_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    back = through_json({"t": tensor})["t"]
    assert back.dtype == dtype
    assert back.shape == tensor.shape
    assert torch.equal(back.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
    if back.numel():
        back.zero_()  # owns writable memory


@pytest.mark.parametrize("value", [
    numpy.arange(6, dtype=">i4").reshape(2, 3), numpy.float32("nan"), numpy.float64(-0.0), numpy.bool_(True),
    numpy.array("text"), numpy.zeros((0, 2)), numpy.asfortranarray(numpy.eye(3)), numpy.array(3, dtype="u2"),
], ids=repr)  # fmt: skip
def test_numpy_values(value: Any) -> None:
    back = through_json([value])[0]
    assert type(back) is type(value)
    assert back.shape == value.shape
    assert back.dtype == value.dtype.newbyteorder("=")
    assert numpy.array_equal(back, value, equal_nan=back.dtype.kind == "f")


def anneal(step: int) -> float:
    return 1.0 / step


class Pair(NamedTuple):
    a: int


class Level(IntEnum):
    LOW = 1


@pytest.mark.parametrize(("value", "path"), [
    ({"_schedulers": [{}, {"anneal_func": anneal}]}, "scheduler._schedulers[1].anneal_func"),
    ({1: {"x y": (0, lambda: 0)}}, "scheduler[1]['x y'][1]"),
    ({"pair": Pair(1)}, "scheduler.pair"),
    ({"level": Level.LOW}, "scheduler.level"),
    ({"objects": numpy.array([None])}, "scheduler.objects"),
    ({"sparse": torch.eye(2).to_sparse()}, "scheduler.sparse"),
    ({"meta": torch.empty(1, device="meta")}, "scheduler.meta"),
    ({"dtype": torch.float32}, "scheduler.dtype"),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_anything_else_is_refused_by_its_path(value: Any, path: str) -> None:
    with pytest.raises(UserError) as caught:
        encode(value, "scheduler")
    assert f"'{path}'" in str(caught.value)


def test_a_real_scheduler_that_holds_a_function_is_named() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, anneal_object)
    with pytest.raises(UserError, match=r"scheduler\.lr_lambdas\[0\]"):
        encode({**scheduler.state_dict(), "lr_lambdas": scheduler.lr_lambdas}, "scheduler")


def anneal_object(step: int) -> float:
    return 1.0


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(UserError, match=r"state\[0\]\.again.*contains itself"):
        encode(loop)
    shared = [1]
    assert through_json([shared, shared]) == [[1], [1]]


@pytest.mark.parametrize("data", [
    {"$": "os.system", "v": "x"}, {"$": ["tuple"], "v": []}, {"$": "tuple"}, {"$": "int", "v": 3.5},
    {"$": "tensor", "dtype": "load", "shape": [1], "v": ""}, {"$": "dict", "v": [[1]]},
    {"$": "ndarray", "dtype": "O", "shape": [1], "v": "AAAAAAAAAAA="}, {"$": "bytes", "v": "%%"},
    {"$": "dict", "v": [[[], 1]]}, {"$": "deque", "v": [1, [1, 2]]}, {"$": "deque", "v": [-1, []]},
    {"$": "deque", "v": [2]}, {"$": "deque", "v": ["2", []]},
], ids=str)  # fmt: skip
def test_foreign_data_is_a_value_error(data: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode([data])


@pytest.mark.parametrize("value", [
    2**70, math.inf, b"ab", (1,), {1}, frozenset({1}), {1: 2}, Counter("a"), torch.ones(2), numpy.ones(2),
    numpy.float64(1.5), deque([1]),
], ids=lambda value: type(value).__name__)  # fmt: skip
@pytest.mark.parametrize("more", ["v2", "$2", "dtype2"])
def test_a_key_that_nothing_reads_is_refused(value: Any, more: str) -> None:
    """Decoded, it would be another value than the file holds."""
    kind = encode(value)["$"]
    with pytest.raises(
        ValueError, match=rf"damaged '{kind}'.*its keys are .*'{re.escape(more)}'.*, not \['\$'"
    ):
        decode([{**encode(value), more: encode(value)["v"]}])


@pytest.mark.parametrize("kind", ["set", "frozenset"])
def test_a_set_that_holds_a_value_twice_is_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="a set holds a value twice"):
        decode({"$": kind, "v": [1, 2, 1.0]})


def test_the_smallest_integer_of_64_bits_is_read_in_both_spellings() -> None:
    assert decode(-(2**63)) == through_json(-(2**63)) == decode({"$": "int", "v": "-0x8000000000000000"})
