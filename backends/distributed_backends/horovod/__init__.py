"""Horovod, for PyTorch models."""
