"""What a script sets of `logging` and `warnings` before `fit` holds on the ranks that `fit` starts."""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from distributed import Callback
from distributed.interfaces.callback import Context
from distributed.launch.script_settings import apply_settings, read_settings
from distributed.testing.conformance import problem, small_model
from tests.support.training import make_trainer

NAMES = ("script.quiet", "script.chatty", "script.off")


class ScriptWarning(UserWarning):
    """A warning that the script's filter makes an error."""


class Observe(Callback):
    """Write and warn on every rank, and keep in a file what became of it."""

    all_ranks = True

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_run_start(self, context: Context) -> None:
        for name in NAMES:
            logging.getLogger(name).info("rank %d of %s", context.world.rank, name)
        try:
            warnings.warn("by the script", ScriptWarning, stacklevel=1)
            found = "a warning"
        except ScriptWarning:
            found = "an error"
        (self.folder / f"rank{context.world.rank}").write_text(found)


class NoDigits(logging.Filter):
    """Keeps a record of rank 1 out."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.args != (1, "script.chatty")


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """Leave this process as it was."""
    before = read_settings()
    with warnings.catch_warnings():
        yield
    for name in NAMES:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    apply_settings(before)


@pytest.mark.starts_processes
def test_levels_handlers_and_filters_reach_the_ranks(tmp_path: Path) -> None:
    handler = logging.FileHandler(tmp_path / "log.txt")
    handler.setFormatter(logging.Formatter("%(levelname)s | %(message)s"))
    handler.addFilter(NoDigits())
    for name in NAMES:
        logging.getLogger(name).addHandler(handler)
    logging.getLogger("script.quiet").setLevel(logging.WARNING)
    logging.getLogger("script.chatty").setLevel(logging.DEBUG)
    logging.getLogger("script.off").disabled = True
    warnings.simplefilter("error", ScriptWarning)
    logging.getLogger("script.chatty").info("before")
    make_trainer(small_model(), 2, batch_size=4, callbacks=[Observe(tmp_path)]).fit(problem(8))
    assert (tmp_path / "log.txt").read_text().splitlines() == [
        "INFO | before",  # a rank has not truncated the file
        "INFO | rank 0 of script.chatty",
    ]
    assert [(tmp_path / f"rank{rank}").read_text() for rank in (0, 1)] == ["an error"] * 2


def test_a_handler_that_a_rank_has_is_not_added_again() -> None:
    logger = logging.getLogger(NAMES[0])
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.addHandler(logging.NullHandler())  # of a kind that stays in the script's process
    data = read_settings()
    apply_settings(data)
    assert len(logger.handlers) == 2
    logger.handlers.clear()
    apply_settings(data)
    assert [type(handler) for handler in logger.handlers] == [logging.StreamHandler]


def test_a_handler_that_cannot_be_pickled_stays_behind(tmp_path: Path) -> None:
    logger = logging.getLogger(NAMES[0])
    logger.addHandler(logging.FileHandler(tmp_path / "log.txt", delay=True))
    logger.handlers[0].filters.append(threading.Lock())  # type: ignore[arg-type]
    data = read_settings()
    logger.handlers.clear()
    apply_settings(data)
    assert logger.handlers == []
