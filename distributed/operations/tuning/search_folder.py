"""SearchFolder: the files of a search."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distributed.errors import UserError
from distributed.operations.tuning.trial import ORDER, TrialOrder
from distributed.operations.tuning.trial_record import Trial, load_trial
from distributed.redaction import redact
from distributed.system.private_files import draft_of, write_private

__all__ = ["SearchFolder", "new_folder"]


class SearchFolder:
    """The folder of a search: its arguments, what its trials run, and their results.

    Attributes:
        results: path of the file with all trials.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.results = path, path / "results.json"
        self._search = path / "search.json"

    def claim(self, asked: dict[str, Any], resume: bool) -> dict[str, Any]:
        """Create the folder for a search with the arguments `asked`, or resume the same search in it.

        Returns:
            What was noted of the search before; empty for a new one.

        Raises:
            UserError: the folder holds a search and `resume` is false, or its arguments differ.
        """
        if not self._search.exists():
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write(self._search, {"asked": asked})
            return {}
        known = _read(self._search)
        if not resume:
            raise UserError(
                "this folder already holds a search",
                field="output_dir",
                got=str(self.path),
                remedy="Resume it (resume=True), or choose another folder",
            )
        for field, value in asked.items():
            # A folder of an earlier version lacks some arguments.
            if redact(known["asked"].get(field, value)) != redact(value):
                raise UserError(
                    f"the search in {self.path} was started with {known['asked'][field]!r}",
                    field=field,
                    got=value,
                    remedy="Resume it with the same value, or start another search in another folder",
                )
        return known

    def note(self, **more: Any) -> None:
        """Add to what `claim` returns when the search is resumed."""
        _write(self._search, {**_read(self._search), **more})

    def write_order(self, order: TrialOrder) -> None:
        """Write what every trial runs.

        Raises:
            UserError: its function cannot be pickled.
        """
        from distributed.communication.task_file import save_task

        with draft_of(self.path / ORDER) as draft:
            draft.unlink(missing_ok=True)
            try:
                save_task(order, draft)
            except Exception as error:
                raise UserError(
                    f"train_fn cannot be pickled for the trials: {type(error).__name__}: {error}",
                    field="train_fn",
                    remedy="Open files, locks and connections inside the function",
                ) from error

    def write_results(self, trials: list[Trial], complete: bool) -> None:
        """Write all trials; `complete`: whether a resumed search has none left to run."""
        _write(self.results, {"trials": [trial.to_dict() for trial in trials]})
        if complete:
            self.note(complete=True)

    def read_results(self) -> list[Trial]:
        """Read the trials of a complete search, with the parameters as they were sampled: the file of all
        trials, which trackers copy, holds no secrets."""
        trials = [Trial(**trial) for trial in _read(self.results)["trials"]]
        for trial in trials:
            own = load_trial(self.path, trial.name)
            trial.parameters = trial.parameters if own is None else own.parameters
        return trials


def new_folder(root: Path) -> Path:
    """A path in `root` named after the time, which does not exist."""
    start = root / time.strftime("%Y-%m-%d_%H-%M-%S")
    taken, folder = 1, start
    while folder.exists():
        taken += 1
        folder = start.with_name(f"{start.name}_{taken}")
    return folder


def _read(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _write(path: Path, value: Mapping[str, Any]) -> None:
    plain = json.loads(json.dumps(value, default=repr))
    write_private(path, json.dumps(redact(plain), indent=1).encode())
