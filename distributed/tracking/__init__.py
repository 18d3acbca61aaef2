"""Delivery of records to trackers, beside the training loop."""
