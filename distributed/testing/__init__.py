"""The conformance kit: what a backend must pass to be one. Shipped to third parties."""
