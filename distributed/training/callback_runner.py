"""CallbackRunner: the callbacks of a run, in the order of their bands."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from distributed.checkpoint.random_state import same_streams
from distributed.data import mix
from distributed.errors import UserError
from distributed.interfaces.backend import SharedSettings
from distributed.interfaces.callback import Callback, Context, listed
from distributed.interfaces.task import Task
from distributed.registry.catalog import Catalog
from distributed.training.callback_state import (
    ATTRIBUTES,
    copy_of_model,
    fingerprint,
    restore_attributes,
    save_attributes,
)
from distributed.training.held_state import HeldState
from distributed.training.seeding import seed_numbers

logger = logging.getLogger("distributed")


class CallbackRunner:
    """Calls the task's callbacks and those of plugins.

    Args:
        context: the first argument of every event.
        given: the task's callbacks.
        catalog: where plugins register theirs.

    Attributes:
        active: the callbacks that act on this rank, sorted by band; empty before `gather`.
        on_step: those that override `on_step_end`, so that a step without any costs nothing.
        held: what the other objects of the script hold; None without a task.
    """

    def __init__(self, context: Context, given: Sequence[Callback], catalog: Catalog) -> None:
        self.context, self.given, self.catalog = context, given, catalog
        self.active: list[Callback] = []
        self._guarded: SharedSettings | None = None
        self.on_step: list[Callback] = []
        self._overridden: dict[str, list[Callback]] = {}
        self._called: Callback | None = None
        self._at_start: dict[int, dict[str, Any]] = {}
        self._when_started: dict[int, dict[str, Any]] = {}
        self.held = HeldState(context) if isinstance(getattr(context, "task", None), Task) else None

    def gather(self, continues: bool = False) -> None:
        """Collect the callbacks of this rank.

        Args:
            continues: an earlier `fit` may have changed them.
        """
        found = list(self.given)
        with same_streams():
            for registered in self.catalog.manager.hook.register_callbacks(config=self.context.config):
                found += listed(registered)
        here = [c for c in found if c.all_ranks or self.context.world.rank == 0]
        self.active = sorted(here, key=lambda callback: callback.band)
        self._overridden = {
            name: [c for c in self.active if getattr(type(c), name) is not getattr(Callback, name)]
            for name in vars(Callback)
            if name.startswith("on_")
        }
        self.on_step = self._overridden["on_step_end"]
        self._at_start = (
            {} if continues else {id(callback): self._fingerprints(callback) for callback in found}
        )
        if self.held is not None:
            self.held.mark()

    def _fingerprints(self, callback: Callback) -> dict[str, Any]:
        """A value for each attribute that differs if the attribute does."""
        live, memo = self._live(), dict[int, Any]()
        return {name: fingerprint(value, live, memo) for name, value in vars(callback).items()}

    def _live(self) -> dict[int, Any]:
        return {} if self.held is None else self.held.live()

    def begin(self) -> None:
        """Notify that the run starts. What a callback sets then, it sets again in a resumed run."""
        self.notify("on_run_start")
        self._when_started = {id(callback): self._fingerprints(callback) for callback in self.active}
        if self.held is not None:
            self.held.begin()

    def check_first_step(self) -> None:
        """Check, after the first step, what the optimizer keeps."""
        if self.held is not None:
            self.held.check_first_step()

    def guard(self, settings: SharedSettings | None) -> None:
        """Refuse, from now on, a callback that changes one of `settings` where ranks would not all follow."""
        self._guarded = settings

    def notify(self, event: str, *args: Any) -> None:
        """Call method `event` of every callback that overrides it with the context and `args`.

        A callback's random numbers are its own: they follow from seed, step and event alone, and those of
        training stay as they are.
        """
        found = self._overridden.get(event)
        if found:
            enter = self.context.backend.timers.enter
            before = enter("callback")
            with same_streams():
                for callback in found:
                    self._called = callback
                    self._seed(event, callback)
                    if self._guarded is None:
                        getattr(callback, event)(self.context, *args)
                        continue
                    with self._guarded.unchanged_by(callback):
                        getattr(callback, event)(self.context, *args)
            self._called = None
            enter(before)

    def _seed(self, event: str, callback: Callback) -> None:
        step = self.context.progress.step
        seed_numbers(mix(self.context.config.seed, step, event, type(callback).__qualname__))

    def refuse_on_rank_zero(self, what: str) -> None:
        """Raise a UserError if the callback that is called acts on rank 0 alone, so that the
        collective would block.

        Args:
            what: the collective call.
        """
        if self._called is not None and not self._called.all_ranks and self.context.world.size > 1:
            raise UserError(
                f"all ranks have to call {what}, and {type(self._called).__name__} acts on rank 0 alone",
                field="callbacks",
                got="all_ranks = False",
                allowed="all_ranks = True",
                remedy="Set all_ranks = True in its class, and write files if context.world.rank == 0",
            )

    def states(self) -> list[list[Any]]:
        """``[class, state]`` of each callback that has a state."""
        with same_streams():
            states = [[type(callback).__qualname__, self._state_of(callback)] for callback in self.active]
        return [entry for entry in states if entry[1]]

    def _state_of(self, callback: Callback) -> dict[str, Any]:
        if type(callback).state_dict is not Callback.state_dict:
            return callback.state_dict()
        if all(callback is not given for given in self.given):
            return {}  # plugins save what they need
        now = self._fingerprints(callback)
        before, begun = (kept.get(id(callback), {}) for kept in (self._at_start, self._when_started))
        changed = [name for name, value in now.items() if before.get(name) != value]
        found, lost = save_attributes(vars(callback), changed, self._live())
        lost = [name for name in lost if begun and begun.get(name) != now[name]]
        if lost:
            logger.warning(
                "%s.%s is of a kind that a checkpoint cannot hold: a resumed run begins without it. Keep it"
                " as numbers, text, tensors, lists and dicts, or give the callback state_dict and"
                " load_state_dict",
                type(callback).__name__,
                lost[0],
            )
            self._when_started.pop(id(callback))  # one warning is enough
        return {ATTRIBUTES: found} if found else {}

    def restore(self, states: Sequence[list[Any]]) -> None:
        """Give each callback the next state of its class. Ranks may have different callbacks."""
        left = list(states)
        with same_streams():
            for callback in self.active:
                found = next((entry for entry in left if entry[0] == type(callback).__qualname__), None)
                if found is None:
                    continue
                left.remove(found)
                if found[1].keys() == {ATTRIBUTES}:
                    make = partial(copy_of_model, callback.all_ranks, self.context)
                    entries, device = found[1][ATTRIBUTES], self.context.world.device
                    restore_attributes(vars(callback), entries, type(callback).__name__, device, make)
                else:
                    callback.load_state_dict(found[1])

    def held_state(self) -> dict[str, Any]:
        """Return what training has changed in the other objects of the script."""
        with same_streams():
            return {} if self.held is None else self.held.save()

    def restore_held(self, saved: Mapping[str, Any]) -> None:
        """Load what `held_state` returned."""
        if self.held is not None:
            self.held.restore(saved)
