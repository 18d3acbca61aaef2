"""Measure how throughput depends on the number of ranks."""
