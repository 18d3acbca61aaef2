"""A process that serves many connections raises its limit of open descriptors."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from datetime import timedelta

import pytest

from distributed.communication.rendezvous import listen, serve
from distributed.system.descriptors import allow_descriptors

LOW, HIGH = 600, 2000


@pytest.fixture
def hard() -> Iterator[int]:
    """The hard limit, above a soft limit of `LOW`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (LOW, hard))
    yield hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def soft_limit() -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_store_of_many_ranks_may_open_as_many_descriptors(hard: int) -> None:
    serve(listen("127.0.0.1", 0), "127.0.0.1", 2, timedelta(seconds=5))
    assert soft_limit() == LOW
    serve(listen("127.0.0.1", 0), "127.0.0.1", HIGH, timedelta(seconds=5))
    assert soft_limit() >= HIGH


def test_the_limit_is_never_lowered_nor_above_the_hard_one(hard: int) -> None:
    allow_descriptors(10)
    assert soft_limit() == LOW
    allow_descriptors(hard + 1)
    assert soft_limit() == hard
