"""Ranks that train on their own between outer steps: local SGD, DiLoCo, streaming DiLoCo."""
