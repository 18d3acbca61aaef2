"""Run the trials of a search on Ray."""
