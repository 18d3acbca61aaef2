"""Renders a configuration into files that a cluster takes: one module per target, nothing of a framework."""

from __future__ import annotations
