"""CheckpointingMixin: checkpoints for a training loop."""

from __future__ import annotations

from distributed.training.saving import Saver


class CheckpointingMixin:
    """Holds a `Saver` as `saver`. All methods are collective."""

    saver: Saver

    def save_now(self) -> str | None:
        """Save at this step, whatever the frequency; returns the path, None when nothing was saved."""
        return self.saver.save_now()

    def finish_saving(self) -> str | None:
        """Wait until the save in progress is committed; returns its path, None when there is none."""
        return self.saver.finish()

    def export_to(self, directory: str) -> str:
        """Write the state as a portable checkpoint into `directory`; returns its path."""
        return self.saver.export_to(directory)
