"""Read the record of a run and write HTML pages from it; no framework is imported."""
