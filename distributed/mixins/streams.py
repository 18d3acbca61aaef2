"""StreamsMixin: where in an iterable dataset the run is, saved and found again."""

from __future__ import annotations

from typing import Any

from distributed.checkpoint.reader import PortableReader
from distributed.data import Feed
from distributed.errors import UserError
from distributed.interfaces.backend import World
from distributed.interfaces.task import Progress

__all__ = ["StreamsMixin"]


class StreamsMixin:
    """What the training loop saves of its data besides the cursor; goes before `CheckpointingMixin`.

    Attributes:
        feed: the training data.
        progress: the cursor.
        world: this rank's place.
    """

    feed: Feed
    progress: Progress
    world: World

    def _stream_state(self) -> Any:
        """What this rank saves of its stream: behind the last step, whatever was read ahead.

        Nothing at an epoch's beginning, nor for data with indices. A stream that all ranks read
        whole is at the same place on each, and rank 0's tells it.
        """
        own = self.feed.source.shards_itself
        return self.feed.state if self.progress.samples and (own or self.world.rank == 0) else None

    def _restore_stream(self, reader: PortableReader) -> None:
        """Let the epoch go on in the stream where it was saved.

        Raises:
            UserError: the stream shards itself, and other ranks were in the middle of it.
        """
        source = self.feed.source
        if source.is_map or not self.progress.samples:
            return
        if source.shards_itself and reader.world_size != self.world.size:
            raise UserError(
                f"{reader.world_size} ranks were in the middle of a dataset that shards itself, and where"
                " another number of ranks would go on in it nobody knows",
                field=source.argument,
                got=f"{self.world.size} ranks",
                allowed=f"{reader.world_size} ranks, or any number at the beginning of an epoch",
                remedy="Or let every rank read the whole stream: leave shards_itself out",
            )
        saved = reader.rank_extra(self.world.rank if source.shards_itself else 0)
        self.feed.restore((saved or {}).get("stream"))
