"""Predictions about a run before it starts: memory and time of a rank. Imports no framework."""
