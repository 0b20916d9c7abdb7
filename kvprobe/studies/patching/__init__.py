"""From which layers, slots and heads a fact is read, and from K or from V."""
