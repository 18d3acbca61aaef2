"""Start ranks, or join those that a launcher started."""

from distributed._moved import moved_names

__getattr__ = moved_names(__name__)
