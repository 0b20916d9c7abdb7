"""Leakage: how much of a hidden number survives in the KV cache after the turn that held it was masked."""
