"""From a name to a model that is proved to work: catalogue, loading, the gate, and the plain and hooked lanes."""
