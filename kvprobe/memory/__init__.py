"""What a model needs memory for, from its config alone: arithmetic without weights and without torch."""
