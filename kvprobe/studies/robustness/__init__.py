"""Robustness: what each fault of the cache costs, by how much of it is struck."""
