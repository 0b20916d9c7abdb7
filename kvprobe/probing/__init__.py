"""Linear probes: what can be read from a cache, by whom, and at what chance level."""
