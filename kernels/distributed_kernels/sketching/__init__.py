"""Sketched and factorized layers."""
