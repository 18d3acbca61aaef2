"""Models and loaders of other libraries, trained by every backend and by plain PyTorch."""
