"""Mask or restart: what provenance, positions and delimiters each do to a compacted conversation."""
