"""Detect, diagnose, report and survive failures of ranks and hosts."""
