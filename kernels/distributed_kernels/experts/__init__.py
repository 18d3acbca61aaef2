"""Mixtures of experts: top-k routing, experts of stacked weights, tokens exchanged between ranks."""
