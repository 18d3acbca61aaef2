"""The version, read by the build and by `doctor`."""

__version__ = "0.1.0"
