"""PyTorch DistributedDataParallel."""

from distributed._moved import moved_names

__getattr__ = moved_names(__name__)
