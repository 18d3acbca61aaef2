"""Configuration: one pydantic tree, and where its values come from."""

from distributed.config.load import Layer, explain, load, load_layers, parse_assignments, read_file
from distributed.config.schema import DistributedConfig
from distributed.config.sections import NativeField, Section

__all__ = [
    "DistributedConfig",
    "Layer",
    "NativeField",
    "Section",
    "explain",
    "load",
    "load_layers",
    "parse_assignments",
    "read_file",
]
