"""The conformance kit: the tests that every backend must pass. Shipped to third parties."""
