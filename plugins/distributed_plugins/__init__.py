"""The built-in trackers and callbacks. Each registers through an entry point."""
