"""A model at work: it reads tokens, captures what layers compute, generates, and runs policies and faults."""
