"""The built-in backends. Each registers through an entry point, like a third party's."""

import distributed._moved  # noqa: F401  # old module paths of this package
