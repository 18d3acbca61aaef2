"""Gradient codecs: what the ranks send instead of a dense gradient."""
