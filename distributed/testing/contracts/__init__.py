"""The contracts that a backend must keep, as test classes."""
