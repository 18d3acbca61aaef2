"""Compare two backends step by step and locate the first difference."""

from distributed._moved import moved_names

__getattr__ = moved_names(__name__)
