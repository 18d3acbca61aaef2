"""A run's record, and the pages made of it. Nothing here imports a framework."""
