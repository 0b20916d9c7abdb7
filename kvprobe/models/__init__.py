"""From a name to weights that are known to work: catalogue, loading, the gate, and the plain and hooked lanes."""
