"""Ranks that share a model: the mesh, tensor parallelism, and what backends need on a mesh."""
