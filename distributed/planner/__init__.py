"""Turn a configuration into a plan of the run; no framework is imported."""
