"""The small, torch-free types that every room of the house agrees on."""
