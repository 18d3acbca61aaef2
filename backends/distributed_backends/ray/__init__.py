"""Ray Train as a launcher, and Ray Tune as a search engine."""
