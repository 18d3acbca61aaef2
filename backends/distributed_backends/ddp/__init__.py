"""PyTorch DistributedDataParallel."""
