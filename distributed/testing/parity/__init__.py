"""Compare two backends step by step and locate the first difference."""
