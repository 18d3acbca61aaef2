"""Render a configuration into files for a cluster: one module per target, no framework imported."""
