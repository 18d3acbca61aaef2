"""EventsMixin: the run's callbacks, in their order."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from distributed.interfaces.callback import Callback

if TYPE_CHECKING:
    from distributed.config import DistributedConfig
    from distributed.interfaces.placement import World
    from distributed.interfaces.task import Task
    from distributed.registry.catalog import Catalog
    from distributed.training.phase_timers import PhaseTimers

__all__ = ["EventsMixin"]


class EventsMixin:
    """Callbacks for the training loop's per-rank class: the task's and the plugins'."""

    catalog: Catalog
    config: DistributedConfig
    task: Task
    timers: PhaseTimers
    world: World
    _stop_reason: str | None

    def request_stop(self, reason: str) -> None:
        self._stop_reason = self._stop_reason or reason

    def callback_states(self) -> list[list[Any]]:
        """``[class, state]`` of each callback that has any."""
        states = [[type(callback).__qualname__, callback.state_dict()] for callback in self.callbacks]
        return [entry for entry in states if entry[1]]

    def restore_callbacks(self, states: list[list[Any]]) -> None:
        """Give each callback the next state of its class. Ranks have different callbacks."""
        left = list(states)
        for callback in self.callbacks:
            found = next((entry for entry in left if entry[0] == type(callback).__qualname__), None)
            if found is not None:
                left.remove(found)
                callback.load_state_dict(found[1])

    def _gather_callbacks(self) -> None:
        found: list[Callback] = list(self.task.callbacks)
        for registered in self.catalog.manager.hook.register_callbacks(config=self.config):
            found += registered
        here = [c for c in found if c.all_ranks or self.world.rank == 0]
        self.callbacks = sorted(here, key=lambda callback: callback.band)
        self._overridden = {
            name: [c for c in self.callbacks if getattr(type(c), name) is not getattr(Callback, name)]
            for name in vars(Callback)
            if name.startswith("on_")
        }
        self._step_callbacks = self._overridden["on_step_end"]

    def _notify(self, event: str, *args: Any) -> None:
        found = getattr(self, "_overridden", {}).get(event)
        if found:
            before = self.timers.enter("callback")
            for callback in found:
                getattr(callback, event)(*args)
            self.timers.enter(before)
