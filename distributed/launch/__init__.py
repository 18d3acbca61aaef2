"""Start ranks, or join those that a launcher started."""
