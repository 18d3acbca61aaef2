"""Find plugins through entry points, and call their hooks."""
