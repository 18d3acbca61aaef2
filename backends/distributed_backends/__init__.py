"""The built-in backends. Each registers through an entry point, like a third party's."""
