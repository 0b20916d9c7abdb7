"""A model at work: it reads, captures, generates, and runs policies and faults."""
