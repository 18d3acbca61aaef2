"""The portable checkpoint format: written by any backend, read by any other, never unpickled."""
