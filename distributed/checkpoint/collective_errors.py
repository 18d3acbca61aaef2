"""Propagate failures to all ranks, so that all raise the same one and none waits without end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from distributed.errors import UserError
from distributed.interfaces.collectives import Ranks
from distributed.interfaces.placement import World

__all__ = ["Ranks", "agree", "complete", "on_rank_zero"]

T = TypeVar("T")


def agree(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Run `action` on every rank; collective.

    Returns:
        Every rank's result, in rank order.

    Raises:
        OSError, UserError, RuntimeError: the action failed on some rank: the error of the
            first such rank, the same on all of them.
    """
    result, error, cause = _attempt(ranks, action)
    outcomes = ranks.gather_objects((result, error))
    for _, failure in outcomes:
        if failure is not None:
            raise failure from cause
    return [value for value, _ in outcomes]


def complete(ranks: Ranks, action: Callable[[], object]) -> None:
    """Run `action` on every rank; collective. As `agree` without the results, for which one number is summed
    unless the action has failed on some rank.

    Raises:
        OSError, UserError, RuntimeError: as `agree`.
    """
    _, error, cause = _attempt(ranks, action)
    if ranks.all_reduce([float(error is not None)])[0]:
        failures = ranks.gather_objects(error)
        raise next(failure for failure in failures if failure is not None) from cause


def on_rank_zero(ranks: Ranks, action: Callable[[], T]) -> T:
    """Run `action` on rank 0 alone and return its result on every rank; collective.

    Raises:
        OSError, UserError, RuntimeError: what it raised, the same on all ranks.
    """
    outcome: tuple[Any, BaseException | None] = (None, None)
    cause = None
    if ranks.world.rank == 0:
        result, error, cause = _attempt(ranks, action)
        outcome = (result, error)
    value, failure = ranks.broadcast_object(outcome)
    if failure is not None:
        raise failure from cause
    return value  # type: ignore[no-any-return]


def _attempt(
    ranks: Ranks, action: Callable[[], T]
) -> tuple[T | None, BaseException | None, BaseException | None]:
    try:
        return action(), None, None
    except Exception as error:  # noqa: BLE001 - raised again below, on every rank
        return None, _portable(error, ranks.world), error


def _portable(error: Exception, world: World) -> Exception:
    """The same error in a form that any process can unpickle."""
    if isinstance(error, UserError):
        return error
    where = f"rank {world.rank} on {world.host}"
    if isinstance(error, OSError):
        if error.errno is None:
            kind = type(error) if type(error).__module__ == "builtins" else OSError
            return kind(f"{error} ({where})")
        return OSError(error.errno, f"{error.strerror} ({where})", error.filename)
    return RuntimeError(f"{where}: {type(error).__name__}: {error}")
