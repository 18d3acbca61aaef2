"""The example that comes with the package."""
