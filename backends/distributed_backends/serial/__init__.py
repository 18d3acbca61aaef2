"""The serial backend: one process, plain PyTorch."""
