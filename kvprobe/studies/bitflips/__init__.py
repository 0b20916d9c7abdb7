"""Bit flips: what a single flipped bit does, by its place in the number."""
