"""Bands: which layers can bear noise, and how much of that is the noise's scale."""
