"""What several hosts find out about each other before a run: see `measure.survey`."""
