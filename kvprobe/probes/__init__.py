"""Published probes: their weights and cards, and what they read in a conversation."""
