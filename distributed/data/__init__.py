"""Global order, sharding and cursor: which rank sees which sample, and when (C3, C4, C5).

`Source` describes the user's data and travels to the ranks; `Feed` deals it out there.
"""

from distributed.data.feed import Feed
from distributed.data.order import epoch_seed, mix, share, split_window
from distributed.data.source import Source, validation_sources

__all__ = ["Feed", "Source", "epoch_seed", "mix", "share", "split_window", "validation_sources"]
