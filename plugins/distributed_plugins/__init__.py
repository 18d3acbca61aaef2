"""The built-in trackers and callbacks. Each registers through an entry point."""

import distributed._moved  # noqa: F401  # old module paths of this package
