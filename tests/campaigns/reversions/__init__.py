"""Faults that this project had, put back one at a time: each turns its test red."""
