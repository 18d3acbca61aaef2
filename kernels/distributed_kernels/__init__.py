"""Attention and sketched-layer kernels; they import torch alone."""
